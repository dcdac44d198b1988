// One file read in aligned pieces, past the page cache where the file system allows it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace ls {

class Device {
public:
    virtual ~Device() = default;

    // Read up to n_bytes at offset into dest; all three multiples of granularity(). Retries short and interrupted reads.
    // Returns the bytes read, fewer than n_bytes only at the end of the file, or -errno. Thread-safe.
    int64_t read(uint64_t offset, uint8_t * dest, uint64_t n_bytes);

    // Called after a read that did not go through read() (io_uring). Thread-safe.
    virtual void after_read(uint64_t offset, uint64_t n_bytes) { (void) offset; (void) n_bytes; }

    // Throws Error(LS_ERR_CHANGED) if length or modification time differ from what they were when the file was opened.
    virtual void check_unchanged() const {}

    virtual int  descriptor() const { return -1; } // for io_uring; -1 = none
    virtual bool direct() const { return true; }   // false: through the page cache, dropped after each read
    virtual uint64_t granularity() const; // page_size(), or less where the drive has smaller blocks
    const std::string & path() const { return path_; }

protected:
    explicit Device(std::string path) : path_(std::move(path)) {}

private:
    // one system call; bytes read or -errno
    virtual int64_t read_impl(uint64_t offset, uint8_t * dest, uint64_t n_bytes) = 0;

    std::string path_;
};

// want_direct = false, or a file system that refuses, gives a buffered device; the second case is reported through warning.
// Throws Error(LS_ERR_NOT_FOUND / LS_ERR_UNREADABLE).
std::unique_ptr<Device> open_device(const std::string & path, bool want_direct, std::string & warning);

} // namespace ls
