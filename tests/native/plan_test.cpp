#include "check.h"
#include "support.h"

#include "plan.h"

#include <algorithm>
#include <numeric>

using namespace ls;

namespace {

constexpr uint64_t MiB = 1u << 20;

PlanInput dense(size_t n_groups, uint64_t group_bytes) {
    PlanInput in;
    in.fixed_bytes = 40 * MiB;
    in.resident_bytes = 10 * MiB;
    in.group_bytes.assign(n_groups, group_bytes);
    in.ring_slot_bytes = group_bytes;
    return in;
}

void add_experts(PlanInput & in, size_t n_layers, uint32_t n_experts, uint32_t n_used, uint64_t expert_bytes) {
    in.expert_bytes = expert_bytes;
    in.n_experts.assign(n_layers, n_experts);
    in.n_expert_used = n_used;
}

PlanInput both() {
    PlanInput in = dense(12, 4 * MiB);
    add_experts(in, 6, 8, 2, MiB);
    return in;
}

Plan with_budget(PlanInput in, uint64_t budget_bytes, uint64_t cache_bytes = 0) {
    in.budget_bytes = budget_bytes;
    in.cache_bytes  = cache_bytes;
    return make_plan(in);
}

uint64_t minimum(const PlanInput & in) { return with_budget(in, 0).minimum_bytes; }
uint64_t full(const PlanInput & in)    { return with_budget(in, 0).full_bytes; }

uint64_t ring_bytes(const PlanInput & in, const Plan & p) { return p.n_ring_slots * in.ring_slot_bytes; }

// everything that the plan will hold
uint64_t held(const PlanInput & in, const Plan & p) {
    return in.fixed_bytes + in.resident_bytes + p.pinned_bytes + ring_bytes(in, p) + p.cache_bytes;
}

} // namespace

TEST(groups_that_may_not_stream_are_part_of_the_minimum) {
    PlanInput in = both();
    in.keeps_dense = true;
    const Plan p = with_budget(in, minimum(in));
    CHECK_EQ(p.minimum_bytes, (40 + 10 + 48 + 2) * MiB);
    CHECK_EQ(p.n_pinned, 12);
    CHECK_EQ(p.n_ring_slots, 0);
}

TEST(no_budget_keeps_everything) {
    const PlanInput in = both();
    const Plan p = with_budget(in, 0);
    CHECK_EQ(p.n_pinned, 12);
    CHECK_EQ(p.pinned_bytes, 48 * MiB);
    CHECK_EQ(p.n_ring_slots, 0);
    CHECK_EQ(p.cache_bytes, 48 * MiB);
    CHECK(!p.streams_dense());
    CHECK_EQ(std::string(p.mode()), "resident");
    CHECK(p.warnings.empty());
    CHECK_EQ(p.full_bytes, (50 + 48 + 48) * MiB);
}

TEST(minimum_is_two_ring_slots_and_one_layers_experts) {
    const PlanInput in = both();
    CHECK_EQ(minimum(in), (50 + 2 * 4 + 2) * MiB);
    const Plan p = with_budget(in, minimum(in));
    CHECK_EQ(p.n_ring_slots, 2);
    CHECK_EQ(p.n_pinned, 0);
    CHECK_EQ(p.cache_bytes, 2 * MiB);
    CHECK_EQ(std::string(p.mode()), "layers+experts");
    const ls_error e = check::error_of([&] { with_budget(in, minimum(in) - 1); });
    CHECK_EQ(e.status, LS_ERR_BUDGET);
    CHECK_EQ(e.used_bytes, minimum(in) - 1);
    CHECK_EQ(e.limit_bytes, minimum(in));
}

TEST(modes) {
    PlanInput layers = dense(8, 4 * MiB);
    CHECK_EQ(std::string(with_budget(layers, minimum(layers)).mode()), "layers");
    CHECK_EQ(std::string(with_budget(layers, full(layers)).mode()), "resident");
    PlanInput experts = dense(0, 0);
    add_experts(experts, 4, 16, 4, MiB);
    CHECK_EQ(std::string(with_budget(experts, minimum(experts)).mode()), "experts");
    CHECK_EQ(minimum(experts), 54 * MiB);
    PlanInput mixed = both(); // dense weights come first: they are used by every token
    CHECK_EQ(std::string(with_budget(mixed, full(mixed) - 4 * MiB).mode()), "experts");
}

TEST(full_budget_needs_no_more_than_it_says) {
    for (const PlanInput & in : {dense(8, 4 * MiB), both()}) {
        CHECK_EQ(std::string(with_budget(in, full(in)).mode()), "resident");
        CHECK(std::string(with_budget(in, full(in) - 1).mode()) != "resident");
    }
}

TEST(a_model_smaller_than_its_ring_is_kept_whole) {
    PlanInput in = dense(0, 0);
    in.group_bytes = {4 * MiB, MiB};
    in.ring_slot_bytes = 4 * MiB;
    CHECK_EQ(minimum(in), 55 * MiB);
    CHECK_EQ(with_budget(in, minimum(in)).n_pinned, 2);
}

TEST(graphs_that_hold_several_groups_get_more_slots) {
    PlanInput in = dense(10, MiB);
    in.n_held_at_once = 5;
    CHECK_EQ(minimum(in), (50 + 6) * MiB);
    CHECK_EQ(with_budget(in, minimum(in)).n_ring_slots, 6);
}

TEST(ring_slots_asked_for) {
    PlanInput in = dense(20, MiB);
    in.n_ring_slots_wanted = 5;
    CHECK_EQ(minimum(in), 52 * MiB);
    CHECK_EQ(with_budget(in, 52 * MiB).n_ring_slots, 2); // no more than the budget has
    CHECK_EQ(with_budget(in, 54 * MiB).n_ring_slots, 4);
    CHECK_EQ(with_budget(in, 60 * MiB).n_ring_slots, 5);
    CHECK_EQ(with_budget(in, full(in)).n_ring_slots, 0);
    in.n_ring_slots_wanted = 1; // below what works
    CHECK_EQ(with_budget(in, 60 * MiB).n_ring_slots, 2);
}

TEST(more_budget_never_holds_less_and_pins_nest) {
    for (const PlanInput & in : {dense(23, MiB), both(), dense(1, 8 * MiB), dense(2, MiB)}) {
        Plan before = with_budget(in, minimum(in));
        for (uint64_t b = minimum(in); b <= full(in) + 2 * MiB; b += MiB / 3) {
            const Plan p = with_budget(in, b);
            CHECK(held(in, p) <= b);
            CHECK(p.pinned_bytes >= before.pinned_bytes);
            CHECK(p.pinned_bytes + ring_bytes(in, p) >= before.pinned_bytes + ring_bytes(in, before) || !p.streams_dense());
            CHECK(p.cache_bytes >= before.cache_bytes);
            for (size_t g = 0; g < p.pinned.size(); ++g) {
                CHECK(p.pinned[g] || !before.pinned[g]);
            }
            CHECK_EQ(p.n_pinned, std::count(p.pinned.begin(), p.pinned.end(), true));
            CHECK_EQ(p.minimum_bytes, before.minimum_bytes);
            CHECK_EQ(p.full_bytes, before.full_bytes);
            before = p;
        }
    }
}

TEST(random_shapes_stay_within_the_budget) {
    check::Random random(21);
    for (int i = 0; i < 3000; ++i) {
        PlanInput in = dense(0, 0);
        for (uint32_t g = random.below(30); g > 0; --g) {
            in.group_bytes.push_back(4096ull * (1 + random.below(600)));
            in.ring_slot_bytes = std::max(in.ring_slot_bytes, in.group_bytes.back());
        }
        if (random.below(2)) {
            add_experts(in, 1 + random.below(5), 2 + random.below(14), 1 + random.below(20), 4096ull * (1 + random.below(90)));
        }
        in.n_held_at_once = 1 + random.below(4);
        in.n_ring_slots_wanted = random.below(6);
        const uint64_t low = minimum(in), high = std::max(low, full(in));
        const uint64_t budget = low + random.next() % (high - low + 1);
        const Plan p = with_budget(in, budget);
        CHECK(held(in, p) <= budget);
        CHECK(p.cache_bytes <= p.experts_bytes);
        CHECK(in.expert_bytes == 0 || p.cache_bytes % in.expert_bytes == 0); // whole slots
        CHECK(p.cache_bytes >= p.layer_demand_bytes);
        CHECK(!p.streams_dense() || p.n_ring_slots > in.n_held_at_once);
        CHECK(p.streams_dense() || p.n_ring_slots == 0);
        CHECK(with_budget(in, std::min(budget + 4096, high)).pinned_bytes + MiB * 4 >= p.pinned_bytes);
    }
}

TEST(fixed_expert_cache) {
    const PlanInput in = both();
    CHECK_EQ(with_budget(in, 0, 10 * MiB).cache_bytes, 10 * MiB);
    CHECK_EQ(with_budget(in, 0, 10 * MiB + 5).cache_bytes, 10 * MiB); // whole slots
    CHECK_EQ(with_budget(in, 0, 10 * MiB).n_pinned, 12);
    CHECK_EQ(with_budget(in, 0, 500 * MiB).cache_bytes, 48 * MiB); // there is no more to cache
    const Plan p = with_budget(in, 80 * MiB, 10 * MiB);
    CHECK_EQ(p.cache_bytes, 10 * MiB);
    CHECK_EQ(p.minimum_bytes, (50 + 8 + 10) * MiB);
    CHECK(p.n_pinned > 0);
    const ls_error small = check::error_of([&] { with_budget(in, 0, MiB); });
    CHECK_EQ(small.status, LS_ERR_BUDGET);
    CHECK_EQ(small.used_bytes, MiB);
    CHECK_EQ(small.limit_bytes, 2 * MiB);
    const ls_error tight = check::error_of([&] { with_budget(in, 66 * MiB, 10 * MiB); });
    CHECK_EQ(tight.status, LS_ERR_BUDGET);
    CHECK_EQ(tight.limit_bytes, 68 * MiB);
}

TEST(warns_of_a_cache_below_one_tokens_demand) {
    const PlanInput in = both();
    const Plan p = with_budget(in, minimum(in));
    CHECK_EQ(p.token_demand_bytes, 12 * MiB);
    CHECK_EQ(p.token_demand_experts, 12);
    REQUIRE(p.warnings.size() == 1);
    CHECK(p.warnings[0].find("12 experts, 12.0 MiB") != std::string::npos);
    CHECK(p.warnings[0].find("10.0 MiB more") != std::string::npos);
    CHECK(with_budget(in, 0, 12 * MiB).warnings.empty());
    CHECK(!with_budget(in, 0, 11 * MiB).warnings.empty());
    CHECK(with_budget(dense(8, MiB), minimum(dense(8, MiB))).warnings.empty());
}

TEST(pin_order_is_a_permutation_spread_over_the_graph) {
    for (uint32_t n : {0u, 1u, 2u, 3u, 7u, 8u, 33u, 100u}) {
        std::vector<uint32_t> order = pin_order(n);
        if (n >= 8) { // half of it never leaves long stretches unpinned
            std::vector<uint32_t> half(order.begin(), order.begin() + n / 2);
            std::sort(half.begin(), half.end());
            for (size_t i = 1; i < half.size(); ++i) {
                CHECK(half[i] - half[i - 1] <= 4);
            }
        }
        std::sort(order.begin(), order.end());
        std::vector<uint32_t> all(n);
        std::iota(all.begin(), all.end(), 0u);
        CHECK_EQ(order, all);
    }
}
