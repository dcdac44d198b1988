// The C API: NULL, bad values and calls in the wrong order give a status.
#include "check.h"
#include "gguf_writer.h"

#include "leanstream.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

namespace {

struct OpenedModel {
    explicit OpenedModel(const ls_options * options = nullptr) {
        path = folder.path("model.gguf");
        check::GgufWriter g;
        g.text("general.architecture", "llama").u32("llama.block_count", 1).tensor("token_embd.weight", {32, 2048});
        check::write_file(path, g.bytes());
        status = ls_model_open(path.c_str(), options, &model);
    }
    ~OpenedModel() { ls_model_close(model); }
    OpenedModel(const OpenedModel &) = delete;

    check::ScratchFolder folder;
    std::string path;
    ls_model * model = nullptr;
    ls_status status;
};

std::string last_message() {
    ls_error e;
    ls_last_error(&e);
    return e.message;
}

} // namespace

TEST(null_everywhere) {
    OpenedModel opened;
    REQUIRE(opened.status == LS_OK);
    ls_model * m = opened.model;
    ls_model * out = nullptr;
    char * text = nullptr;
    ls_memory memory;
    ls_stats stats;
    double x = 0, y = 0;
    uint32_t direct = 0;
    CHECK_EQ(ls_model_open(nullptr, nullptr, &out), LS_ERR_ARGUMENT);
    CHECK(out == nullptr);
    CHECK_EQ(ls_model_open(opened.path.c_str(), nullptr, nullptr), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_model_index_json(nullptr, &text), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_model_index_json(m, nullptr), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_load_begin(nullptr, 0), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_load_limit_outputs(nullptr, 1), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_model_activate(nullptr, 0, 0, 0), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_model_set_budget(nullptr, 0, 0), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_model_set_policy(nullptr, "lru", ""), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_model_set_policy(m, nullptr, ""), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_model_pin(nullptr, 0, nullptr, 0), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_model_pin(m, 0, nullptr, 1), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_model_plan_json(nullptr, 0, 0, 0, &text), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_model_plan_json(m, 0, 0, 0, nullptr), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_model_get_memory(nullptr, &memory), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_model_get_memory(m, nullptr), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_model_get_stats(nullptr, &stats), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_model_get_stats(m, nullptr), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_context_take_error(nullptr, nullptr), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_context_take_error(m, nullptr), LS_OK); // no such context: no error of its own
    CHECK_EQ(ls_probe_reads(nullptr, 4096, 1, 0, 1, 0, &x, &y, &direct), LS_ERR_ARGUMENT);
    CHECK_EQ(ls_probe_reads(opened.path.c_str(), 65536, 1, 0, 1, 0, nullptr, &y, &direct), LS_ERR_ARGUMENT);
    CHECK(text == nullptr);
    ls_model_close(nullptr);
    ls_model_reset_stats(nullptr);
    ls_string_free(nullptr);
    ls_last_error(nullptr);
    ls_struct_sizes(nullptr);
    ls_load_end();
    uint8_t flag = 0;
    CHECK(!ls_flag_is_set(nullptr) && !ls_flag_is_set(&flag));
    flag = 2;
    CHECK(ls_flag_is_set(&flag));
}

TEST(calls_in_the_wrong_order) {
    OpenedModel opened;
    ls_model * m = opened.model;
    char * text = nullptr;
    CHECK_EQ(ls_model_activate(m, 0, 0, 0), LS_ERR_STATE);
    CHECK_EQ(ls_model_set_budget(m, 1u << 30, 0), LS_ERR_STATE);
    CHECK_EQ(ls_model_plan_json(m, 0, 0, 0, &text), LS_ERR_STATE);
    const int32_t id = 0;
    CHECK_EQ(ls_model_pin(m, 0, &id, 1), LS_ERR_STATE);
    CHECK_EQ(ls_model_set_policy(m, "lfu", "{\"half_life\":100}"), LS_OK); // for later
    CHECK_EQ(ls_model_set_policy(m, "best", ""), LS_ERR_ARGUMENT);
    ls_memory memory;
    memset(&memory, 0xff, sizeof(memory));
    CHECK_EQ(ls_model_get_memory(m, &memory), LS_OK);
    CHECK_EQ(memory.cache_bytes, 0);
    ls_stats stats;
    CHECK_EQ(ls_model_get_stats(m, &stats), LS_OK);
    CHECK_EQ(stats.n_tokens, 0);
    ls_model_reset_stats(m);
    CHECK_EQ(ls_load_begin(m, 1), LS_OK);
    ls_load_end();
    ls_load_end();
    CHECK_EQ(ls_model_activate(m, 0, 0, 0), LS_ERR_STATE); // opened for measuring
}

TEST(errors_of_opening_carry_the_path) {
    ls_model * m = (ls_model *) 1;
    CHECK_EQ(ls_model_open("/nonexistent/model.gguf", nullptr, &m), LS_ERR_NOT_FOUND);
    CHECK(m == nullptr);
    ls_error e;
    ls_last_error(&e);
    CHECK_EQ(e.status, LS_ERR_NOT_FOUND);
    CHECK_EQ(std::string(e.path), "/nonexistent/model.gguf");
    CHECK(last_message().size() > 10);
    CHECK_EQ(ls_model_open(".", nullptr, &m), LS_ERR_UNREADABLE);
    CHECK_EQ(ls_model_open("", nullptr, &m), LS_ERR_NOT_FOUND);
}

TEST(index_json_through_the_api) {
    OpenedModel opened;
    char * text = nullptr;
    REQUIRE(ls_model_index_json(opened.model, &text) == LS_OK);
    CHECK(std::string(text).find("\"arch\":\"llama\"") != std::string::npos);
    ls_string_free(text);
}

TEST(options_at_their_limits) {
    constexpr uint32_t many = std::numeric_limits<uint32_t>::max();
    for (int i = 0; i < 8; ++i) {
        ls_options o = {};
        o.direct_io = i % 2;
        switch (i) {
            case 1: o.n_io_threads = many; break;
            case 2: o.io_depth = many; break;
            case 3: o.io_depth = many; o.io_backend = ls_have_io_uring() ? 2 : 1; break;
            case 4: o.io_backend = 3; break;
            case 5: o.chunk_bytes = std::numeric_limits<uint64_t>::max(); break;
            case 6: o.chunk_bytes = 5ull << 30; break;
            case 7: o.n_ring_slots = many; break;
            default: break;
        }
        OpenedModel opened(&o);
        CHECK_EQ(opened.status, i == 0 ? LS_OK : LS_ERR_ARGUMENT);
        CHECK((opened.model != nullptr) == (opened.status == LS_OK));
    }
    ls_options good = {};
    good.n_io_threads = 1;
    good.io_backend = 1;
    good.chunk_bytes = 1; // rounded up to a page
    good.n_ring_slots = 4;
    CHECK_EQ(OpenedModel(&good).status, LS_OK);
}

TEST(probing_reads) {
    OpenedModel opened;
    double bytes = 0, reads = 0;
    uint32_t direct = 7;
    for (uint32_t backend : {0u, 1u, ls_have_io_uring() ? 2u : 1u}) {
        for (uint32_t sequential : {0u, 1u}) {
            CHECK_EQ(ls_probe_reads(opened.path.c_str(), 65536, 4, sequential, 5, backend, &bytes, &reads, &direct), LS_OK);
            CHECK(bytes > 0 && reads > 0 && direct <= 1);
        }
    }
    const auto probe = [&](const char * path, uint64_t block, uint32_t depth, uint32_t backend) {
        return ls_probe_reads(path, block, depth, 0, 1, backend, &bytes, &reads, &direct);
    };
    const char * path = opened.path.c_str();
    CHECK_EQ(probe(path, 0, 1, 0), LS_ERR_ARGUMENT);
    CHECK_EQ(probe(path, 1000, 1, 0), LS_ERR_ARGUMENT);
    CHECK_EQ(probe(path, 1ull << 40, 1, 0), LS_ERR_ARGUMENT);
    CHECK_EQ(probe(path, 32u << 20, 1, 0), LS_ERR_ARGUMENT); // larger than the file
    CHECK_EQ(probe(path, 4096, 0, 0), LS_ERR_ARGUMENT);
    CHECK_EQ(probe(path, 4096, 65, 0), LS_ERR_ARGUMENT);
    CHECK_EQ(probe(path, 4096, 1, 9), LS_ERR_ARGUMENT);
    CHECK_EQ(probe("/nonexistent", 4096, 1, 0), LS_ERR_NOT_FOUND);
    CHECK(probe(".", 4096, 1, 0) != LS_OK);
}

TEST(facts_about_the_library) {
    uint64_t sizes[4];
    ls_struct_sizes(sizes);
    CHECK_EQ(sizes[0], sizeof(ls_error));
    CHECK_EQ(sizes[1], sizeof(ls_options));
    CHECK_EQ(sizes[2], sizeof(ls_memory));
    CHECK_EQ(sizes[3], sizeof(ls_stats));
    CHECK_EQ(strlen(ls_llama_commit()), 40);
    CHECK_EQ(ls_install(), LS_OK);
    CHECK_EQ(ls_install(), LS_OK); // again
}
