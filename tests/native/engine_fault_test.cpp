// Drives and files that fail under a decoding model: a typed error, a live process, a clean next decode.
#include "check.h"
#include "read_gate.h"
#include "seq_points.h"
#include "support.h"
#include "toy_run.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

using check::GateReads;
using check::Streaming;
using check::ToyModel;

namespace {

Streaming with(uint64_t budget_bytes, uint32_t n_contexts = 1) {
    Streaming s;
    s.budget_bytes = budget_bytes;
    s.n_contexts = n_contexts;
    return s;
}

const char * const kNames[] = {"dense_untied", "moe_qwen3", "moe_dense_lead"};

// A private copy of a toy model that the test may damage and mend.
struct Copy {
    explicit Copy(const char * name) : path(folder.path("model.gguf")), bytes(check::read_file(check::toy(name))) {
        check::write_file(path, bytes);
        stat(path.c_str(), &before);
    }
    void cut() { CHECK_EQ(truncate(path.c_str(), off_t(bytes.size() / 2)), 0); }
    void mend() {
        check::write_file(path, bytes);
        const timespec times[2] = {before.st_atim, before.st_mtim};
        utimensat(AT_FDCWD, path.c_str(), times, 0);
    }

    check::ScratchFolder folder;
    std::string path;
    check::Bytes bytes;
    struct stat before = {};
};

} // namespace

TEST(file_cut_between_two_decodes) {
    for (const char * name : kNames) {
        Copy file(name);
        ToyModel m(file.path, with(check::budgets(file.path).minimum));
        const std::vector<float> expected = m.logits();
        REQUIRE(!expected.empty());
        file.cut();
        CHECK(m.logits().empty());
        const ls_error e = m.error();
        CHECK_EQ(e.status, LS_ERR_CHANGED);
        CHECK_EQ(std::string(e.path), file.path);
        CHECK_EQ(m.error().status, LS_OK); // taken
        CHECK(m.logits().empty());         // it is still cut
        CHECK_EQ(m.error().status, LS_ERR_CHANGED);
        file.mend();
        check::same_logits(m.logits(), expected, "restored");
        check::write_file(file.path, file.bytes); // same bytes, but nobody can know that
        CHECK(m.logits().empty());
        CHECK_EQ(m.error().status, LS_ERR_CHANGED);
    }
}

TEST(file_cut_inside_a_decode) {
    for (const char * name : kNames) {
        Copy file(name);
        ToyModel m(file.path, with(check::budgets(file.path).minimum));
        const std::vector<float> expected = m.logits();
        for (int at : {0, 3, 11}) {
            std::atomic<int> n{0};
            {
                GateReads gate([&](uint64_t, size_t) {
                    if (n++ == at) {
                        file.cut();
                    }
                    return 0;
                });
                CHECK(m.logits().empty());
            }
            CHECK_EQ(m.error().status, LS_ERR_CHANGED);
            file.mend();
            check::same_logits(m.logits(), expected, "restored");
        }
    }
}

TEST(a_read_that_fails_at_any_place) {
    for (const char * name : kNames) {
        const std::string path = check::toy(name);
        ToyModel m(path, with(check::budgets(path).minimum));
        const std::vector<float> expected = m.logits();
        int n_failures = 0;
        for (int at = 0; at < 60; at += 7) {
            std::atomic<int> n{0};
            {
                GateReads gate([&](uint64_t, size_t) { return n++ >= at ? EIO : 0; });
                CHECK(m.logits().empty());
            }
            const ls_error e = m.error();
            CHECK_EQ(e.status, LS_ERR_READ);
            CHECK_EQ(e.sys_errno, EIO);
            CHECK_EQ(std::string(e.path), path);
            CHECK(strlen(e.message) > 10);
            n_failures += e.status == LS_ERR_READ;
            check::same_logits(m.logits(), expected, "after a failed read");
        }
        CHECK_EQ(n_failures, 9);
    }
}

// One bad read that heals: whoever meets it fails or not, and the decode after is right.
TEST(a_single_failed_read) {
    for (const char * name : kNames) {
        const std::string path = check::toy(name);
        ToyModel m(path, with(check::budgets(path).minimum));
        const std::vector<float> expected = m.logits();
        for (int at = 0; at < 40; at += 5) {
            std::atomic<int> n{0};
            std::vector<float> got;
            {
                GateReads gate([&](uint64_t, size_t) { return n++ == at ? EIO : 0; });
                got = m.logits();
            }
            const ls_error e = m.error();
            CHECK_EQ(got.empty(), e.status == LS_ERR_READ);
            if (!got.empty()) {
                check::same_logits(got, expected, "a read-ahead failed and was repeated");
            }
            check::same_logits(m.logits(), expected, "after a failed read");
        }
    }
}

TEST(two_contexts_meet_a_failing_drive) {
    const std::string path = check::toy("moe_dense_lead");
    ToyModel m(path, with(check::budgets(path, 2).minimum, 2));
    const std::vector<float> expected = m.logits(0);
    for (int round = 0; round < 6; ++round) {
        std::atomic<int> n{0};
        {
            GateReads gate([&](uint64_t, size_t) { return n++ > 10 * round ? EIO : 0; });
            std::thread other([&] { CHECK(m.logits(1).empty()); });
            CHECK(m.logits(0).empty());
            other.join();
        }
        CHECK_EQ(m.error(0).status, LS_ERR_READ);
        CHECK_EQ(m.error(1).status, LS_ERR_READ);
        std::thread other([&] { check::same_logits(m.logits(1), expected, "second context"); });
        check::same_logits(m.logits(0), expected, "first context");
        other.join();
    }
}

TEST(activation_that_fails_can_be_repeated) {
    const std::string path = check::toy("moe_dense_lead");
    const std::vector<float> expected = ToyModel(path).logits();
    ls_model * stream = nullptr;
    REQUIRE(ls_install() == LS_OK && ls_model_open(path.c_str(), nullptr, &stream) == LS_OK);
    ls_model_close(stream);
    for (int at : {0, 4, 9}) {
        std::atomic<int> n{0};
        std::string message;
        {
            GateReads gate([&](uint64_t, size_t) { return n++ >= 20 + at ? EIO : 0; });
            try {
                ToyModel m(path, with(0));
            } catch (const std::exception & e) {
                message = e.what();
            }
        }
        CHECK(message.find("Input/output error") != std::string::npos);
    }
    ToyModel m(path, with(0));
    check::same_logits(m.logits(), expected, "a load that works");
}

// Weights become pinned while the graph is about to wait for them: every thread of the graph must see the same.
TEST(a_larger_budget_loads_under_a_decode) {
    const std::string path = check::toy("dense_untied");
    const uint64_t minimum = check::budgets(path).minimum;
    ToyModel m(path, with(minimum));
    const std::vector<float> expected = m.logits(0, 2, 0);
    llama_set_n_threads(m.context(), 8, 8); // more than there are cores: they arrive at different times
    GateReads gate([&](uint64_t, size_t) {
        static std::atomic<uint32_t> n{0};
        std::this_thread::sleep_for(std::chrono::microseconds(20 * (n++ % 16))); // spread over the graph
        return 0;
    });
    for (int round = 0; round < 300; ++round) {
        CHECK_EQ(ls_model_set_budget(m.streamed(), 0, 0), LS_OK);
        if (!check::same_logits(m.logits(0, 2, 0), expected, "while it loads")) {
            break;
        }
        CHECK_EQ(ls_model_set_budget(m.streamed(), minimum, 0), LS_OK);
    }
}

// A context that has failed computes on with zeros. Weights whose reads are under way meanwhile must not stay zeros.
TEST(weights_that_arrive_after_a_failure_are_used) {
    const std::string path = check::toy("dense_untied");
    const uint64_t minimum = check::budgets(path).minimum;
    ToyModel m(path, with(minimum));
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
    check::same_logits(m.logits(), expected, "after the failure");
    check::same_logits(m.logits(), expected, "once more");
}

// Weights are read into memory that belongs to llama.cpp's model: once that is freed nothing may land there.
TEST(freed_while_reads_are_under_way) {
    const std::string path = check::toy("dense_untied");
    const uint64_t minimum = check::budgets(path).minimum;
    for (int i = 0; i < 4; ++i) {
        std::atomic<int> n_started{0}, n_inside{0};
        GateReads gate([&](uint64_t, size_t) {
            n_started++;
            n_inside++;
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
            n_inside--;
            return 0;
        });
        ToyModel m(path, with(minimum));
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

TEST(decoding_before_activation) {
    const std::string path = check::toy("moe_dense_lead");
    ls_model * stream = nullptr;
    REQUIRE(ls_install() == LS_OK && ls_model_open(path.c_str(), nullptr, &stream) == LS_OK);
    REQUIRE(ls_load_begin(stream, 0) == LS_OK);
    llama_model * model = llama_model_load_from_file(path.c_str(), llama_model_default_params());
    llama_context * ctx = llama_init_from_model(model, llama_context_default_params());
    ls_load_end();
    llama_token token = 5;
    CHECK(llama_decode(ctx, llama_batch_get_one(&token, 1)) != 0);
    CHECK_EQ(ls_context_take_error(stream, ctx), LS_ERR_STATE);
    CHECK_EQ(ls_model_activate(stream, 1u << 20, 0, 0), LS_ERR_BUDGET);
    CHECK_EQ(ls_model_activate(stream, 0, 0, 0), LS_OK);
    CHECK_EQ(ls_model_activate(stream, 0, 0, 0), LS_ERR_STATE); // twice
    CHECK_EQ(ls_load_begin(stream, 0), LS_ERR_STATE);           // a second load
    CHECK_EQ(llama_decode(ctx, llama_batch_get_one(&token, 1)), 0);
    CHECK_EQ(ls_context_take_error(stream, ctx), LS_OK);
    llama_free(ctx);
    llama_model_free(model);
    ls_model_close(stream);
}

// A load that was begun and never ended must not outlive its model.
TEST(closed_between_load_begin_and_load_end) {
    const std::string path = check::toy("dense_untied");
    const std::vector<float> expected = ToyModel(path).logits();
    ls_model * stream = nullptr;
    REQUIRE(ls_install() == LS_OK && ls_model_open(path.c_str(), nullptr, &stream) == LS_OK);
    REQUIRE(ls_load_begin(stream, 0) == LS_OK);
    ls_model_close(stream);
    check::same_logits(ToyModel(path).logits(), expected, "an ordinary load afterwards");
    ls_load_end();
}
