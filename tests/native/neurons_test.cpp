// Lean files through llama.h: the same logits at every budget, with several contexts, and after reads that failed.
#include "check.h"
#include "read_gate.h"
#include "toy_run.h"

#include "memory.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

using namespace check;

namespace {

std::vector<float> everything_resident(const std::string & path, uint32_t fidelity) {
    Streaming s;
    s.fidelity = fidelity;
    ToyModel m(path, s);
    return m.logits();
}

void same_at_every_budget(const char * name, uint32_t fidelity = 0) {
    const std::string path = toy(name);
    const std::vector<float> expected = everything_resident(path, fidelity);
    REQUIRE(!expected.empty());
    for (double level : { kMinimum, kMiddle }) {
        Streaming s(level);
        s.fidelity = fidelity;
        ToyModel m(path, s);
        same_logits(m.logits(), expected, path + " at level " + std::to_string(level));
        CHECK(level == kMiddle || m.stats().read_bytes > 0);
        CHECK_EQ(ls_model_set_budget(m.streamed(), 0, 0), LS_OK);
        same_logits(m.logits(), expected, path + " with all of it");
        CHECK_EQ(ls_model_set_budget(m.streamed(), m.minimum(), 0), LS_OK);
        same_logits(m.logits(), expected, path + " with the minimum again");
    }
}

} // namespace

TEST(ungated)  { same_at_every_budget("dense_arcee_lean"); }
TEST(gated)    { same_at_every_budget("dense_tied_lean"); }
TEST(faithful) { same_at_every_budget("dense_arcee_faithful", 1); }
TEST(experts)  { same_at_every_budget("moe_merged_lean"); }

// Matrices for a device do not concern the host: neither their bytes nor the order of neurons show.
TEST(made_for_a_device_and_run_without) {
    for (const char * name : { "dense_arcee", "dense_tied" }) {
        same_logits(everything_resident(toy(std::string(name) + "_device"), 0), everything_resident(toy(std::string(name) + "_lean"), 0), name);
    }
    same_at_every_budget("dense_arcee_device");
}

TEST(the_order_in_which_reads_arrive_does_not_show) {
    for (const auto & [name, fidelity] : { std::pair<const char *, uint32_t>{ "dense_arcee_lean", 0 }, { "dense_tied_lean", 0 },
                                           { "dense_arcee_faithful", 1 } }) {
        const std::string path = toy(name);
        const std::vector<float> expected = everything_resident(path, fidelity);
        Streaming s(kMiddle);
        s.fidelity = fidelity;
        ToyModel m(path, s);
        std::atomic<uint32_t> n{0};
        GateReads gate([&](uint64_t, size_t) { // some neurons are computed while others are still on their way
            std::this_thread::sleep_for(std::chrono::microseconds(n++ * 2654435761u >> 22));
            return 0;
        });
        for (int i = 0; i < rounds(3); ++i) {
            same_logits(m.logits(), expected, path + " with slow reads");
        }
    }
}

TEST(two_contexts_share_a_cache_that_is_too_small_for_both) {
    const std::string path = toy("dense_arcee_lean");
    const std::vector<float> expected = everything_resident(path, 0);
    Streaming s(kMinimum);
    s.n_contexts = 2;
    s.n_threads = kThreadsShared;
    ToyModel m(path, s);
    ToyModel alone(path, s);
    const std::vector<float> reference = alone.logits(); // with this number of threads
    std::thread other([&] {
        for (int i = 0; i < rounds(4); ++i) {
            same_logits(m.logits(1), reference, "second context");
        }
    });
    for (int i = 0; i < rounds(4); ++i) {
        same_logits(m.logits(0), reference, "first context");
    }
    other.join();
    CHECK_EQ(expected.size(), reference.size());
}

TEST(a_read_that_fails_leaves_no_trace) {
    const std::string path = toy("dense_arcee_lean");
    const std::vector<float> expected = everything_resident(path, 0);
    ToyModel m(path, Streaming(kMinimum));
    const uint64_t clusters = m.file_offset("blk.2.ffn.clusters.lean");
    for (int at : { 0, 7, 300 }) {
        {
            std::atomic<int> n{0};
            GateReads gate([&](uint64_t offset, size_t) { return offset >= clusters && n++ == at ? EIO : 0; });
            if (m.logits().empty()) {
                CHECK_EQ(m.error().status, LS_ERR_READ);
            } else {
                CHECK(n <= at); // so few reads were made
            }
        }
        same_logits(m.logits(), expected, "after a failed read");
        CHECK_EQ(m.error().status, LS_OK);
    }
}
