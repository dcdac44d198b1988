// The graph pass's part for blocks that run on a device: twins in place of weights, and the nodes that fill slots and stages.
#pragma once

#include "device_tier.h"
#include "ops.h"

#include <functional>

namespace ls {

class DevicePass {
public:
    // new_node(input, params, fun): a node of the host that runs where it is made, before the node at hand
    using NewNode = std::function<ggml_tensor *(ggml_tensor * input, const OpParams & params, ggml_custom_op_t fun, void * userdata)>;

    // nodes: the graph's, up to the one at hand
    DevicePass(Weights & weights, DeviceTier * tier, ggml_context * ctx0, std::vector<ggml_tensor *> & nodes, NewNode new_node)
        : weights_(weights), tier_(tier), ctx0_(ctx0), nodes_(nodes), new_node_(std::move(new_node)) {}

    // Is this weight used on the device by this node? Then place() has it replaced and the host's pass need not look at it.
    bool takes(const Weight & w, const ggml_tensor * node) const;
    // Replace the source's weight by what the device reads.
    void place(ggml_tensor * node, int source, const Weight & w);

private:
    void acquire(const Weight & w);
    ggml_tensor * slot_ids(const Weight & w, ggml_tensor * ids, ggml_tensor * input);
    ggml_tensor * rank_ahead(uint32_t layer, ggml_tensor * input);

    Weights & weights_;
    DeviceTier * tier_;
    ggml_context * ctx0_;
    std::vector<ggml_tensor *> & nodes_;
    NewNode new_node_;
    int32_t acquired_ = -1; // streamed block
    struct Selected { const ggml_tensor * ids; int32_t layer; ggml_tensor * remapped; };
    std::vector<Selected> selected_;
};

} // namespace ls
