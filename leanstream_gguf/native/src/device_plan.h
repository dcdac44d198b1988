// What a budget of device memory buys: which blocks' matrices stay on the device, how many slots each layer's experts get.
// A pure function, like plan.h, whose budget is the host's.
#pragma once

#include <cstdint>
#include <vector>

namespace ls {

struct DevicePlanInput {
    struct Experts {
        uint32_t n_experts = 0;
        uint64_t expert_bytes = 0; // one expert's parts, rounded up
        uint64_t stack_bytes = 0;  // all experts of the layer, as the device allocates the stacked tensors
    };

    uint64_t fixed_bytes = 0;    // the driver's own, KV, compute buffers, margin
    uint64_t resident_bytes = 0; // norms, biases, routers, output matrix
    std::vector<uint64_t> block_bytes; // matrices of each block on the device, in graph order
    std::vector<Experts>  layers;      // [moe layer]; n_experts 0 = the layer's experts are not on the device
    uint32_t n_expert_used = 0;
    uint64_t budget_bytes = 0;   // 0 = no bound
};

struct DevicePlan {
    static constexpr uint32_t kStages = 2; // one is filled while the other is computed with

    uint64_t budget_bytes = 0;
    uint64_t minimum_bytes = 0;
    uint64_t full_bytes = 0;
    std::vector<bool> pinned;      // [block] its matrices stay on the device
    uint64_t pinned_bytes = 0;
    uint32_t n_block_stages = 0;   // for the matrices of the other blocks; 0 = none needed
    uint64_t block_stage_bytes = 0;
    std::vector<uint32_t> n_slots; // [moe layer] experts that fit at once; n_experts = all, nothing moves
    uint64_t slots_bytes = 0;
    uint32_t n_expert_stages = 0;  // for batches: room for all experts of a layer
    uint64_t expert_stage_bytes = 0;
    uint64_t used_bytes = 0;       // all of the above with what is fixed: never more than the budget

    bool streams() const { return n_block_stages > 0 || n_expert_stages > 0; }
};

// Throws Error(LS_ERR_BUDGET) if budget_bytes is below the minimum.
DevicePlan make_device_plan(const DevicePlanInput & in);

} // namespace ls
