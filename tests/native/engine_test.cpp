// Streamed logits are the bytes of an unstreamed load, whatever the budget.
#include "check.h"
#include "toy_run.h"

#include "memory.h"

#include <cstring>
#include <thread>

using namespace check;

namespace {

std::vector<float> reference(const std::string & path, uint32_t seed = 1, int32_t n_threads = 2) {
    return ToyModel(path, n_threads).logits(0, kPrompt, kSteps, seed);
}

struct Ran {
    uint64_t read_bytes; // after activation
    bool     streams;    // its minimum is less than all of it
};

// Decodes twice, the second time with a warm cache.
Ran run(const std::string & path, const Streaming & s, const std::vector<float> & expected) {
    ToyModel m(path, s);
    same_logits(m.logits(), expected, path + " at level " + std::to_string(s.level));
    CHECK_EQ(m.error().status, LS_OK);
    const ls_stats st = m.stats();
    CHECK_EQ(st.n_tokens, kPrompt + kSteps);
    CHECK_EQ(st.n_graphs, kPrompt / 32 + kSteps);
    CHECK_EQ(st.budget_bytes, m.budget(s.level));
    same_logits(m.logits(), expected, path + " again");
    CHECK(m.minimum() <= m.full());
    return {m.stats().read_bytes, m.minimum() < m.full()};
}

void exact_at_every_budget(const char * name, bool sanitize_too = true) {
    if (sanitized() && !sanitize_too) {
        SKIP("another layout of the same code");
    }
    const std::string path = toy(name);
    const std::vector<float> expected = reference(path);
    REQUIRE(!expected.empty());
    const Ran least = run(path, Streaming(kMinimum), expected);
    const Ran middle = run(path, Streaming(kMiddle), expected);
    CHECK(least.read_bytes > 0);
    // the minimum of a model that runs its layers in cycles is nearly all of it
    CHECK(least.streams || strcmp(name, "dense_looped") == 0);
    CHECK(middle.read_bytes < least.read_bytes || !least.streams);
    CHECK(run(path, Streaming(kFull), expected).read_bytes <= middle.read_bytes);
    run(path, Streaming(kUnlimited), expected);
    if (ls_have_io_uring()) {
        Streaming uring(kMinimum);
        uring.io_backend = 2;
        run(path, uring, expected);
    }
}

} // namespace

TEST(dense_untied)   { exact_at_every_budget("dense_untied"); }
TEST(dense_tied)     { exact_at_every_budget("dense_tied", false); }
TEST(dense_looped)   { exact_at_every_budget("dense_looped", false); }
TEST(moe_qwen3)      { exact_at_every_budget("moe_qwen3"); }
TEST(moe_bias)       { exact_at_every_budget("moe_bias", false); }
TEST(moe_merged)     { exact_at_every_budget("moe_merged", false); }
TEST(moe_dense_lead) { exact_at_every_budget("moe_dense_lead"); }

TEST(everything_resident_reads_nothing_later) {
    ToyModel m(toy("moe_bias"), Streaming());
    m.logits();
    const ls_stats s = m.stats();
    CHECK_EQ(s.misses, 0);
    CHECK(s.hits > 0);
    CHECK_EQ(s.n_evictions, 0);
    CHECK_EQ(s.n_waves, 0);
    CHECK(s.load_bytes > 0);
}

TEST(a_prompt_with_more_experts_than_slots_runs_in_waves) {
    ToyModel m(toy("moe_qwen3"), Streaming(kMinimum));
    m.logits(0, kPrompt, 0);
    CHECK(m.stats().n_waves > 0);
    CHECK(m.stats().misses > 0);
    ls_model_reset_stats(m.streamed());
    CHECK_EQ(m.stats().misses, 0);
    CHECK_EQ(m.stats().read_bytes, 0);
    CHECK(m.stats().load_bytes > 0);
}

TEST(a_fixed_expert_cache_holds) {
    const std::string path = toy("moe_bias");
    const std::vector<float> expected = reference(path);
    Streaming s;
    s.cache_bytes = ToyModel(path, Streaming()).plan_number("capacity_bytes") / 4;
    ToyModel m(path, s);
    same_logits(m.logits(), expected, "a quarter of the experts");
    CHECK(m.stats().cache_capacity_bytes <= s.cache_bytes);
    CHECK(m.stats().cache_capacity_bytes > s.cache_bytes / 2); // whole slots
    CHECK(m.stats().n_evictions > 0);
}

TEST(two_contexts_decode_at_once_at_the_minimum) {
    for (const char * name : {"moe_qwen3", "dense_untied", "moe_dense_lead", "dense_looped"}) {
        const std::string path = toy(name);
        const std::vector<float> expected[2] = {reference(path, 1, kThreadsShared), reference(path, 2, kThreadsShared)};
        Streaming s(kMinimum);
        s.n_contexts = 2;
        s.n_threads  = kThreadsShared;
        ToyModel m(path, s);
        for (int round = 0; round < rounds(4); ++round) {
            std::vector<float> got[2];
            std::thread other([&] { got[1] = m.logits(1, kPrompt, kSteps, 2); });
            got[0] = m.logits(0, kPrompt, kSteps, 1);
            other.join();
            same_logits(got[0], expected[0], std::string(name) + " first context");
            same_logits(got[1], expected[1], std::string(name) + " second context");
        }
        CHECK_EQ(m.stats().n_tokens, rounds(4) * 2 * (kPrompt + kSteps));
    }
}

TEST(two_models_and_an_unstreamed_one_at_once) {
    const std::string paths[3] = {toy("moe_merged"), toy("dense_tied"), toy("moe_merged")};
    const std::vector<float> expected[2] = {reference(paths[0], 1, kThreadsShared), reference(paths[1], 1, kThreadsShared)};
    const auto decode = [&](int i) {
        if (i == 2) {
            same_logits(reference(paths[2], 1, kThreadsShared), expected[0], "unstreamed");
            return;
        }
        Streaming s(kMinimum);
        s.n_threads = kThreadsShared;
        ToyModel m(paths[i], s);
        same_logits(m.logits(), expected[i], paths[i]);
    };
    std::thread threads[3];
    for (int i = 0; i < 3; ++i) {
        threads[i] = std::thread([&, i] {
            decode(i);
            decode(i);
        });
    }
    for (std::thread & t : threads) {
        t.join();
    }
}

TEST(loading_and_closing_again_and_again) {
    const std::string path = toy("moe_dense_lead");
    uint64_t after_some = 0;
    for (int i = 0; i < rounds(16); ++i) {
        ToyModel m(path, Streaming(i % 2 ? kMinimum : kFull));
        if (i % 4 != 3) { // otherwise closed with read-ahead in flight
            CHECK(!m.logits(0, 16, 4).empty());
        }
        after_some = i == 5 ? ls::process_resident_bytes() : after_some;
    }
    CHECK(sanitized() || ls::process_resident_bytes() < after_some + (24u << 20));
}

TEST(opened_and_closed_without_loading_or_activating) {
    const std::string path = toy("moe_dense_lead");
    for (int i = 0; i < 4; ++i) {
        ls_model * m = nullptr;
        REQUIRE(ls_model_open(path.c_str(), nullptr, &m) == LS_OK);
        if (i % 2) {
            REQUIRE(ls_load_begin(m, i == 3) == LS_OK);
            llama_model * model = llama_model_load_from_file(path.c_str(), llama_model_default_params());
            ls_load_end();
            REQUIRE(model != nullptr);
            llama_model_free(model);
        }
        ls_model_close(m);
    }
}
