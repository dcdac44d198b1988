#include "guess_points.h"

#include "engine.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <string>

namespace ls {

namespace {

bool is_one_row(const ggml_tensor * residual) {
    return residual && residual->type == GGML_TYPE_F32 && ggml_nrows(residual) == 1 && ggml_is_contiguous(residual);
}

void add(GuessPoints & points, const ggml_tensor * residual, size_t layer, uint8_t lead) {
    if (is_one_row(residual)) {
        points.at[residual].push_back({int32_t(layer), lead});
    }
}

// the expert weight that a node multiplies with, or nullptr
const Weight * expert_weight(Engine & engine, ggml_backend_buffer_type_t buffer_type, const ggml_tensor * node) {
    const ggml_tensor * src = node->op == GGML_OP_MUL_MAT_ID ? node->src[0] : nullptr;
    const Weight * w = src && src->buffer && src->buffer->buft == buffer_type ? engine.weights.find(src) : nullptr;
    return w && w->use == Use::expert ? w : nullptr;
}

} // namespace

GuessPoints find_guess_points(Engine & engine, ggml_backend_buffer_type_t buffer_type, const ggml_cgraph * graph) {
    struct Layer { const ggml_tensor * input = nullptr; ggml_tensor * before_ffn = nullptr; bool seen = false, routed = false; };
    GuessPoints points;
    std::vector<Layer> layers(engine.weights.moe_layers.size());
    std::unordered_map<std::string, const ggml_tensor *> by_name;
    for (int i = 0; i < graph->n_nodes; ++i) {
        const ggml_tensor * node = graph->nodes[i];
        by_name.emplace(node->name, node);
        const Weight * w = expert_weight(engine, buffer_type, node);
        if (!w || layers[size_t(w->layer)].seen || node->src[2]->ne[1] != 1) {
            continue;
        }
        Layer & layer = layers[size_t(w->layer)];
        layer.seen = true;
        const ggml_tensor * logits = nullptr;
        const Router router = find_router(node->src[2], logits);
        engine.note_router(uint32_t(w->layer), router);
        if (!router.matrix) {
            continue;
        }
        layer.routed = true;
        points.logits[node->src[2]] = logits;
        ggml_tensor * x = logits->src[1];
        layer.before_ffn = router.norm ? x->src[0]->src[0] : x;
        const int32_t block = engine.weights.moe_layers[size_t(w->layer)].block;
        const auto input = by_name.find(block == 0 ? "embd" : "l_out-" + std::to_string(block - 1));
        layer.input = input == by_name.end() ? nullptr : input->second;
    }
    points.before_ffn.assign(layers.size(), nullptr);
    for (size_t l = 0; l < layers.size(); ++l) {
        points.before_ffn[l] = is_one_row(layers[l].before_ffn) ? layers[l].before_ffn : nullptr;
        if (layers[l].routed) {
            add(points, layers[l].input, l, kLeadBlock);
            add(points, l >= 1 ? layers[l - 1].before_ffn : nullptr, l, kLeadLayer);
            add(points, l >= 2 ? layers[l - 2].before_ffn : nullptr, l, kLeadLayers);
        }
    }
    return points;
}

} // namespace ls
