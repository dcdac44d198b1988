#include "check.h"
#include "gguf_writer.h"

#include "index.h"

#include "ggml.h"

#include <cstring>

using namespace ls;
using check::Bytes;
using check::GgufWriter;

namespace {

GgufWriter small() {
    GgufWriter g;
    g.text("general.architecture", "llama").u32("llama.block_count", 2).u32("llama.embedding_length", 8).u32("llama.expert_count", 4)
        .u32("llama.expert_used_count", 2).u32s("llama.feed_forward_length", {16, 32}).f32("llama.rope.freq_base", 1e4f)
        .texts("tokenizer.ggml.tokens", {"a", "b", "c"});
    return g.tensor("token_embd.weight", {8, 3}).tensor("blk.0.ffn_up.weight", {8, 16}).tensor("output_norm.weight", {8});
}

struct Folder : check::ScratchFolder {
    std::string write(const std::string & name, const Bytes & bytes) {
        const std::string p = path(name);
        check::write_file(p, bytes);
        return p;
    }
    ls_error error(const std::string & name, const Bytes & bytes) {
        const std::string p = write(name, bytes);
        const ls_error e = check::error_of([&] { read_index(p); });
        CHECK(e.status == LS_OK || strstr(e.path, name.c_str()));
        CHECK(e.status == LS_OK || strlen(e.message) > 20);
        return e;
    }
};

Bytes patched(Bytes bytes, size_t at, uint64_t value) {
    memcpy(&bytes[at], &value, sizeof(value));
    return bytes;
}

// part `no` of two
Bytes part(uint16_t no, uint16_t count = 2, int total = 3) {
    GgufWriter g;
    if (no == 0) {
        g.text("general.architecture", "llama").u32("llama.block_count", 1);
    }
    g.u16("split.no", no).u16("split.count", count).u32("split.tensors.count", uint32_t(total));
    no == 0 ? g.tensor("token_embd.weight", {8, 4}) : g.tensor("blk.0.ffn_up.weight", {8, 8}).tensor("output_norm.weight", {8});
    return g.bytes();
}

} // namespace

TEST(a_good_file) {
    Folder folder;
    const GgufWriter g = small();
    const Index index = read_index(folder.write("good.gguf", g.bytes()));
    CHECK_EQ(index.arch, "llama");
    CHECK_EQ(index.n_layer, 2);
    CHECK_EQ(index.n_expert, 4);
    CHECK_EQ(index.n_expert_used, 2);
    CHECK_EQ(index.n_vocab(), 3);
    CHECK_EQ(index.arch_int("feed_forward_length", 0), 16); // per layer: the first stands for the model
    CHECK_EQ(index.arch_int("absent", -5), -5);
    CHECK_EQ(index.shards.size(), 1);
    CHECK_EQ(index.shards[0].n_bytes, g.bytes().size());
    REQUIRE(index.tensors.size() == 3);
    const IndexEntry * up = index.find("blk.0.ffn_up.weight");
    REQUIRE(up != nullptr);
    CHECK_EQ(up->type, GGML_TYPE_F32);
    CHECK_EQ(up->ne[0], 8);
    CHECK_EQ(up->ne[1], 16);
    CHECK_EQ(up->ne[2], 1);
    CHECK_EQ(up->n_bytes, 8 * 16 * 4);
    const Bytes expected = check::random_bytes(up->n_bytes, 2), file = g.bytes();
    CHECK(memcmp(&file[up->offset], expected.data(), up->n_bytes) == 0);
    CHECK(index.find("absent") == nullptr);
}

TEST(json_of_the_index) {
    Folder folder;
    const std::string text = read_index(folder.write("good.gguf", small().bytes())).json();
    for (const char * piece : {"\"arch\":\"llama\"", "\"n_layer\":2", "\"n_vocab\":3", "\"n_embd\":8", "\"n_ff\":16",
             "{\"name\":\"blk.0.ffn_up.weight\",\"type\":\"f32\",\"shape\":[8,16,1,1],\"offset\":", "\"bytes\":512,\"shard\":0}",
             "\"llama.rope.freq_base\":10000"}) {
        if (text.find(piece) == std::string::npos) {
            check::failed(__FILE__, __LINE__, std::string(piece) + " is not in " + text);
        }
    }
}

TEST(a_split_set) {
    Folder folder;
    const std::string first = folder.write("m-00001-of-00002.gguf", part(0));
    const std::string second = folder.write("m-00002-of-00002.gguf", part(1));
    const Index index = read_index(first);
    CHECK_EQ(index.shards.size(), 2);
    CHECK_EQ(index.tensors.size(), 3);
    CHECK_EQ(index.find("token_embd.weight")->shard, 0);
    CHECK_EQ(index.find("output_norm.weight")->shard, 1);
    CHECK_EQ(check::error_of([&] { read_index(second); }).status, LS_ERR_SHARD); // not the first
}

TEST(split_sets_that_are_wrong) {
    const struct { const char * first; Bytes one; const char * second; Bytes two; ls_status status; } cases[] = {
        {"a-00001-of-00002.gguf", part(0), nullptr, {}, LS_ERR_SHARD},                                // second missing
        {"renamed.gguf", part(0), "a-00002-of-00002.gguf", part(1), LS_ERR_SHARD},                    // no name pattern
        {"a-00001-of-00002.gguf", part(0), "a-00002-of-00002.gguf", part(1, 3), LS_ERR_SHARD},        // of another set
        {"a-00001-of-00002.gguf", part(0), "a-00002-of-00002.gguf", part(0), LS_ERR_SHARD},           // the first twice
        {"a-00001-of-00002.gguf", part(0, 2, 4), "a-00002-of-00002.gguf", part(1), LS_ERR_SHARD},     // a tensor too few
        {"a-00001-of-00002.gguf", part(0), "a-00002-of-00002.gguf", {'G', 'G'}, LS_ERR_TRUNCATED},
        {"a-00001-of-00002.gguf", part(0), "a-00002-of-00002.gguf", small().bytes(), LS_ERR_SHARD},
    };
    for (const auto & c : cases) {
        Folder folder;
        const std::string first = folder.write(c.first, c.one);
        if (c.second) {
            folder.write(c.second, c.two);
        }
        CHECK_EQ(check::error_of([&] { read_index(first); }).status, c.status);
    }
}

TEST(files_cut_short) {
    Folder folder;
    const GgufWriter g = small();
    const Bytes good = g.bytes();
    CHECK_EQ(folder.error("empty.gguf", {}).status, LS_ERR_TRUNCATED);
    for (size_t n : {1, 3, 4, 8, 23}) {
        CHECK_EQ(folder.error("head.gguf", Bytes(good.begin(), good.begin() + n)).status, LS_ERR_TRUNCATED);
    }
    for (size_t n = GgufWriter::kHeaderBytes; n < good.size() - g.data_bytes(); ++n) {
        const ls_status s = ls_status(folder.error("meta.gguf", Bytes(good.begin(), good.begin() + n)).status);
        CHECK(s == LS_ERR_FORMAT || s == LS_ERR_TRUNCATED);
    }
    const ls_error data = folder.error("data.gguf", Bytes(good.begin(), good.end() - 40));
    CHECK_EQ(data.status, LS_ERR_TRUNCATED);
    CHECK_EQ(data.used_bytes, good.size() - 40);
    CHECK_EQ(data.limit_bytes, good.size());
    CHECK(strstr(data.message, "output_norm.weight"));
}

TEST(files_that_are_something_else) {
    Folder folder;
    const Bytes good = small().bytes();
    CHECK_EQ(folder.error("text.gguf", Bytes(100, 'x')).status, LS_ERR_FORMAT);
    const ls_error zip = folder.error("model.pt", {'P', 'K', 3, 4, 0, 0, 0, 0, 0, 0});
    CHECK_EQ(zip.status, LS_ERR_FORMAT);
    CHECK(strstr(zip.message, "PyTorch"));
    Bytes swapped = good;
    std::swap(swapped[4], swapped[7]);
    CHECK_EQ(folder.error("big.gguf", swapped).status, LS_ERR_ENDIAN);
    Bytes joined = good;
    joined.insert(joined.end(), good.begin(), good.end());
    CHECK_EQ(folder.error("joined.gguf", joined).status, LS_ERR_JOINED);
    GgufWriter nameless;
    CHECK_EQ(folder.error("nameless.gguf", nameless.u32("x", 1).tensor("t", {4}).bytes()).status, LS_ERR_FORMAT);
    GgufWriter numbered;
    CHECK_EQ(folder.error("numbered.gguf", numbered.u32("general.architecture", 1).tensor("t", {4}).bytes()).status, LS_ERR_FORMAT);
    GgufWriter twice;
    CHECK_EQ(folder.error("twice.gguf", twice.text("general.architecture", "llama").tensor("t", {4}).tensor("t", {4}).bytes()).status,
        LS_ERR_FORMAT);
    CHECK_EQ(check::error_of([&] { read_index(folder.path("absent.gguf")); }).status, LS_ERR_NOT_FOUND);
    CHECK_EQ(check::error_of([&] { read_index("."); }).status, LS_ERR_UNREADABLE);
    CHECK_EQ(check::error_of([&] { read_index(folder.write("file", good) + "/below"); }).status, LS_ERR_NOT_FOUND);
}

TEST(impossible_counts) {
    Folder folder;
    const Bytes good = small().bytes();
    for (const size_t at : {GgufWriter::kTensorCountAt, GgufWriter::kKeyCountAt}) {
        for (const uint64_t n : {uint64_t(1) << 63, uint64_t(-1), uint64_t(1) << 21, uint64_t(900000), uint64_t(200)}) {
            const ls_status s = ls_status(folder.error("counts.gguf", patched(good, at, n)).status);
            CHECK(s == LS_ERR_FORMAT || s == LS_ERR_TRUNCATED);
        }
    }
}

// Whatever byte is wrong: an error or an index that stays within the file, never a crash.
TEST(any_flipped_byte) {
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    Folder folder;
    const GgufWriter g = small();
    const Bytes good = g.bytes();
    check::Random random(5);
    const size_t n_meta = good.size() - g.data_bytes();
    for (size_t i = 0; i < 3 * n_meta; ++i) {
        Bytes bad = good;
        bad[i % n_meta] = uint8_t(i < n_meta ? 0xff : random.next());
        const std::string path = folder.write("flipped.gguf", bad);
        check::error_of([&] {
            const Index index = read_index(path);
            for (const IndexEntry & e : index.tensors) {
                CHECK(e.offset <= bad.size() && e.n_bytes <= bad.size() - e.offset);
            }
            index.json();
        });
    }
    ggml_log_set(nullptr, nullptr);
}
