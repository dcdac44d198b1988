#include "device_pass.h"

#include "status.h"

#include "ggml-impl.h"

namespace ls {

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
    ggml_format_name(new_node_(nullptr, p, op_device_acquire, nullptr), "leanstream_copy_block_%d", b);
    acquired_ = b;
}

// The router of the layer after the next, applied to this layer's input: which experts to copy while the layers between are computed.
// int32 [n_experts, n_tokens], the likeliest first; nullptr where it cannot be made. It moves copies in time and no result.
ggml_tensor * DevicePass::rank_ahead(uint32_t layer, ggml_tensor * input) {
    const int32_t ahead = tier_->layer_to_rank(layer);
    const ggml_tensor * rows = input->view_src ? input->view_src : input;
    const Weight * router = ahead < 0 ? nullptr : weights_.find_name(format("blk.%d.ffn_gate_inp.weight", weights_.moe_layers[size_t(ahead)].block));
    if (!router || !router->on_device || !tier_->twin(*router) || rows->type != GGML_TYPE_F32 || ggml_n_dims(rows) > 2 ||
        rows->ne[0] != router->tensor->ne[0] || rows->ne[1] != input->ne[2] || input->ne[1] != 1 ||
        ggml_get_mem_size(ctx0_) - ggml_used_mem(ctx0_) < 4 * ggml_tensor_overhead()) {
        return nullptr;
    }
    ggml_tensor * scores = ggml_mul_mat(ctx0_, tier_->twin(*router), const_cast<ggml_tensor *>(rows));
    ggml_tensor * ranked = ggml_argsort(ctx0_, scores, GGML_SORT_ORDER_DESC);
    for (ggml_tensor * t : {scores, ranked}) {
        t->flags |= GGML_TENSOR_FLAG_COMPUTE;
        nodes_.push_back(t);
    }
    ggml_format_name(ranked, "leanstream_ahead_%d", ahead);
    ggml_set_output(ranked); // read between two of llama.cpp's splits: its memory must not be used again
    return ranked;
}

// The ids to use with the slots, or nullptr if the layer's stage is used with the router's own.
ggml_tensor * DevicePass::slot_ids(const Weight & w, ggml_tensor * ids, ggml_tensor * input) {
    for (const Selected & s : selected_) {
        if (s.ids == ids && s.layer == w.layer) {
            return s.remapped;
        }
    }
    const uint32_t layer = uint32_t(w.layer);
    ggml_tensor * remapped = tier_->uses_slots(layer, ids->ne[0], ids->ne[1]) ? tier_->ids(layer, ids->ne[0], ids->ne[1]) : nullptr;
    OpParams p = {};
    p.index = w.layer;
    ggml_tensor * ranked = remapped ? rank_ahead(layer, input) : nullptr;
    ggml_tensor * node = new_node_(ids, p, remapped ? op_device_select : op_device_stage, ranked);
    ggml_format_name(node, "leanstream_copy_experts_%d", w.layer);
    selected_.push_back({ids, w.layer, remapped});
    return remapped;
}

void DevicePass::place(ggml_tensor * node, int source, const Weight & w) {
    ggml_tensor * twin = tier_->twin(w);
    if (w.use == Use::expert && tier_->streams_layer(uint32_t(w.layer))) {
        if (ggml_tensor * ids = slot_ids(w, node->src[2], node->src[1])) {
            node->src[2] = ids;
            twin = tier_->slots(w);
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
