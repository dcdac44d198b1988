// What is in a GGUF file (or a split set): every tensor's place on disk, checked against the files' lengths.
#pragma once

#include "lean.h"

#include "ggml.h"

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace ls {

struct Shard {
    std::string path;
    uint64_t    n_bytes = 0;
};

struct IndexEntry {
    std::string name;
    ggml_type   type = GGML_TYPE_F32;
    int64_t     ne[GGML_MAX_DIMS] = {1, 1, 1, 1}; // in memory order, ne[0] contiguous
    uint32_t    shard = 0;
    uint64_t    offset = 0;  // in the shard's file
    uint64_t    n_bytes = 0;
    // rearranged: the tensor whose records hold it, and where in a record; offset is then that of its part of the first record
    int32_t     bundle = -1;
    uint64_t    part_offset = 0;
};

struct Index {
    std::vector<Shard>      shards;
    std::vector<IndexEntry> tensors; // in file order, shard by shard
    std::map<std::string, std::string> metadata; // scalars only, as JSON literals

    std::string arch;
    uint32_t    n_layer = 0;
    uint32_t    n_expert = 0;
    uint32_t    n_expert_used = 0;
    LeanFile    lean;

    const IndexEntry * find(const std::string & name) const;
    // value of "<arch>.<key>" as an integer, or otherwise
    int64_t arch_int(const std::string & key, int64_t otherwise) const;
    int64_t n_vocab() const;
    std::string json() const;

    std::unordered_map<std::string, size_t> by_name;
};

// Reads the metadata of all shards. Throws Error: NOT_FOUND, UNREADABLE, FORMAT, TRUNCATED, ENDIAN, SHARD, JOINED,
// UNSUPPORTED.
Index read_index(const std::string & path);

} // namespace ls
