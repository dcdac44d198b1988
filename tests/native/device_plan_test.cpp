#include "check.h"

#include "device_plan.h"
#include "host_cost.h"

#include <algorithm>
#include <numeric>

using ls::DevicePlan;
using ls::DevicePlanInput;
using ls::make_device_plan;

namespace {

constexpr uint64_t MiB = 1u << 20;

DevicePlanInput dense() {
    DevicePlanInput in;
    in.fixed_bytes    = 100 * MiB;
    in.resident_bytes = 10 * MiB;
    in.block_bytes.assign(12, 40 * MiB);
    return in;
}

DevicePlanInput moe() {
    DevicePlanInput in = dense();
    in.block_bytes.assign(4, 8 * MiB);
    in.layers.assign(4, {16, 5 * MiB, 80 * MiB});
    in.n_expert_used = 2;
    return in;
}

uint32_t slots(const DevicePlan & p) {
    return std::accumulate(p.n_slots.begin(), p.n_slots.end(), 0u);
}

} // namespace

// The later of copies and computing ends first, and at equal times more are copied.
TEST(missing_experts_are_shared_by_cost) {
    CHECK_EQ(ls::host_share(0, 1), 0u);
    CHECK_EQ(ls::host_share(1, 1), 0u);
    CHECK_EQ(ls::host_share(1, 0.5), 1u);
    CHECK_EQ(ls::host_share(8, 1), 4u);
    CHECK_EQ(ls::host_share(8, 1.0 / 64), 8u);
    CHECK_EQ(ls::host_share(8, 3), 2u);
    CHECK_EQ(ls::host_share(8, 64), 0u);
}

TEST(without_a_bound_everything_stays) {
    const DevicePlan p = make_device_plan(moe());
    CHECK_EQ(p.pinned_bytes, 32 * MiB);
    CHECK_EQ(slots(p), 64);
    CHECK(!p.streams());
    CHECK_EQ(p.used_bytes, p.full_bytes);
}

TEST(used_bytes_never_exceed_the_budget) {
    for (const DevicePlanInput & model : {dense(), moe()}) {
        DevicePlanInput in = model;
        const DevicePlan all = make_device_plan(in);
        for (uint64_t budget = all.minimum_bytes; budget <= all.full_bytes; budget += 3 * MiB + 1) {
            in.budget_bytes = budget;
            const DevicePlan p = make_device_plan(in);
            CHECK(p.used_bytes <= budget);
            CHECK_EQ(p.streams(), budget < all.full_bytes);
        }
    }
}

TEST(a_budget_below_the_minimum_names_it) {
    for (const DevicePlanInput & model : {dense(), moe()}) {
        DevicePlanInput in = model;
        const uint64_t minimum = make_device_plan(in).minimum_bytes;
        in.budget_bytes = minimum - 1;
        const ls_error e = check::error_of([&] { make_device_plan(in); });
        CHECK_EQ(e.status, LS_ERR_BUDGET);
        CHECK_EQ(e.limit_bytes, minimum);
        in.budget_bytes = minimum;
        make_device_plan(in);
    }
}

TEST(dense_matrices_come_before_experts) {
    DevicePlanInput in = moe();
    in.budget_bytes = make_device_plan(in).full_bytes - 100 * MiB;
    const DevicePlan p = make_device_plan(in);
    CHECK_EQ(p.pinned_bytes, 32 * MiB);
    CHECK_EQ(p.n_block_stages, 0u);
    CHECK(p.n_expert_stages > 0);
}

TEST(layers_get_equal_shares_and_never_fewer_than_a_token_uses) {
    DevicePlanInput in = moe();
    const DevicePlan all = make_device_plan(in);
    for (uint64_t budget = all.minimum_bytes; budget < all.full_bytes; budget += 7 * MiB) {
        in.budget_bytes = budget;
        const DevicePlan p = make_device_plan(in);
        const auto [least, most] = std::minmax_element(p.n_slots.begin(), p.n_slots.end());
        CHECK(*least >= 2);
        CHECK(*most - *least <= 1);
    }
}

TEST(a_layer_on_the_host_takes_no_slots) {
    DevicePlanInput in = moe();
    in.layers[1] = {};
    const DevicePlan all = make_device_plan(in);
    CHECK_EQ(all.n_slots[1], 0u);
    in.budget_bytes = all.full_bytes - 60 * MiB;
    CHECK_EQ(make_device_plan(in).n_slots[1], 0u);
}
