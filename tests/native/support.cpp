#include "support.h"

#include "memory.h"
#include "status.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <new>
#include <stdexcept>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace check {

ScratchFolder::ScratchFolder() {
    char pattern[] = "./scratch-XXXXXX";
    if (!mkdtemp(pattern)) {
        throw std::runtime_error(std::string("no scratch folder: ") + strerror(errno));
    }
    root_ = pattern;
}

ScratchFolder::~ScratchFolder() {
    for (const std::string & f : files_) {
        unlink(f.c_str());
    }
    rmdir(root_.c_str());
}

std::string ScratchFolder::path(const std::string & name) {
    files_.push_back(root_ + "/" + name);
    return files_.back();
}

void write_file(const std::string & path, const Bytes & bytes) {
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0 || write(fd, bytes.data(), bytes.size()) != ssize_t(bytes.size()) || fsync(fd) != 0) {
        throw std::runtime_error("cannot write " + path + ": " + strerror(errno));
    }
    close(fd);
}

Bytes read_file(const std::string & path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) {
        throw std::runtime_error("cannot read " + path);
    }
    return Bytes(std::istreambuf_iterator<char>(in), {});
}

void copy_file(const std::string & from, const std::string & to) {
    write_file(to, read_file(from));
}

Bytes random_bytes(size_t n_bytes, uint64_t seed) {
    Random random(seed);
    Bytes out(n_bytes);
    for (size_t i = 0; i < n_bytes; i += 8) {
        const uint64_t v = random.next();
        memcpy(&out[i], &v, std::min<size_t>(8, n_bytes - i));
    }
    return out;
}

Pages::Pages(size_t n_bytes) : size_(ls::page_ceil(n_bytes)) {
    data_ = (uint8_t *) aligned_alloc(ls::page_size(), std::max(size_, ls::page_size()));
    if (!data_) {
        throw std::bad_alloc();
    }
    memset(data_, 0, size_);
}

Pages::~Pages() {
    free(data_);
}

uint64_t resident_bytes(const void * from, size_t n_bytes) {
    const size_t n_pages = n_bytes / ls::page_size();
    std::vector<unsigned char> in_memory(n_pages);
    if (n_pages && mincore(const_cast<void *>(from), n_bytes, in_memory.data()) != 0) {
        throw std::runtime_error(std::string("mincore: ") + strerror(errno));
    }
    uint64_t n = 0;
    for (unsigned char p : in_memory) {
        n += (p & 1) * ls::page_size();
    }
    return n;
}

} // namespace check
