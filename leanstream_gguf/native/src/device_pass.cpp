#include "device_pass.h"

#include "status.h"

#include "ggml-impl.h"

#include <algorithm>

namespace ls {

bool DevicePass::has_room(size_t n_nodes) const {
    return ggml_get_mem_size(ctx0_) - ggml_used_mem(ctx0_) >= n_nodes * ggml_tensor_overhead();
}

void DevicePass::push(ggml_tensor * t) {
    t->flags |= GGML_TENSOR_FLAG_COMPUTE;
    nodes_.push_back(t);
}

bool DevicePass::takes(const Weight & w, const ggml_tensor * node) const {
    // the token embedding may be looked up on the host and multiplied with on the device
    const bool lookup = node->op == GGML_OP_GET_ROWS && block_of(w.entry->name) < 0;
    return tier_ && w.on_device && !lookup && tier_->twin(w);
}

void DevicePass::acquire(const Weight & w) {
    const int32_t b = tier_->streamed_block(block_of(w.entry->name));
    if (w.use != Use::dense || b < 0 || b == acquired_) {
        return;
    }
    OpParams p = {};
    p.index = b;
    ggml_format_name(host_.new_node(nullptr, p, op_device_acquire, nullptr, false), "leanstream_copy_block_%d", b);
    acquired_ = b;
}

// The router of the layer after the next, applied to this layer's input: which experts to copy while the layers between are computed.
// int32 [n_experts, n_tokens], the likeliest first; nullptr where it cannot be made. It moves copies in time and no result.
ggml_tensor * DevicePass::rank_ahead(uint32_t layer, ggml_tensor * input) {
    const int32_t ahead = tier_->layer_to_rank(layer);
    const ggml_tensor * rows = input->view_src ? input->view_src : input;
    const Weight * router = ahead < 0 ? nullptr : weights_.find_name(format("blk.%d.ffn_gate_inp.weight", weights_.moe_layers[size_t(ahead)].block));
    if (!router || !router->on_device || !tier_->twin(*router) || rows->type != GGML_TYPE_F32 || ggml_n_dims(rows) > 2 ||
        rows->ne[0] != router->tensor->ne[0] || rows->ne[1] != input->ne[2] || input->ne[1] != 1 || !has_room(4)) {
        return nullptr;
    }
    ggml_tensor * scores = ggml_mul_mat(ctx0_, tier_->twin(*router), const_cast<ggml_tensor *>(rows));
    ggml_tensor * ranked = ggml_argsort(ctx0_, scores, GGML_SORT_ORDER_DESC);
    push(scores);
    push(ranked);
    ggml_format_name(ranked, "leanstream_ahead_%d", ahead);
    ggml_set_output(ranked); // read between two of llama.cpp's splits: its memory must not be used again
    return ranked;
}

DevicePass::Selected & DevicePass::selected(const Weight & w, ggml_tensor * ids, ggml_tensor * input) {
    for (Selected & s : selected_) {
        if (s.ids == ids && s.layer == w.layer) {
            return s;
        }
    }
    const uint32_t layer = uint32_t(w.layer);
    ggml_tensor * remapped = tier_->uses_slots(layer, ids->ne[0], ids->ne[1]) ? tier_->ids(layer, ids->ne[0], ids->ne[1]) : nullptr;
    OpParams p = {};
    p.index = w.layer;
    p.run   = -1;
    ggml_tensor * ranked = remapped ? rank_ahead(layer, input) : nullptr;
    ggml_tensor * node = host_.new_node(ids, p, remapped ? op_device_select : op_device_stage, ranked, remapped && tier_->inexact());
    ggml_format_name(node, "leanstream_copy_experts_%d", w.layer);
    selected_.push_back({ids, w.layer, remapped, node, {}});
    return selected_.back();
}

// ---- experts computed on the host -----------------------------------------------------------------------------------

ggml_tensor * DevicePass::copy_of(const ggml_tensor * t, const char * prefix) {
    ggml_tensor * copy = ggml_dup_tensor(ctx0_, t);
    std::copy_n(t->nb, GGML_MAX_DIMS, copy->nb);
    std::copy_n(t->src, GGML_MAX_SRC, copy->src);
    memcpy(copy->op_params, t->op_params, sizeof(t->op_params));
    copy->op        = t->op;
    copy->flags     = t->flags;
    copy->view_offs = t->view_offs;
    ggml_format_name(copy, "%s%s", prefix, t->name);
    return copy;
}

// Nothing but the layer's products goes into it, by way of operations without weights. A bias lies on the device; and with views of
// one merged product the sum was wrong on CUDA, though not on Vulkan: such layers are left alone.
bool DevicePass::made_of_products(const Selected & s, const ggml_tensor * t, int depth) const {
    constexpr int kDepth = 8;
    if (std::any_of(s.products.begin(), s.products.end(), [&](const Product & p) { return p.node == t; })) {
        return true;
    }
    const bool known = t->op == GGML_OP_GLU || t->op == GGML_OP_UNARY || t->op == GGML_OP_MUL ||
        t->op == GGML_OP_SCALE || t->op == GGML_OP_CLAMP || t->op == GGML_OP_SQR;
    return known && depth < kDepth &&
        std::all_of(t->src, t->src + GGML_MAX_SRC, [&](const ggml_tensor * src) { return !src || made_of_products(s, src, depth + 1); });
}

ggml_tensor * DevicePass::copy_for_host(Selected & s, ggml_tensor * t) {
    if (const auto known = host_copies_.find(t); known != host_copies_.end()) {
        return known->second;
    }
    ggml_tensor * copy = copy_of(t, "leanstream_host_");
    const auto product = std::find_if(s.products.begin(), s.products.end(), [&](const Product & p) { return p.node == t; });
    if (product != s.products.end()) {
        copy->src[0] = product->weight->tensor;
        copy->src[1] = made_of_products(s, t->src[1]) ? copy_for_host(s, t->src[1]) : t->src[1];
        copy->src[2] = s.ids;
        OpParams p = op_params(s.select);
        p.run = host_.add_product(copy, *product->weight, s.select);
        memcpy(s.select->op_params, &p, sizeof(p));
    } else {
        for (int i = 0; i < GGML_MAX_SRC && t->src[i]; ++i) {
            copy->src[i] = copy_for_host(s, t->src[i]);
        }
        host_.add_node(copy);
    }
    return host_copies_[t] = copy;
}

// After the layer's last product: it becomes the sum of what the device computes, without the rows that are the host's, and what
// the host does. The host works on its rows while the device is busy with the others.
void DevicePass::add_host_part(Selected & s) {
    constexpr size_t kNodes = 24; // more than any layer's copies
    ggml_tensor * last = s.products.back().node;
    if (!made_of_products(s, last->src[1]) || !has_room(kNodes)) {
        return;
    }
    s.select->src[1] = s.products.front().node->src[1]; // is on the host by then, so that the device need not be waited for
    ggml_tensor * on_device = copy_of(last, "leanstream_device_");
    push(on_device);
    ggml_tensor * kept = ggml_mul(ctx0_, on_device, tier_->mask(uint32_t(s.layer), s.ids->ne[1]));
    push(kept);
    ggml_tensor * on_host = copy_for_host(s, last);
    std::fill_n(last->src, GGML_MAX_SRC, nullptr);
    memset(last->op_params, 0, sizeof(last->op_params));
    last->op     = GGML_OP_ADD;
    last->src[0] = kept;
    last->src[1] = on_host;
}

void DevicePass::place(ggml_tensor * node, int source, const Weight & w) {
    ggml_tensor * twin = tier_->twin(w);
    if (w.use == Use::expert && tier_->streams_layer(uint32_t(w.layer))) {
        Selected & s = selected(w, node->src[2], node->src[1]);
        if (s.remapped) {
            node->src[0] = tier_->slots(w);
            node->src[2] = s.remapped;
            s.products.push_back({node, &w});
            if (tier_->inexact() && s.products.size() == weights_.moe_layers[size_t(w.layer)].parts.size()) {
                add_host_part(s);
            }
            return;
        }
    }
    acquire(w);
    node->src[source] = twin;
    if (node->view_src == w.tensor) {
        node->view_src = twin;
        node->data     = twin->data ? (char *) twin->data + node->view_offs : nullptr;
    }
}

} // namespace ls
