// Budgets that change and models that are freed while reads are under way.
#include "check.h"
#include "read_gate.h"
#include "seq_points.h"
#include "toy_run.h"

#include "ggml.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
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

namespace {

std::string speculation(const ToyModel & m) {
    char * text = nullptr;
    CHECK_EQ(ls_model_speculation_json(m.streamed(), &text), LS_OK);
    const std::string found = text ? text : "";
    ls_string_free(text);
    return found;
}

// half of the experts
Streaming half_of(const std::string & path) {
    Streaming s;
    s.cache_bytes = ToyModel(path, Streaming()).plan_number("capacity_bytes") / 2;
    return s;
}

} // namespace

// The layer goes ahead with the experts that are here; on their outputs the next layer is guessed while the others are read.
TEST(missing_experts_are_awaited_behind_the_others) {
    for (const char * name : {"moe_qwen3", "moe_dense_lead"}) {
        const std::string path = toy(name);
        const std::vector<float> expected = ToyModel(path).logits();
        const std::vector<uint32_t> some = sanitized() ? std::vector<uint32_t>{3} : std::vector<uint32_t>{2, 3, UINT32_MAX};
        for (uint32_t stages : some) {
            Streaming s = half_of(path);
            s.n_threads = 3; // more than there are cores, or an odd number
            ToyModel m(path, s);
            CHECK_EQ(ls_model_set_speculation(m.streamed(), 2, stages), LS_OK);
            GateReads gate([](uint64_t, size_t) { // longer than all that is computed meanwhile
                std::this_thread::sleep_for(std::chrono::milliseconds(sanitized() ? 200 : 1));
                return 0;
            });
            same_logits(m.logits(), expected, name);
            CHECK(m.stats().misses > 0);
            CHECK_EQ(speculation(m).find("\"lead\":4,") != std::string::npos, stages > 2);
        }
    }
}

TEST(an_awaited_expert_that_cannot_be_read_fails_the_decode_only) {
    const std::string path = toy("moe_qwen3");
    const std::vector<float> expected = ToyModel(path).logits();
    ToyModel m(path, half_of(path));
    const uint64_t experts = m.file_offset("blk.1.ffn_down_exps.weight");
    for (int failing = 1; failing < 40; failing += 3) {
        std::atomic<int> n{0};
        {
            GateReads gate([&](uint64_t offset, size_t) {
                std::this_thread::sleep_for(std::chrono::microseconds(300));
                return offset >= experts && n++ == failing ? EIO : 0;
            });
            const bool ok = !m.logits().empty();
            CHECK(ok || m.error().status == LS_ERR_READ);
        }
        same_logits(m.logits(), expected, "after a failed read");
    }
}

namespace {

struct Seen {
    std::vector<std::string> names;
    std::vector<float> values;
};

// every intermediate result of one layer's experts
bool observe(ggml_tensor * t, bool ask, void * data) {
    const bool wanted = strncmp(t->name, "ffn_moe_", 8) == 0 && t->type == GGML_TYPE_F32 && ggml_is_contiguous(t) && strstr(t->name, "-1");
    if (wanted && !ask) {
        Seen & seen = *(Seen *) data;
        seen.names.push_back(t->name);
        seen.values.insert(seen.values.end(), (const float *) t->data, (const float *) t->data + ggml_nelements(t));
    }
    return wanted || !ask;
}

} // namespace

TEST(who_looks_at_single_nodes_sees_what_an_unstreamed_model_shows) {
    const std::string path = toy("moe_qwen3");
    Seen resident, half;
    Streaming s;
    s.observer = observe;
    s.observer_data = &resident;
    ToyModel(path, s).logits();
    s.cache_bytes = half_of(path).cache_bytes;
    s.observer_data = &half;
    ToyModel(path, s).logits();
    CHECK(!resident.values.empty());
    CHECK(std::find(half.names.begin(), half.names.end(), "ffn_moe_gate-1") != half.names.end());
    CHECK(resident.names == half.names);
    same_logits(half.values, resident.values, "intermediate results");
}
