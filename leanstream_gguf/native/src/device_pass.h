// The graph pass's part for blocks that run on a device: twins in place of weights, the nodes that fill slots and stages, and,
// where missing experts may be computed on the host, a copy of each layer's products there.
#pragma once

#include "device_tier.h"
#include "ops.h"

#include <functional>
#include <unordered_map>

namespace ls {

class DevicePass {
public:
    // Nodes of the host, which run where they are made, before the node at hand.
    struct Host {
        // a custom node; all_threads: else one
        std::function<ggml_tensor *(ggml_tensor * input, const OpParams & params, ggml_custom_op_t fun, void * userdata, bool all_threads)> new_node;
        // takes this MUL_MAT_ID as the host's, part of the run that `select` begins, whose number it returns
        std::function<int8_t(ggml_tensor * product, const Weight & w, ggml_tensor * select)> add_product;
        // takes this node of llama.cpp's as the host's
        std::function<void(ggml_tensor * node)> add_node;
    };

    // nodes: the graph's, up to the one at hand
    DevicePass(Weights & weights, DeviceTier * tier, ggml_context * ctx0, std::vector<ggml_tensor *> & nodes, Host host)
        : weights_(weights), tier_(tier), ctx0_(ctx0), nodes_(nodes), host_(std::move(host)) {}

    // Is this weight used on the device by this node? Then place() has it replaced and the host's pass need not look at it.
    bool takes(const Weight & w, const ggml_tensor * node) const;
    // Replace the source's weight by what the device reads.
    void place(ggml_tensor * node, int source, const Weight & w);

private:
    struct Product { ggml_tensor * node; const Weight * weight; };
    struct Selected {
        ggml_tensor * ids;
        int32_t layer;
        ggml_tensor * remapped;        // the ids to use with the slots, or nullptr if the layer's stage is used with the router's own
        ggml_tensor * select;
        std::vector<Product> products; // that use slots
    };

    void acquire(const Weight & w);
    Selected & selected(const Weight & w, ggml_tensor * ids, ggml_tensor * input);
    ggml_tensor * rank_ahead(uint32_t layer, ggml_tensor * input);
    void add_host_part(Selected & s);
    bool made_of_products(const Selected & s, const ggml_tensor * t, int depth = 0) const;
    ggml_tensor * copy_for_host(Selected & s, ggml_tensor * t);
    ggml_tensor * copy_of(const ggml_tensor * t, const char * prefix);
    bool has_room(size_t n_nodes) const;
    void push(ggml_tensor * t);

    Weights & weights_;
    DeviceTier * tier_;
    ggml_context * ctx0_;
    std::vector<ggml_tensor *> & nodes_;
    Host host_;
    int32_t acquired_ = -1; // streamed block
    std::vector<Selected> selected_;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> host_copies_;
};

} // namespace ls
