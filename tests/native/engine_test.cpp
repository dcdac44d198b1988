// Streamed logits are the bytes of an unstreamed load, whatever the budget.
#include "check.h"
#include "toy_run.h"

#include "memory.h"

#include <cstring>
#include <thread>

using check::Budgets;
using check::Streaming;
using check::ToyModel;

namespace {

constexpr uint32_t kPread = 1, kUring = 2;

std::vector<float> reference(const std::string & path, uint32_t seed = 1) {
    return ToyModel(path).logits(0, 64, 16, seed);
}

Streaming with(uint64_t budget_bytes, uint32_t backend = kPread, uint32_t n_contexts = 1) {
    Streaming s;
    s.budget_bytes = budget_bytes;
    s.io_backend   = backend;
    s.n_contexts   = n_contexts;
    return s;
}

// Decodes twice, the second time with a warm cache. Returns the bytes read after activation.
uint64_t run_at(const std::string & path, const Streaming & s, const std::vector<float> & expected) {
    ToyModel m(path, s);
    check::same_logits(m.logits(), expected, path + " at " + std::to_string(s.budget_bytes));
    CHECK_EQ(m.error().status, LS_OK);
    const ls_stats st = m.stats();
    CHECK_EQ(st.n_tokens, 80);
    CHECK_EQ(st.n_graphs, 2 + 16);
    CHECK_EQ(st.budget_bytes, s.budget_bytes);
    CHECK(st.read_bytes >= st.needed_bytes || st.needed_bytes <= st.load_bytes + st.read_bytes);
    check::same_logits(m.logits(), expected, path + " again");
    return m.stats().read_bytes;
}

void exact_at_every_budget(const char * name) {
    const std::string path = check::toy(name);
    const std::vector<float> expected = reference(path);
    REQUIRE(!expected.empty());
    const Budgets b = check::budgets(path);
    REQUIRE(b.minimum <= b.full);
    const bool streams = b.minimum < b.full; // the minimum of a model that runs its layers in cycles is all of them
    CHECK(streams || strcmp(name, "dense_looped") == 0);
    const uint64_t least = run_at(path, with(b.minimum), expected);
    const uint64_t middle = run_at(path, with(b.middle), expected);
    CHECK(least > 0);
    CHECK(middle < least || !streams);
    const uint64_t rows_only = run_at(path, with(b.full + (1u << 20)), expected);
    CHECK(rows_only <= middle);
    run_at(path, with(0), expected);
    if (ls_have_io_uring()) {
        run_at(path, with(b.minimum, kUring), expected);
    }
}

// the address space of a sanitizer grows by itself
constexpr bool sanitized() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return true;
#else
    return false;
#endif
}

} // namespace

TEST(dense_untied)   { exact_at_every_budget("dense_untied"); }
TEST(dense_tied)     { exact_at_every_budget("dense_tied"); }
TEST(dense_looped)   { exact_at_every_budget("dense_looped"); }
TEST(moe_qwen3)      { exact_at_every_budget("moe_qwen3"); }
TEST(moe_bias)       { exact_at_every_budget("moe_bias"); }
TEST(moe_merged)     { exact_at_every_budget("moe_merged"); }
TEST(moe_dense_lead) { exact_at_every_budget("moe_dense_lead"); }

TEST(everything_resident_reads_nothing_later) {
    const std::string path = check::toy("moe_bias");
    ToyModel m(path, with(0));
    m.logits();
    const ls_stats s = m.stats();
    CHECK_EQ(s.misses, 0);
    CHECK(s.hits > 0);
    CHECK_EQ(s.n_evictions, 0);
    CHECK_EQ(s.n_waves, 0);
    CHECK(s.load_bytes > 0);
}

TEST(a_prompt_with_more_experts_than_slots_runs_in_waves) {
    const std::string path = check::toy("moe_qwen3");
    ToyModel m(path, with(check::budgets(path).minimum));
    m.logits(0, 64, 0);
    CHECK(m.stats().n_waves > 0);
    CHECK(m.stats().misses > 0);
    ls_model_reset_stats(m.streamed());
    CHECK_EQ(m.stats().misses, 0);
    CHECK_EQ(m.stats().read_bytes, 0);
    CHECK(m.stats().load_bytes > 0);
}

TEST(a_fixed_expert_cache_holds) {
    const std::string path = check::toy("moe_bias");
    const std::vector<float> expected = reference(path);
    Streaming s;
    {
        ToyModel m(path, {});
        s.cache_bytes = m.plan_number("capacity_bytes") / 4;
    }
    ToyModel m(path, s);
    check::same_logits(m.logits(), expected, "a quarter of the experts");
    CHECK_EQ(m.stats().cache_capacity_bytes, s.cache_bytes);
    CHECK(m.stats().n_evictions > 0);
}

TEST(two_contexts_decode_at_once_at_the_minimum) {
    for (const char * name : {"moe_qwen3", "dense_untied", "moe_dense_lead", "dense_looped"}) {
        const std::string path = check::toy(name);
        const std::vector<float> expected[2] = {reference(path, 1), reference(path, 2)};
        ToyModel m(path, with(check::budgets(path, 2).minimum, kPread, 2));
        for (int round = 0; round < 4; ++round) {
            std::vector<float> got[2];
            std::thread other([&] { got[1] = m.logits(1, 64, 16, 2); });
            got[0] = m.logits(0, 64, 16, 1);
            other.join();
            check::same_logits(got[0], expected[0], std::string(name) + " first context");
            check::same_logits(got[1], expected[1], std::string(name) + " second context");
        }
        CHECK_EQ(m.stats().n_tokens, 4 * 2 * 80);
    }
}

TEST(two_models_and_an_unstreamed_one_at_once) {
    const std::string paths[3] = {check::toy("moe_merged"), check::toy("dense_tied"), check::toy("moe_merged")};
    const std::vector<float> expected[2] = {reference(paths[0]), reference(paths[1])};
    std::thread threads[3];
    for (int i = 0; i < 3; ++i) {
        threads[i] = std::thread([&, i] {
            for (int round = 0; round < 2; ++round) {
                if (i == 2) {
                    check::same_logits(reference(paths[2]), expected[0], "unstreamed");
                } else {
                    ToyModel m(paths[i], with(check::budgets(paths[i]).minimum));
                    check::same_logits(m.logits(), expected[i], paths[i]);
                }
            }
        });
    }
    for (std::thread & t : threads) {
        t.join();
    }
}

TEST(loading_and_closing_again_and_again) {
    const std::string path = check::toy("moe_dense_lead");
    const Budgets b = check::budgets(path);
    uint64_t after_some = 0;
    for (int i = 0; i < 16; ++i) {
        ToyModel m(path, with(i % 2 ? b.minimum : b.full + (1u << 20)));
        if (i % 4 != 3) { // otherwise closed with read-ahead in flight
            CHECK(!m.logits(0, 16, 4).empty());
        }
        after_some = i == 5 ? ls::process_resident_bytes() : after_some;
    }
    CHECK(sanitized() || ls::process_resident_bytes() < after_some + (24u << 20));
}

TEST(opened_and_closed_without_loading_or_activating) {
    const std::string path = check::toy("moe_dense_lead");
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
