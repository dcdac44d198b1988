#include "index.h"

#include "json.h"
#include "status.h"

#include "gguf.h"
#include "llama.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include <sys/stat.h>
#if !defined(_WIN32)
#  include <fcntl.h>
#  include <unistd.h>
#endif

namespace ls {

namespace {

struct FileCloser { void operator()(FILE * f) const { fclose(f); } };
struct GgufFree   { void operator()(gguf_context * g) const { gguf_free(g); } };
struct GgmlFree   { void operator()(ggml_context * g) const { ggml_free(g); } };

using FilePtr = std::unique_ptr<FILE, FileCloser>;
using GgufPtr = std::unique_ptr<gguf_context, GgufFree>;
using GgmlPtr = std::unique_ptr<ggml_context, GgmlFree>;

constexpr uint64_t kMaxTensors = 1u << 20;
constexpr uint64_t kMaxKeys    = 1u << 20;

uint64_t file_bytes(const std::string & path) {
    struct stat st;
    if (stat(path.c_str(), &st) != 0) {
        const bool missing = errno == ENOENT || errno == ENOTDIR;
        throw Error(missing ? LS_ERR_NOT_FOUND : LS_ERR_UNREADABLE,
            format("%s: %s", path.c_str(), missing ? "no such file; check the path" : strerror(errno))).path(path).sys(errno);
    }
    if ((st.st_mode & S_IFMT) != S_IFREG) {
        throw Error(LS_ERR_UNREADABLE, format("%s is not a regular file; give the path of a .gguf file", path.c_str())).path(path);
    }
    return uint64_t(st.st_size);
}

uint32_t swap32(uint32_t v) {
    return v >> 24 | (v >> 8 & 0xff00) | (v << 8 & 0xff0000) | v << 24;
}

[[noreturn]] void fail_foreign(const std::string & path, const unsigned char * head) {
    const char * what = "not a GGUF file";
    if (memcmp(head, "PK\3\4", 4) == 0) {
        what = "a ZIP or PyTorch file, not GGUF";
    } else if (memcmp(head, "ggjt", 4) == 0 || memcmp(head, "tjgg", 4) == 0 || memcmp(head, "lmgg", 4) == 0) {
        what = "an old GGML file, not GGUF";
    } else if (head[8] == '{') {
        what = "a safetensors file, not GGUF";
    }
    throw Error(LS_ERR_FORMAT, format("%s is %s; convert the model to GGUF or download it again", path.c_str(), what)).path(path);
}

// The first bytes tell most foreign, wrong-endian and cut files apart before a parser sees them.
void check_header(const std::string & path, uint64_t n_bytes) {
    if (n_bytes == 0) {
        throw Error(LS_ERR_TRUNCATED, format("%s is empty (0 bytes); download it again", path.c_str())).path(path);
    }
    FilePtr f(fopen(path.c_str(), "rb"));
    if (!f) {
        throw Error(LS_ERR_UNREADABLE, format("%s cannot be opened: %s; check its permissions", path.c_str(), strerror(errno)))
            .path(path).sys(errno);
    }
    unsigned char head[24] = {};
    const size_t n = fread(head, 1, sizeof(head), f.get());
    if (n >= 4 && memcmp(head, "GGUF", 4) != 0) {
        fail_foreign(path, head);
    }
    if (n < sizeof(head)) {
        throw Error(LS_ERR_TRUNCATED, format("%s ends inside its header (%zu bytes); download it again", path.c_str(), n)).path(path);
    }
    uint32_t version;
    uint64_t n_tensors, n_keys;
    memcpy(&version, head + 4, 4);
    memcpy(&n_tensors, head + 8, 8);
    memcpy(&n_keys, head + 16, 8);
    if (version > 0xffff && swap32(version) <= 0xffff) {
        throw Error(LS_ERR_ENDIAN, format("%s is big-endian; convert it with gguf_convert_endian.py or download the "
            "little-endian file", path.c_str())).path(path);
    }
    if (version < 2 || version > GGUF_VERSION) {
        throw Error(LS_ERR_FORMAT, format("%s is GGUF version %u, but versions 2 to %u can be read; %s", path.c_str(), version,
            GGUF_VERSION, version < 2 ? "convert the model again" : "a newer release may read it")).path(path);
    }
    if (n_tensors > kMaxTensors || n_keys > kMaxKeys) {
        throw Error(LS_ERR_FORMAT, format("%s has a corrupt header (%llu tensors, %llu keys); download it again", path.c_str(),
            (unsigned long long) n_tensors, (unsigned long long) n_keys)).path(path);
    }
}

std::string scalar_json(const gguf_context * g, int64_t key) {
    Json j;
    switch (gguf_get_kv_type(g, key)) {
        case GGUF_TYPE_UINT8:   j.number(uint64_t(gguf_get_val_u8 (g, key))); break;
        case GGUF_TYPE_INT8:    j.number(int64_t (gguf_get_val_i8 (g, key))); break;
        case GGUF_TYPE_UINT16:  j.number(uint64_t(gguf_get_val_u16(g, key))); break;
        case GGUF_TYPE_INT16:   j.number(int64_t (gguf_get_val_i16(g, key))); break;
        case GGUF_TYPE_UINT32:  j.number(uint64_t(gguf_get_val_u32(g, key))); break;
        case GGUF_TYPE_INT32:   j.number(int64_t (gguf_get_val_i32(g, key))); break;
        case GGUF_TYPE_UINT64:  j.number(gguf_get_val_u64(g, key)); break;
        case GGUF_TYPE_INT64:   j.number(gguf_get_val_i64(g, key)); break;
        case GGUF_TYPE_FLOAT32: j.number(double(gguf_get_val_f32(g, key))); break;
        case GGUF_TYPE_FLOAT64: j.number(gguf_get_val_f64(g, key)); break;
        case GGUF_TYPE_BOOL:    j.boolean(gguf_get_val_bool(g, key)); break;
        case GGUF_TYPE_STRING:  j.string(gguf_get_val_str(g, key)); break;
        default: break;
    }
    return j.text;
}

void read_metadata(const gguf_context * g, Index & index) {
    for (int64_t key = 0; key < gguf_get_n_kv(g); ++key) {
        const gguf_type type = gguf_get_kv_type(g, key);
        // per-layer hyperparameters are arrays; the first element stands for the model in plans
        if (type == GGUF_TYPE_ARRAY && (gguf_get_arr_type(g, key) == GGUF_TYPE_UINT32 || gguf_get_arr_type(g, key) == GGUF_TYPE_INT32) &&
            gguf_get_arr_n(g, key) > 0 && gguf_get_arr_n(g, key) < 4096) {
            Json j;
            j.number(int64_t(((const int32_t *) gguf_get_arr_data(g, key))[0]));
            index.metadata[gguf_get_key(g, key)] = j.text;
        } else if (type != GGUF_TYPE_ARRAY) {
            index.metadata[gguf_get_key(g, key)] = scalar_json(g, key);
        } else if (strcmp(gguf_get_key(g, key), "tokenizer.ggml.tokens") == 0) {
            index.metadata["leanstream.n_vocab"] = std::to_string(gguf_get_arr_n(g, key));
        }
    }
}

int64_t int_of(const Index & index, const std::string & key, int64_t otherwise) {
    const auto it = index.metadata.find(key);
    return it == index.metadata.end() || it->second.empty() || it->second[0] == '"' ? otherwise : strtoll(it->second.c_str(), nullptr, 10);
}

// a second GGUF header after the data means that shards were joined with cat
bool has_second_header(const std::string & path, uint64_t data_end, uint64_t n_bytes) {
    FilePtr f(fopen(path.c_str(), "rb"));
    for (uint64_t at : {data_end, (data_end + 31) & ~uint64_t(31)}) {
        char magic[4];
        if (at + 24 <= n_bytes && f && fseek(f.get(), long(at), SEEK_SET) == 0 && fread(magic, 1, 4, f.get()) == 4 &&
            memcmp(magic, "GGUF", 4) == 0) {
            return true;
        }
    }
    return false;
}

void read_tensors(const gguf_context * g, const ggml_context * ctx, Index & index, uint32_t shard, bool alone) {
    const Shard & file = index.shards[shard];
    const uint64_t data = gguf_get_data_offset(g);
    uint64_t data_end = data;
    std::string last; // name of the tensor that ends last
    for (int64_t i = 0; i < gguf_get_n_tensors(g); ++i) {
        IndexEntry e;
        e.name    = gguf_get_tensor_name(g, i);
        e.type    = gguf_get_tensor_type(g, i);
        e.shard   = shard;
        e.offset  = data + gguf_get_tensor_offset(g, i);
        e.n_bytes = gguf_get_tensor_size(g, i);
        const ggml_tensor * t = ggml_get_tensor(const_cast<ggml_context *>(ctx), e.name.c_str());
        for (int d = 0; t && d < GGML_MAX_DIMS; ++d) {
            e.ne[d] = t->ne[d];
        }
        if (!index.by_name.emplace(e.name, index.tensors.size()).second) {
            throw Error(LS_ERR_FORMAT, format("%s: tensor '%s' occurs twice", file.path.c_str(), e.name.c_str())).path(file.path);
        }
        if (e.offset + e.n_bytes < e.offset || e.offset < data) {
            throw Error(LS_ERR_FORMAT, format("%s: tensor '%s' has an impossible offset", file.path.c_str(), e.name.c_str())).path(file.path);
        }
        index.tensors.push_back(e);
        if (e.offset + e.n_bytes > data_end) {
            data_end = e.offset + e.n_bytes;
            last = e.name;
        }
    }
    if (data_end > file.n_bytes) {
        throw Error(LS_ERR_TRUNCATED, format("%s is cut short: tensor '%s' ends at %llu, the file has %llu bytes; finish the "
            "download", file.path.c_str(), last.c_str(), (unsigned long long) data_end,
            (unsigned long long) file.n_bytes)).path(file.path).sizes(file.n_bytes, data_end).offset(file.n_bytes);
    }
    if (alone && has_second_header(file.path, data_end, file.n_bytes)) {
        throw Error(LS_ERR_JOINED, format("%s holds several GGUF files joined with cat; use the parts as they are (give the "
            "first) or join them with llama-gguf-split --merge", file.path.c_str())).path(file.path);
    }
}

void read_shard(const std::string & path, Index & index, uint32_t expected_no, uint32_t expected_count);

void read_other_shards(const std::string & path, Index & index, uint32_t count) {
    char prefix[4096];
    if (!llama_split_prefix(prefix, sizeof(prefix), path.c_str(), 0, int(count))) {
        throw Error(LS_ERR_SHARD, format("%s says it is part 1 of %u, but is not named ...-00001-of-%05u.gguf; give the parts "
            "their original names", path.c_str(), count, count)).path(path);
    }
    for (uint32_t no = 1; no < count; ++no) {
        char other[4096];
        llama_split_path(other, sizeof(other), prefix, int(no), int(count));
        struct stat st;
        if (stat(other, &st) != 0) {
            throw Error(LS_ERR_SHARD, format("part %u of %u is missing: %s; put it beside the first part", no + 1, count, other)).path(other);
        }
        read_shard(other, index, no, count);
    }
}

void drop_from_page_cache(const std::string & path) {
#if defined(__linux__)
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
#else
    (void) path;
#endif
}

void read_shard(const std::string & path, Index & index, uint32_t expected_no, uint32_t expected_count) {
    const uint64_t n_bytes = file_bytes(path);
    check_header(path, n_bytes);

    ggml_context * raw_ctx = nullptr;
    GgufPtr g(gguf_init_from_file(path.c_str(), { /*no_alloc=*/ true, /*ctx=*/ &raw_ctx }));
    GgmlPtr ctx(raw_ctx);
    if (!g) {
        throw Error(LS_ERR_FORMAT, format("%s has a corrupt or cut header (%s on disk); download it again", path.c_str(),
            human_bytes(n_bytes).c_str())).path(path);
    }
    index.shards.push_back({path, n_bytes});
    const uint32_t shard = uint32_t(index.shards.size() - 1);

    Index own;
    read_metadata(g.get(), shard == 0 ? index : own);
    const Index & meta = shard == 0 ? index : own;
    const uint32_t no    = uint32_t(int_of(meta, "split.no", 0));
    const uint32_t count = uint32_t(int_of(meta, "split.count", 1));
    if (no != expected_no || (expected_no > 0 && count != expected_count)) {
        throw Error(LS_ERR_SHARD, format("%s is part %u of %u where part %u of %u was expected; give the first part of one set",
            path.c_str(), no + 1, count, expected_no + 1, expected_no ? expected_count : count)).path(path);
    }
    read_tensors(g.get(), ctx.get(), index, shard, true);
    if (shard == 0) {
        read_lean(g.get(), index);
    }
    drop_from_page_cache(path);
    if (expected_no == 0 && count > 1) {
        read_other_shards(path, index, count);
    }
}

} // namespace

const IndexEntry * Index::find(const std::string & name) const {
    const auto it = by_name.find(name);
    return it == by_name.end() ? nullptr : &tensors[it->second];
}

int64_t Index::arch_int(const std::string & key, int64_t otherwise) const {
    return int_of(*this, arch + "." + key, otherwise);
}

int64_t Index::n_vocab() const {
    return int_of(*this, "leanstream.n_vocab", arch_int("vocab_size", 0));
}

Index read_index(const std::string & path) {
    Index index;
    read_shard(path, index, 0, 1);
    const auto arch = index.metadata.find("general.architecture");
    if (arch == index.metadata.end() || arch->second.size() < 2 || arch->second[0] != '"') {
        throw Error(LS_ERR_FORMAT, format("%s names no architecture (general.architecture); it is not a language model", path.c_str())).path(path);
    }
    index.arch = arch->second.substr(1, arch->second.size() - 2);
    const int64_t n_split_tensors = int_of(index, "split.tensors.count", int64_t(index.tensors.size()));
    if (n_split_tensors != int64_t(index.tensors.size())) {
        throw Error(LS_ERR_SHARD, format("%s: the set should have %lld tensors, the parts have %zu", path.c_str(),
            (long long) n_split_tensors, index.tensors.size())).path(path);
    }
    index.n_layer       = uint32_t(index.arch_int("block_count", 0));
    index.n_expert      = uint32_t(index.arch_int("expert_count", 0));
    index.n_expert_used = uint32_t(index.arch_int("expert_used_count", 0));
    return index;
}

std::string Index::json() const {
    uint64_t total = 0;
    for (const Shard & s : shards) {
        total += s.n_bytes;
    }
    Json j;
    {
        auto root = j.object();
        j.key("arch").string(arch);
        j.key("n_layer").number(n_layer);
        j.key("n_expert").number(n_expert);
        j.key("n_expert_used").number(n_expert_used);
        j.key("n_vocab").number(n_vocab());
        j.key("n_embd").number(arch_int("embedding_length", 0));
        j.key("n_ff").number(arch_int("feed_forward_length", 0));
        j.key("n_ctx_train").number(arch_int("context_length", 0));
        j.key("file_bytes").number(total);
        j.key("shards");
        {
            auto list = j.array();
            for (const Shard & s : shards) {
                auto o = j.object();
                j.key("path").string(s.path);
                j.key("bytes").number(s.n_bytes);
            }
        }
        j.key("tensors");
        {
            auto list = j.array();
            for (const IndexEntry & t : tensors) {
                auto o = j.object();
                j.key("name").string(t.name);
                j.key("type").string(ggml_type_name(t.type));
                j.key("shape");
                {
                    auto dims = j.array();
                    for (int64_t n : t.ne) {
                        j.number(n);
                    }
                }
                j.key("offset").number(t.offset);
                j.key("bytes").number(t.n_bytes);
                j.key("shard").number(t.shard);
                if (t.bundle >= 0) {
                    j.key("bundle").string(tensors[size_t(t.bundle)].name);
                }
            }
        }
        j.key("metadata");
        {
            auto o = j.object();
            for (const auto & [name, literal] : metadata) {
                if (!literal.empty()) {
                    j.key(name).raw(literal);
                }
            }
        }
    }
    return j.text;
}

} // namespace ls
