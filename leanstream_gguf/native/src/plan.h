// What a budget buys: which dense groups are pinned, how many ring slots, how large an expert cache. A pure function.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ls {

struct PlanInput {
    uint64_t fixed_bytes = 0;     // baseline, metadata, KV, compute, margin
    uint64_t resident_bytes = 0;  // weights that never stream
    std::vector<uint64_t> group_bytes;    // dense groups in graph order: bytes in memory
    uint64_t ring_slot_bytes = 0;         // largest group
    uint32_t n_ring_slots_wanted = 0;     // 0 = chosen
    uint32_t n_held_at_once = 1;          // groups that one graph needs together
    bool     keeps_dense = false;         // no budget lets a dense group stream
    uint64_t expert_bytes = 0;            // a slot of the expert cache: the largest expert in memory
    std::vector<uint32_t> n_experts;      // [moe layer]
    uint32_t n_expert_used = 0;
    uint64_t neurons_bytes = 0;           // all neuron clusters in memory
    uint64_t neurons_min_bytes = 0;       // smallest cache of clusters
    uint64_t budget_bytes = 0;    // 0 = no bound
    uint64_t cache_bytes = 0;     // of experts, or of clusters in a model without experts; 0 = what is left
};

struct Plan {
    uint64_t minimum_bytes = 0;   // smallest budget that works
    uint64_t full_bytes = 0;      // budget from which everything is resident
    std::vector<bool> pinned;     // [group]
    uint32_t n_pinned = 0;
    uint64_t pinned_bytes = 0;
    uint64_t dense_bytes = 0;     // all groups
    uint32_t n_ring_slots = 0;    // 0 when every group is pinned
    uint64_t cache_bytes = 0;     // capacity of the expert cache
    uint64_t experts_bytes = 0;   // all experts of all layers
    uint64_t token_demand_bytes = 0; // experts of one token, all layers
    uint64_t layer_demand_bytes = 0; // experts of one token in the layer that needs most: the smallest cache
    uint32_t token_demand_experts = 0;
    uint64_t neuron_cache_bytes = 0; // capacity of the cache of neuron clusters
    uint64_t neurons_bytes = 0;      // all of them
    std::vector<std::string> warnings;

    bool streams_dense() const { return n_pinned < pinned.size(); }
    const char * mode() const;
};

// Order in which groups are pinned: every prefix is spread evenly over the graph (bit-reversed counting), so that reads
// of the streamed rest spread too, and a budget change moves as few groups as possible.
std::vector<uint32_t> pin_order(uint32_t n_groups);

// Throws Error(LS_ERR_BUDGET) if budget_bytes or cache_bytes is below the minimum.
Plan make_plan(const PlanInput & in);

} // namespace ls
