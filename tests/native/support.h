// Files and random numbers for tests. Scratch folders lie under the working directory, on the disk that holds the build.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace check {

using Bytes = std::vector<uint8_t>;

class ScratchFolder {
public:
    ScratchFolder();
    ~ScratchFolder(); // removes the files that path() named, and the folder
    ScratchFolder(const ScratchFolder &) = delete;

    std::string path(const std::string & name);

private:
    std::string root_;
    std::vector<std::string> files_;
};

void  write_file(const std::string & path, const Bytes & bytes); // and on to the disk
Bytes read_file(const std::string & path);
void  copy_file(const std::string & from, const std::string & to);
Bytes random_bytes(size_t n_bytes, uint64_t seed);

// small, the same everywhere (std distributions are not)
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
    uint64_t next() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return state_;
    }
    uint32_t below(uint32_t n) { return uint32_t((next() >> 16) % n); }

private:
    uint64_t state_;
};

// memory of whole pages, page-aligned, zeroed
class Pages {
public:
    explicit Pages(size_t n_bytes);
    ~Pages();
    Pages(const Pages &) = delete;
    uint8_t * data() const { return data_; }
    size_t size() const { return size_; }

private:
    uint8_t * data_;
    size_t    size_;
};

// bytes of this range that are in memory now (mincore)
uint64_t resident_bytes(const void * from, size_t n_bytes);

} // namespace check
