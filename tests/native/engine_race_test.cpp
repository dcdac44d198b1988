// Budgets that change and models that are freed while reads are under way.
#include "check.h"
#include "read_gate.h"
#include "seq_points.h"
#include "toy_run.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

using namespace check;

// Weights become pinned while the graph is about to wait for them: every thread of the graph must see the same.
TEST(a_larger_budget_loads_under_a_decode) {
    const std::string path = toy("dense_untied");
    ToyModel m(path, Streaming(kMinimum));
    const std::vector<float> expected = m.logits(0, 2, 0);
    llama_set_n_threads(m.context(), 8, 8); // more than there are cores: they arrive at different times
    GateReads gate([&](uint64_t, size_t) {
        static std::atomic<uint32_t> n{0};
        std::this_thread::sleep_for(std::chrono::microseconds(20 * (n++ % 16))); // spread over the graph
        return 0;
    });
    for (int round = 0; round < rounds(300); ++round) {
        CHECK_EQ(ls_model_set_budget(m.streamed(), 0, 0), LS_OK);
        if (!same_logits(m.logits(0, 2, 0), expected, "while it loads")) {
            break;
        }
        CHECK_EQ(ls_model_set_budget(m.streamed(), m.minimum(), 0), LS_OK);
    }
}

// A context that has failed computes on with zeros. Weights whose reads are under way meanwhile must not stay zeros.
TEST(weights_that_arrive_after_a_failure_are_used) {
    const std::string path = toy("dense_untied");
    ToyModel m(path, Streaming(kMinimum));
    const std::vector<float> expected = m.logits();
    const uint64_t later = m.file_offset("blk.2.attn_q.weight");
    ls::testing::SeqPoints points;
    points.hold("later");
    {
        std::atomic<int> n_held{0};
        GateReads gate([&](uint64_t offset, size_t) {
            if (offset < later) {
                return EIO;
            }
            if (n_held++ < 2) { // the other readers go on
                points.arrive("later");
            }
            return 0;
        });
        CHECK_EQ(ls_model_set_budget(m.streamed(), 0, 0), LS_OK); // starts loading everything
        points.wait_for("later", 2);
        CHECK(m.logits().empty());
        CHECK_EQ(m.error().status, LS_ERR_READ);
        points.release("later");
        CHECK_EQ(ls_model_set_budget(m.streamed(), 0, 0), LS_OK); // waits for those reads
    }
    same_logits(m.logits(), expected, "after the failure");
    same_logits(m.logits(), expected, "once more");
}

// Weights are read into memory that belongs to llama.cpp's model: once that is freed nothing may land there.
TEST(freed_while_reads_are_under_way) {
    const std::string path = toy("dense_untied");
    for (int i = 0; i < 4; ++i) {
        std::atomic<int> n_started{0}, n_inside{0};
        GateReads gate([&](uint64_t, size_t) {
            n_started++;
            n_inside++;
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
            n_inside--;
            return 0;
        });
        ToyModel m(path, Streaming(kMinimum));
        CHECK(!m.logits(0, 4, 1).empty());
        const int before = n_started;
        CHECK_EQ(ls_model_set_budget(m.streamed(), 0, 0), LS_OK); // starts loading
        while (n_started < before + 2 * i) {
            std::this_thread::yield();
        }
        m.free_model();
        CHECK_EQ(n_inside.load(), 0);
        const int after = n_started;
        m.close();
        CHECK_EQ(n_started.load(), after);
    }
}
