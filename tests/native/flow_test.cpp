#include "check.h"

#include "flow.h"

#include <cmath>

using namespace ls;

namespace {

// tokens whose time depends on the choice alone; returns how often each choice was made over the last `counted` of n tokens
std::vector<int> run(FlowControl & flow, const double (&ns)[FlowControl::kChoices], int n, int counted) {
    std::vector<int> made(FlowControl::kChoices, 0);
    for (int i = 0; i < n; ++i) {
        const uint8_t c = flow.next();
        flow.measured(c, uint64_t(ns[c]));
        made[c] += i >= n - counted;
    }
    return made;
}

} // namespace

TEST(settles_within_32_tokens_on_the_fastest_choice) {
    for (uint8_t fastest = 0; fastest < FlowControl::kChoices; ++fastest) {
        double ns[FlowControl::kChoices] = {1e6, 1e6, 1e6, 1e6};
        ns[fastest] = 0.7e6;
        FlowControl flow;
        flow.reset(3);
        run(flow, ns, 32, 0);
        CHECK(flow.settled());
        CHECK_EQ(flow.best(), fastest);
    }
}

TEST(a_choice_that_saves_nothing_is_off) {
    const double ns[] = {1e6, 0.995e6, 1e6, 1.1e6};
    FlowControl flow;
    flow.reset(3);
    run(flow, ns, 32, 0);
    CHECK_EQ(flow.best(), 0);
}

TEST(costs_less_than_one_percent_when_it_does_not_pay) {
    const double ns[] = {1e6, 1.3e6, 1.3e6, 1.3e6};
    FlowControl flow;
    flow.reset(3);
    run(flow, ns, 32, 0);
    const std::vector<int> made = run(flow, ns, 4800, 4800);
    const double spent = made[0] * 1e6 + (4800 - made[0]) * 1.3e6;
    CHECK(spent < 1.01 * 4800 * 1e6);
}

TEST(notices_when_things_change) {
    FlowControl flow;
    flow.reset(3);
    run(flow, {1e6, 0.8e6, 0.7e6, 0.9e6}, 64, 0);
    CHECK_EQ(flow.best(), 2);
    run(flow, {1e6, 1.5e6, 1.5e6, 1.5e6}, 400, 0); // the drive got busy
    CHECK_EQ(flow.best(), 0);
}

TEST(times_of_a_cold_start_are_forgotten) {
    FlowControl flow;
    flow.reset(3);
    run(flow, {2e6, 1.8e6, 1.5e6, 1.8e6}, 32, 0);
    CHECK_EQ(flow.best(), 2);
    run(flow, {1e6, 1.1e6, 1.1e6, 1.1e6}, 800, 0); // the cache is warm: off is fastest now
    CHECK_EQ(flow.best(), 0);
}

// Times of tokens vary by a sixth and fall to a third while the cache warms up; choices differ by a few per cent.
TEST(finds_the_fastest_among_noise_and_drift) {
    const double share[] = {1.0, 0.93, 0.85, 0.97};
    for (uint32_t seed = 1; seed <= 20; ++seed) {
        FlowControl flow;
        flow.reset(3);
        uint32_t random = seed * 2654435761u;
        double spent = 0, fastest = 0;
        for (int i = 0; i < 600; ++i) {
            random = random * 1664525u + 1013904223u;
            const double token = (1.0 + 2.0 * std::exp(-i / 40.0)) * (0.75 + 0.5 * (random >> 8) / double(1u << 24)) * 1e6;
            const uint8_t c = flow.next();
            flow.measured(c, uint64_t(token * share[c]));
            spent   += i < 100 ? 0 : token * share[c];
            fastest += i < 100 ? 0 : token * share[2];
        }
        CHECK(spent < 1.03 * fastest);
    }
}

TEST(a_lucky_token_does_not_change_the_choice) {
    FlowControl flow;
    flow.reset(3);
    run(flow, {1e6, 0.95e6, 0.85e6, 0.9e6}, 64, 0);
    CHECK_EQ(flow.best(), 2);
    for (int i = 0; i < 400; ++i) {
        const uint8_t c = flow.next();
        const double share[] = {1.0, 0.95, 0.85, 0.9};
        flow.measured(c, uint64_t((c == 0 && i % 40 == 0 ? 0.5 : 1.0) * share[c] * 1e6)); // off was lucky once
        CHECK_EQ(flow.best(), 2);
    }
}

TEST(tries_nothing_beyond_what_is_allowed) {
    FlowControl flow;
    flow.reset(0);
    CHECK_EQ(run(flow, {1e6, 1, 1, 1}, 100, 100)[0], 100);
    flow.reset(1);
    const std::vector<int> made = run(flow, {1e6, 0.5e6, 1, 1}, 100, 100);
    CHECK_EQ(made[2] + made[3], 0);
}
