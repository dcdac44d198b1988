// Drives and files that fail under a decoding model: a typed error, a live process, a clean next decode.
#include "check.h"
#include "read_gate.h"
#include "support.h"
#include "toy_run.h"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

using namespace check;

namespace {

const char * const kNames[] = {"dense_untied", "moe_qwen3", "moe_dense_lead"};

// A private copy of a toy model that the test may damage and mend.
struct Copy {
    explicit Copy(const char * name) : path(folder.path("model.gguf")), bytes(read_file(toy(name))) {
        write_file(path, bytes);
        stat(path.c_str(), &before);
    }
    void cut() { CHECK_EQ(truncate(path.c_str(), off_t(bytes.size() / 2)), 0); }
    void mend() {
        write_file(path, bytes);
        const timespec times[2] = {before.st_atim, before.st_mtim};
        utimensat(AT_FDCWD, path.c_str(), times, 0);
    }

    ScratchFolder folder;
    std::string path;
    Bytes bytes;
    struct stat before = {};
};

} // namespace

TEST(file_cut_between_two_decodes) {
    for (const char * name : kNames) {
        Copy file(name);
        ToyModel m(file.path, Streaming(kMinimum));
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
        same_logits(m.logits(), expected, "restored");
        write_file(file.path, file.bytes); // same bytes, but nobody can know that
        CHECK(m.logits().empty());
        CHECK_EQ(m.error().status, LS_ERR_CHANGED);
    }
}

TEST(file_cut_inside_a_decode) {
    for (const char * name : kNames) {
        Copy file(name);
        ToyModel m(file.path, Streaming(kMinimum));
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
            same_logits(m.logits(), expected, "restored");
        }
    }
}

TEST(a_read_that_fails_at_any_place) {
    for (const char * name : kNames) {
        const std::string path = toy(name);
        ToyModel m(path, Streaming(kMinimum));
        const std::vector<float> expected = m.logits();
        int n_failures = 0;
        for (int at = 0; at < 60; at += sanitized() ? 23 : 7) {
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
            same_logits(m.logits(), expected, "after a failed read");
        }
        CHECK_EQ(n_failures, sanitized() ? 3 : 9);
    }
}

// One bad read that heals: whoever meets it fails or not, and the decode after is right.
TEST(a_single_failed_read) {
    for (const char * name : kNames) {
        const std::string path = toy(name);
        ToyModel m(path, Streaming(kMinimum));
        const std::vector<float> expected = m.logits();
        for (int at = 0; at < 40; at += sanitized() ? 13 : 5) {
            std::atomic<int> n{0};
            std::vector<float> got;
            {
                GateReads gate([&](uint64_t, size_t) { return n++ == at ? EIO : 0; });
                got = m.logits();
            }
            const ls_error e = m.error();
            CHECK_EQ(got.empty(), e.status == LS_ERR_READ);
            if (!got.empty()) {
                same_logits(got, expected, "a read-ahead failed and was repeated");
            }
            same_logits(m.logits(), expected, "after a failed read");
        }
    }
}

TEST(two_contexts_meet_a_failing_drive) {
    const std::string path = toy("moe_dense_lead");
    Streaming s(kMinimum);
    s.n_contexts = 2;
    s.n_threads  = kThreadsShared;
    ToyModel m(path, s);
    const std::vector<float> expected = m.logits(0);
    for (int round = 0; round < rounds(6); ++round) {
        std::atomic<int> n{0};
        {
            GateReads gate([&](uint64_t, size_t) { return n++ > 10 * round ? EIO : 0; });
            std::thread other([&] { CHECK(m.logits(1).empty()); });
            CHECK(m.logits(0).empty());
            other.join();
        }
        CHECK_EQ(m.error(0).status, LS_ERR_READ);
        CHECK_EQ(m.error(1).status, LS_ERR_READ);
        std::thread other([&] { same_logits(m.logits(1), expected, "second context"); });
        same_logits(m.logits(0), expected, "first context");
        other.join();
    }
}

TEST(activation_that_fails_can_be_repeated) {
    const std::string path = toy("moe_dense_lead");
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
                ToyModel m(path, Streaming());
            } catch (const std::exception & e) {
                message = e.what();
            }
        }
        CHECK(message.find("Input/output error") != std::string::npos);
    }
    ToyModel m(path, Streaming());
    same_logits(m.logits(), expected, "a load that works");
}

TEST(decoding_before_activation) {
    const std::string path = toy("moe_dense_lead");
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
    const std::string path = toy("dense_untied");
    const std::vector<float> expected = ToyModel(path).logits();
    ls_model * stream = nullptr;
    REQUIRE(ls_install() == LS_OK && ls_model_open(path.c_str(), nullptr, &stream) == LS_OK);
    REQUIRE(ls_load_begin(stream, 0) == LS_OK);
    ls_model_close(stream);
    same_logits(ToyModel(path).logits(), expected, "an ordinary load afterwards");
    ls_load_end();
}
