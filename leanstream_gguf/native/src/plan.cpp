#include "plan.h"

#include "status.h"

#include <algorithm>
#include <numeric>

namespace ls {

namespace {

// what a graph holds at once, and one more that is being read
uint32_t min_ring_slots(const PlanInput & in) {
    return in.n_held_at_once + 1;
}

uint64_t sum(const std::vector<uint64_t> & v) {
    return std::accumulate(v.begin(), v.end(), uint64_t(0));
}

// one token's experts of one layer: below that a layer cannot be computed without waves
uint64_t minimum_cache(const PlanInput & in) {
    uint32_t n = 0;
    for (uint32_t n_experts : in.n_experts) {
        n = std::max(n, std::min(in.n_expert_used, n_experts));
    }
    return n * in.expert_bytes;
}

void pin_groups(const PlanInput & in, Plan & plan, uint64_t available) {
    for (uint32_t g : pin_order(uint32_t(in.group_bytes.size()))) {
        if (plan.pinned_bytes + in.group_bytes[g] <= available) {
            plan.pinned[g] = true;
            plan.pinned_bytes += in.group_bytes[g];
            plan.n_pinned++;
        }
    }
}

// One more than the minimum where it costs little: it hides the hand-over between two groups.
uint32_t choose_ring_slots(const PlanInput & in, uint64_t spare) {
    if (in.n_ring_slots_wanted) {
        return std::max(min_ring_slots(in), in.n_ring_slots_wanted);
    }
    return min_ring_slots(in) + (spare >= 8 * in.ring_slot_bytes ? 1 : 0);
}

void split_dense(const PlanInput & in, Plan & plan, uint64_t available) {
    const uint64_t ring_min = min_ring_slots(in) * in.ring_slot_bytes;
    plan.n_ring_slots = choose_ring_slots(in, available - ring_min);
    while (plan.n_ring_slots > min_ring_slots(in) && plan.n_ring_slots * in.ring_slot_bytes > available) {
        plan.n_ring_slots--;
    }
    pin_groups(in, plan, available - plan.n_ring_slots * in.ring_slot_bytes);
}

// What the dense weights leave goes to experts and clusters, to each by its size.
void split_caches(const PlanInput & in, Plan & plan, uint64_t experts_floor, uint64_t neurons_floor, uint64_t available) {
    const uint64_t all = plan.experts_bytes + plan.neurons_bytes;
    uint64_t neurons = all ? uint64_t(double(available) * (double(plan.neurons_bytes) / double(all))) : 0;
    neurons = std::min(std::max(std::min(neurons, available - experts_floor), neurons_floor), plan.neurons_bytes);
    plan.cache_bytes = std::min(plan.experts_bytes, available - neurons);
    if (in.cache_bytes && plan.experts_bytes) {
        plan.cache_bytes = experts_floor;
        neurons = std::min(plan.neurons_bytes, available - experts_floor);
    } else if (in.cache_bytes) {
        neurons = neurons_floor;
    }
    plan.neuron_cache_bytes = available >= all && !in.cache_bytes ? plan.neurons_bytes : neurons;
}

void warn_of_small_cache(Plan & plan) {
    if (plan.experts_bytes > 0 && plan.cache_bytes < plan.token_demand_bytes && plan.cache_bytes < plan.experts_bytes) {
        plan.warnings.push_back(format("the expert cache (%s) is smaller than what one token uses (%u experts, %s): nearly every "
            "expert will be read again for each token; %s more would help most", human_bytes(plan.cache_bytes).c_str(),
            plan.token_demand_experts, human_bytes(plan.token_demand_bytes).c_str(),
            human_bytes(plan.token_demand_bytes - plan.cache_bytes).c_str()));
    }
}

} // namespace

const char * Plan::mode() const {
    const bool experts = cache_bytes < experts_bytes, neurons = neuron_cache_bytes < neurons_bytes;
    static const char * const names[2][2][2] = {
        { { "resident", "neurons" }, { "experts", "experts+neurons" } },
        { { "layers", "layers+neurons" }, { "layers+experts", "layers+experts+neurons" } },
    };
    return names[streams_dense()][experts][neurons];
}

std::vector<uint32_t> pin_order(uint32_t n_groups) {
    uint32_t n_bits = 0;
    while ((1u << n_bits) < n_groups) {
        n_bits++;
    }
    std::vector<uint32_t> order;
    for (uint32_t i = 0; i < (1u << n_bits); ++i) {
        uint32_t reversed = 0;
        for (uint32_t b = 0; b < n_bits; ++b) {
            reversed |= (i >> b & 1) << (n_bits - 1 - b);
        }
        if (reversed < n_groups) {
            order.push_back(reversed);
        }
    }
    return order;
}

Plan make_plan(const PlanInput & in) {
    Plan plan;
    plan.pinned.assign(in.group_bytes.size(), false);
    plan.dense_bytes = sum(in.group_bytes);
    for (uint32_t n_experts : in.n_experts) {
        plan.token_demand_experts += std::min(in.n_expert_used, n_experts);
        plan.experts_bytes        += n_experts * in.expert_bytes;
    }
    plan.token_demand_bytes = plan.token_demand_experts * in.expert_bytes;
    const uint64_t cache_min = plan.layer_demand_bytes = minimum_cache(in);
    const uint64_t ring_min  = in.keeps_dense ? plan.dense_bytes : std::min(plan.dense_bytes, min_ring_slots(in) * in.ring_slot_bytes);
    const uint64_t base      = in.fixed_bytes + in.resident_bytes;
    const uint64_t cache_floor = in.cache_bytes ? std::min(in.cache_bytes, plan.experts_bytes) : cache_min;
    plan.neurons_bytes = in.neurons_bytes;
    const uint64_t neurons_floor = in.cache_bytes && plan.experts_bytes == 0
        ? std::min(std::max(in.cache_bytes, in.neurons_min_bytes), in.neurons_bytes) : in.neurons_min_bytes;
    constexpr uint64_t MiB = 1u << 20; // a round number survives a few pages of growth between plan and load
    plan.minimum_bytes = (base + ring_min + std::max(cache_floor, cache_min) + neurons_floor + MiB - 1) / MiB * MiB;
    plan.full_bytes    = std::max(plan.minimum_bytes, base + plan.dense_bytes + plan.experts_bytes + plan.neurons_bytes);

    if (in.cache_bytes && plan.experts_bytes && in.cache_bytes < cache_min) {
        throw Error(LS_ERR_BUDGET, format("an expert cache of %s is too small: one token needs %s of one layer; give at least that",
            human_bytes(in.cache_bytes).c_str(), human_bytes(cache_min).c_str())).sizes(in.cache_bytes, cache_min);
    }
    if (in.budget_bytes && in.budget_bytes < plan.minimum_bytes) {
        throw Error(LS_ERR_BUDGET, format("a memory budget of %s is too small for this model: it needs at least %s (%llu bytes) "
            "with these context and batch sizes; raise the budget or lower n_ctx", human_bytes(in.budget_bytes).c_str(),
            human_bytes(plan.minimum_bytes).c_str(), (unsigned long long) plan.minimum_bytes))
            .sizes(in.budget_bytes, plan.minimum_bytes);
    }
    const uint64_t available = in.budget_bytes ? in.budget_bytes - base : plan.full_bytes - base;
    if (available >= plan.dense_bytes + cache_floor + neurons_floor) { // dense weights are used by every token: they come first
        pin_groups(in, plan, plan.dense_bytes);
        split_caches(in, plan, cache_floor, neurons_floor, available - plan.dense_bytes);
    } else {
        plan.cache_bytes = cache_floor;
        plan.neuron_cache_bytes = neurons_floor;
        split_dense(in, plan, available - cache_floor - neurons_floor);
    }
    plan.cache_bytes -= in.expert_bytes ? plan.cache_bytes % in.expert_bytes : 0; // whole slots
    warn_of_small_cache(plan);
    return plan;
}

} // namespace ls
