#include "neuron_pass.h"

#include "neurons.h"
#include "weights.h"

#include "ggml-impl.h"

#include <cstring>
#include <unordered_map>

namespace ls {

namespace {

struct Finder {
    const ggml_cgraph * graph;
    Weights & weights;
    const NeuronStore & store;
    std::unordered_map<const ggml_tensor *, int> n_uses = {};

    Weight * neurons_weight(const ggml_tensor * node) const {
        Weight * w = node->op == GGML_OP_MUL_MAT ? weights.find(node->src[0]) : nullptr;
        return w && w->use == Use::neurons ? w : nullptr;
    }

    [[noreturn]] static void refuse(const Weight & w, const char * why) {
        throw Error(LS_ERR_UNSUPPORTED, format("'%s' is stored neuron by neuron, but this model %s; use the file it was made from "
            "(leanstream unpack restores it)", w.entry->name.c_str(), why));
    }

    static bool is_down(const Weight & w) { return w.entry->name.find("ffn_down.weight") != std::string::npos; }

    void count_uses() {
        for (int i = 0; i < graph->n_nodes; ++i) {
            for (const ggml_tensor * src : graph->nodes[i]->src) {
                if (src) {
                    n_uses[src]++;
                }
            }
        }
    }

    void only_here(const Weight & w, const ggml_tensor * node) {
        if (n_uses[node] != 1 || (node->flags & GGML_TENSOR_FLAG_OUTPUT)) {
            refuse(w, "uses its activations in more than one place");
        }
    }

    // the activation that a GLU applies to its first half
    static ggml_unary_op activation_of(const ggml_tensor * glu) {
        switch (ggml_get_glu_op(glu)) {
            case GGML_GLU_OP_REGLU:       return GGML_UNARY_OP_RELU;
            case GGML_GLU_OP_GEGLU:       return GGML_UNARY_OP_GELU;
            case GGML_GLU_OP_SWIGLU:      return GGML_UNARY_OP_SILU;
            case GGML_GLU_OP_GEGLU_ERF:   return GGML_UNARY_OP_GELU_ERF;
            case GGML_GLU_OP_GEGLU_QUICK: return GGML_UNARY_OP_GELU_QUICK;
            default:                      return GGML_UNARY_OP_COUNT;
        }
    }

    // layout faithful: the product with the deciding projection of down's block
    ggml_tensor * deciding_of(const Weight & down, const NeuronShape & s) const {
        const char * name = s.gated ? "ffn_gate.weight" : "ffn_up.weight";
        for (int i = 0; i < graph->n_nodes; ++i) {
            const Weight * w = neurons_weight(graph->nodes[i]);
            if (w && w->block() == down.block() && w->entry->name.find(name) != std::string::npos) {
                const ggml_tensor * x = graph->nodes[i]->src[1];
                if (x->type != GGML_TYPE_F32 || x->ne[2] != 1 || x->ne[3] != 1 || x->nb[0] != sizeof(float)) {
                    refuse(down, "gives its deciding projection its input in another form");
                }
                return graph->nodes[i];
            }
        }
        refuse(down, "does not use its deciding projection");
    }

    NeuronMatch match(ggml_tensor * down, Weight & w) {
        NeuronMatch m;
        m.down  = down;
        m.layer = store.layer_of_block(w.block());
        const NeuronShape & s = *store.layer(uint32_t(m.layer))->shape;
        m.deciding = s.deciding.present() ? deciding_of(w, s) : nullptr;
        ggml_tensor * h = down->src[1];
        if (h->type != GGML_TYPE_F32 || h->ne[2] != 1 || h->ne[3] != 1 || h->nb[0] != sizeof(float)) {
            refuse(w, "gives it its activations in another form");
        }
        only_here(w, h);
        if (!s.gated) {
            m.a = h;
            return m;
        }
        if (h->op == GGML_OP_GLU && h->src[1]) {
            m.a  = h;
            m.up = h->src[1];
            m.activation = activation_of(h);
        } else if (h->op == GGML_OP_MUL && ggml_are_same_shape(h->src[0], h->src[1])) {
            const bool up_first = neurons_weight(h->src[0]) != nullptr;
            m.a  = h->src[up_first ? 1 : 0];
            m.up = h->src[up_first ? 0 : 1];
            m.product = h;
            only_here(w, m.a);
        }
        const Weight * up = m.up ? neurons_weight(m.up) : nullptr;
        if (!up || up->block() != w.block() || is_down(*up) || (!m.product && m.activation == GGML_UNARY_OP_COUNT)) {
            refuse(w, "combines gate and up projection in an unknown way");
        }
        const ggml_tensor * x = m.up->src[1];
        if (x->type != GGML_TYPE_F32 || x->ne[2] != 1 || x->ne[3] != 1 || x->nb[0] != sizeof(float)) {
            refuse(w, "gives its up projection its input in another form");
        }
        only_here(w, m.up);
        return m;
    }
};

} // namespace

std::vector<NeuronMatch> find_neurons(const ggml_cgraph * graph, Weights & weights, const NeuronStore & store) {
    std::vector<NeuronMatch> found;
    if (store.empty()) {
        return found;
    }
    Finder f = { graph, weights, store };
    f.count_uses();
    std::unordered_map<const ggml_tensor *, bool> taken;
    for (int i = 0; i < graph->n_nodes; ++i) {
        Weight * w = f.neurons_weight(graph->nodes[i]);
        if (w && Finder::is_down(*w)) {
            found.push_back(f.match(graph->nodes[i], *w));
            taken[found.back().down] = taken[found.back().up] = taken[found.back().deciding] = true;
        }
    }
    for (int i = 0; i < graph->n_nodes; ++i) {
        for (const ggml_tensor * src : graph->nodes[i]->src) {
            const Weight * w = src ? weights.find(src->view_src ? src->view_src : src) : nullptr;
            if (w && w->use == Use::neurons && !taken[graph->nodes[i]]) {
                Finder::refuse(*w, "uses it outside a feed-forward layer");
            }
        }
    }
    return found;
}

void make_activation(NeuronMatch & m) {
    ggml_tensor * glu = m.a;
    const int32_t op = m.activation;
    memset(glu->op_params, 0, sizeof(glu->op_params));
    memcpy(glu->op_params, &op, sizeof(op));
    glu->op = GGML_OP_UNARY;
    glu->src[1] = nullptr;
}

} // namespace ls
