// Budget, policy and pins change while a model decodes; the logits do not.
#include "check.h"
#include "support.h"
#include "toy_run.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>

using namespace check;

namespace {

// Runs `change` again and again on a second thread while this one decodes; every decode must give the same bytes.
template <typename F> void decode_while(ToyModel & m, const std::vector<float> & expected, int n_rounds, F && change) {
    std::atomic<bool> stop{false};
    std::atomic<int> n_changes{0};
    std::thread other([&] {
        for (uint32_t i = 0; !stop; ++i) {
            change(i);
            n_changes++;
        }
    });
    for (int round = 0; round < rounds(n_rounds) || n_changes < 3; ++round) {
        same_logits(m.logits(), expected, "while it changes");
        CHECK_EQ(m.error().status, LS_OK);
    }
    stop = true;
    other.join();
}

const char * const kPolicies[] = {"lru", "lfu", "slru"};

} // namespace

TEST(budget_changes_while_decoding) {
    for (const char * name : {"dense_untied", "moe_bias", "moe_dense_lead"}) {
        const std::string path = toy(name);
        const std::vector<float> expected = ToyModel(path).logits();
        ToyModel m(path, Streaming(kMinimum));
        const uint64_t budgets[] = {m.budget(kFull), m.budget(kMiddle), m.minimum(), 0};
        decode_while(m, expected, 6, [&](uint32_t i) {
            CHECK_EQ(ls_model_set_budget(m.streamed(), budgets[i % 4], 0), LS_OK);
            CHECK_EQ(m.stats().budget_bytes, budgets[i % 4]);
        });
    }
}

TEST(policy_changes_while_decoding) {
    const std::string path = toy("moe_bias");
    const std::vector<float> expected = ToyModel(path).logits();
    ToyModel m(path, Streaming(kMiddle));
    decode_while(m, expected, 4, [&](uint32_t i) { CHECK_EQ(ls_model_set_policy(m.streamed(), kPolicies[i % 3], ""), LS_OK); });
}

TEST(pins_change_while_decoding) {
    for (const char * name : {"moe_bias", "moe_qwen3"}) {
        const std::string path = toy(name);
        const std::vector<float> expected = ToyModel(path).logits();
        for (const double level : {kMinimum, kMiddle}) {
            ToyModel m(path, Streaming(level));
            Random random(4);
            decode_while(m, expected, 5, [&](uint32_t) {
                int32_t ids[3];
                const uint32_t n = random.below(4);
                std::generate_n(ids, n, [&] { return int32_t(random.below(8)); });
                const ls_status s = ls_model_pin(m.streamed(), int32_t(random.below(2)), ids, n);
                CHECK(s == LS_OK || s == LS_ERR_BUDGET || s == LS_ERR_STATE);
            });
            for (int32_t layer = 0; layer < 2; ++layer) {
                CHECK_EQ(ls_model_pin(m.streamed(), layer, nullptr, 0), LS_OK);
            }
            same_logits(m.logits(), expected, "after unpinning");
        }
    }
}

TEST(everything_at_once) {
    const std::string path = toy("moe_dense_lead");
    const std::vector<float> expected = ToyModel(path).logits();
    ToyModel m(path, Streaming(kMiddle));
    const uint64_t minimum = m.minimum(), middle = m.budget(kMiddle);
    std::atomic<bool> stop{false};
    std::thread watcher([&] {
        while (!stop) {
            ls_memory memory;
            CHECK_EQ(ls_model_get_memory(m.streamed(), &memory), LS_OK);
            CHECK(m.minimum() <= m.full());
            CHECK(m.stats().cache_capacity_bytes <= m.plan_number("full_budget_bytes"));
        }
    });
    decode_while(m, expected, 6, [&](uint32_t i) {
        ls_model_set_budget(m.streamed(), i % 2 ? minimum : middle, 0);
        ls_model_set_policy(m.streamed(), kPolicies[i % 3], "");
        const int32_t id = int32_t(i % 16);
        ls_model_pin(m.streamed(), 2 + int32_t(i % 3), &id, i % 2);
        ls_model_reset_stats(m.streamed());
    });
    stop = true;
    watcher.join();
}

TEST(contexts_come_and_go_while_another_decodes) {
    const std::string path = toy("moe_dense_lead");
    const std::vector<float> expected = ToyModel(path, kThreadsShared).logits();
    Streaming s(kFull);
    s.extra_bytes = 64u << 20;
    s.n_threads = kThreadsShared;
    ToyModel m(path, s);
    std::atomic<bool> stop{false};
    std::thread planner([&] {
        while (!stop) {
            CHECK(m.minimum() > 0);
        }
    });
    std::thread other([&] {
        for (int i = 0; i < rounds(6); ++i) {
            m.add_context();
            same_logits(m.logits(1), expected, "the new context");
            m.drop_context();
        }
    });
    for (int i = 0; i < rounds(6); ++i) {
        same_logits(m.logits(0), expected, "the old context");
    }
    other.join();
    stop = true;
    planner.join();
}

TEST(too_small_a_budget_changes_nothing) {
    const std::string path = toy("moe_dense_lead");
    const std::vector<float> expected = ToyModel(path).logits();
    ToyModel m(path, Streaming(kMiddle));
    CHECK_EQ(ls_model_set_budget(m.streamed(), m.minimum() - 1, 0), LS_ERR_BUDGET);
    ls_error e;
    ls_last_error(&e);
    CHECK_EQ(e.used_bytes, m.minimum() - 1);
    CHECK_EQ(e.limit_bytes, m.minimum());
    CHECK_EQ(m.stats().budget_bytes, m.budget(kMiddle));
    same_logits(m.logits(), expected, "after a refusal");
}

TEST(a_smaller_budget_gives_memory_back) {
    const std::string path = toy("moe_dense_lead");
    ToyModel m(path, Streaming());
    m.logits();
    const uint64_t before = m.stats().resident_now_bytes;
    CHECK_EQ(ls_model_set_budget(m.streamed(), m.minimum(), 0), LS_OK);
    ls_memory memory;
    ls_model_get_memory(m.streamed(), &memory);
    CHECK(m.stats().resident_now_bytes < before);
    CHECK(m.stats().resident_now_bytes <= memory.resident_bytes + memory.pinned_bytes + memory.ring_bytes + memory.cache_bytes);
    CHECK(memory.kv_bytes > 0 && memory.compute_bytes > 0);
}

TEST(pins_beyond_the_cache_are_refused) {
    const std::string path = toy("moe_bias");
    ToyModel m(path, Streaming(kMiddle));
    std::vector<int32_t> all(16);
    std::iota(all.begin(), all.end(), 0);
    ls_status s = LS_OK;
    for (int32_t layer = 0; layer < 4 && s == LS_OK; ++layer) {
        s = ls_model_pin(m.streamed(), layer, all.data(), all.size());
    }
    CHECK_EQ(s, LS_ERR_BUDGET);
    CHECK_EQ(ls_model_set_budget(m.streamed(), m.minimum(), 0), LS_ERR_BUDGET); // the pins would not fit
    CHECK(!m.logits().empty());
    const int32_t none = 16, negative = -1;
    CHECK_EQ(ls_model_pin(m.streamed(), 0, &none, 1), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_model_pin(m.streamed(), 0, &negative, 1), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_model_pin(m.streamed(), 99, all.data(), 1), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_model_pin(m.streamed(), -1, all.data(), 1), LS_ERR_ARGUMENT);
}

// A context made later takes memory from the cache: if that is not possible its decode fails, and nobody waits for ever.
TEST(a_later_context_is_charged) {
    const std::string path = toy("moe_bias");
    const std::vector<float> expected = ToyModel(path).logits();
    ToyModel tight(path, Streaming(kMinimum));
    tight.add_context();
    CHECK(tight.logits(1).empty());
    CHECK_EQ(tight.error(1).status, LS_ERR_BUDGET);
    same_logits(tight.logits(0), expected, "the context that fits");
    CHECK_EQ(ls_model_set_budget(tight.streamed(), tight.full() + (64u << 20), 0), LS_OK);
    same_logits(tight.logits(1), expected, "once there is room");
}

TEST(a_later_context_meets_pins) {
    const std::string path = toy("moe_bias");
    const std::vector<float> expected = ToyModel(path).logits();
    Streaming s(kMinimum);
    s.extra_bytes = 5u << 20; // about what the second context will need
    ToyModel m(path, s);
    int32_t n_pinned = 0;
    for (int32_t layer = 0; layer < 4; ++layer) {
        for (int32_t id = 1; id <= 16; ++id) { // as many as go
            std::vector<int32_t> ids(size_t(id), 0);
            std::iota(ids.begin(), ids.end(), 0);
            n_pinned += ls_model_pin(m.streamed(), layer, ids.data(), ids.size()) == LS_OK;
        }
    }
    CHECK(n_pinned > 0);
    m.add_context();
    const std::vector<float> got = m.logits(1);
    CHECK(!got.empty() || m.error(1).status == LS_ERR_BUDGET);
    same_logits(m.logits(0), expected, "the first context");
}
