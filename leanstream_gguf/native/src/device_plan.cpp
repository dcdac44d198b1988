#include "device_plan.h"

#include "plan.h"
#include "status.h"

#include <algorithm>
#include <numeric>

namespace ls {

namespace {

constexpr uint64_t MiB = 1u << 20;

uint32_t min_slots(const DevicePlanInput & in, const DevicePlanInput::Experts & l) {
    return std::min(in.n_expert_used, l.n_experts);
}

struct Totals {
    uint64_t dense = 0, largest_block = 0, experts = 0, largest_stack = 0, min_slots = 0;
};

Totals totals(const DevicePlanInput & in) {
    Totals t;
    for (uint64_t b : in.block_bytes) {
        t.dense += b;
        t.largest_block = std::max(t.largest_block, b);
    }
    for (const DevicePlanInput::Experts & l : in.layers) {
        t.experts += l.stack_bytes;
        t.largest_stack = std::max(t.largest_stack, l.stack_bytes);
        t.min_slots += min_slots(in, l) * l.expert_bytes;
    }
    return t;
}

void pin_blocks(const DevicePlanInput & in, DevicePlan & plan, uint64_t available) {
    for (uint32_t b : pin_order(uint32_t(in.block_bytes.size()))) {
        if (plan.pinned_bytes + in.block_bytes[b] <= available) {
            plan.pinned[b] = true;
            plan.pinned_bytes += in.block_bytes[b];
        }
    }
}

// Equal shares: every token uses as many experts of one layer as of another.
void share_slots(const DevicePlanInput & in, DevicePlan & plan, uint64_t available) {
    for (size_t i = 0; i < in.layers.size(); ++i) {
        plan.n_slots[i] = min_slots(in, in.layers[i]);
        plan.slots_bytes += plan.n_slots[i] * in.layers[i].expert_bytes;
    }
    for (bool any = true; any;) {
        any = false;
        for (size_t i = 0; i < in.layers.size(); ++i) {
            const DevicePlanInput::Experts & l = in.layers[i];
            if (plan.n_slots[i] < l.n_experts && plan.slots_bytes + l.expert_bytes <= available) {
                plan.n_slots[i]++;
                plan.slots_bytes += l.expert_bytes;
                any = true;
            }
        }
    }
}

void place_experts(const DevicePlanInput & in, const Totals & t, DevicePlan & plan, uint64_t available) {
    plan.n_slots.assign(in.layers.size(), 0);
    if (available >= t.experts) {
        for (size_t i = 0; i < in.layers.size(); ++i) {
            plan.n_slots[i] = in.layers[i].n_experts;
        }
        plan.slots_bytes = t.experts;
        return;
    }
    // The second stage lets a layer's experts arrive during the layer before; not where slots would be few.
    const bool second = available >= DevicePlan::kStages * t.largest_stack + std::max(t.min_slots, t.experts / 8);
    plan.n_expert_stages    = second ? DevicePlan::kStages : 1;
    plan.expert_stage_bytes = t.largest_stack;
    share_slots(in, plan, available - plan.n_expert_stages * t.largest_stack);
}

} // namespace

DevicePlan make_device_plan(const DevicePlanInput & in) {
    DevicePlan plan;
    const Totals t = totals(in);
    plan.budget_bytes = in.budget_bytes;
    const uint64_t base = in.fixed_bytes + in.resident_bytes;
    const uint64_t block_min  = std::min(t.dense, DevicePlan::kStages * t.largest_block);
    const uint64_t expert_min = std::min(t.experts, t.largest_stack + t.min_slots);
    plan.minimum_bytes = (base + block_min + expert_min + MiB - 1) / MiB * MiB;
    plan.full_bytes    = std::max(plan.minimum_bytes, base + t.dense + t.experts);
    if (in.budget_bytes && in.budget_bytes < plan.minimum_bytes) {
        throw Error(LS_ERR_BUDGET, format("a device budget of %s is too small for this model: it needs at least %s (%llu bytes) of device "
            "memory with these context and batch sizes; raise device_budget, lower n_ctx or n_gpu_layers",
            human_bytes(in.budget_bytes).c_str(), human_bytes(plan.minimum_bytes).c_str(), (unsigned long long) plan.minimum_bytes))
            .sizes(in.budget_bytes, plan.minimum_bytes);
    }
    const uint64_t available = in.budget_bytes ? in.budget_bytes - base : t.dense + t.experts;
    plan.pinned.assign(in.block_bytes.size(), false);
    if (available >= t.dense + expert_min) { // every token uses all of the dense matrices: they come first
        pin_blocks(in, plan, t.dense);
    } else {
        plan.n_block_stages    = DevicePlan::kStages;
        plan.block_stage_bytes = t.largest_block;
        pin_blocks(in, plan, available - expert_min - plan.n_block_stages * t.largest_block);
    }
    const uint64_t dense = plan.pinned_bytes + plan.n_block_stages * plan.block_stage_bytes;
    place_experts(in, t, plan, available - dense);
    plan.used_bytes = base + dense + plan.slots_bytes + plan.n_expert_stages * plan.expert_stage_bytes;
    return plan;
}

} // namespace ls
