// Linux (O_DIRECT) and macOS (F_NOCACHE).
#if !defined(_WIN32)

#include "device.h"

#include "memory.h"
#include "status.h"

#include <cerrno>
#include <cstring>
#include <memory>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace ls {

namespace {

#if defined(__APPLE__)
timespec modified(const struct stat & st) { return st.st_mtimespec; }
#else
timespec modified(const struct stat & st) { return st.st_mtim; }
#endif

class PosixDevice final : public Device {
public:
    PosixDevice(const std::string & path, int fd, bool direct) : Device(path), fd_(fd), direct_(direct) {
        fstat(fd_, &opened_);
        AddressSpace memory(page_size());
        memory.commit(memory.base(), page_size());
        // the drive's own blocks are often smaller than a page
        granularity_ = opened_.st_size >= 1024 && pread(fd_, memory.base() + 512, 512, 512) == 512 ? 512 : page_size();
    }
    ~PosixDevice() override { close(fd_); }

    int  descriptor() const override { return fd_; }
    bool direct() const override { return direct_; }
    uint64_t granularity() const override { return granularity_; }

    void after_read(uint64_t offset, uint64_t n_bytes) override {
#if defined(__linux__)
        if (!direct_) {
            posix_fadvise(fd_, off_t(offset), off_t(n_bytes), POSIX_FADV_DONTNEED);
        }
#else
        (void) offset;
        (void) n_bytes;
#endif
    }

    void check_unchanged() const override {
        struct stat now;
        const timespec then = modified(opened_);
        if (fstat(fd_, &now) == 0 && now.st_size == opened_.st_size && modified(now).tv_sec == then.tv_sec &&
            modified(now).tv_nsec == then.tv_nsec) {
            return;
        }
        throw Error(LS_ERR_CHANGED, format("%s changed while it was in use (%llu bytes then, %llu now); load the model again",
            path().c_str(), (unsigned long long) opened_.st_size, (unsigned long long) now.st_size))
            .path(path()).sizes(uint64_t(now.st_size), uint64_t(opened_.st_size));
    }

private:
    int64_t read_impl(uint64_t offset, uint8_t * dest, uint64_t n_bytes) override {
        const ssize_t n = pread(fd_, dest, n_bytes, off_t(offset));
        return n < 0 ? -int64_t(errno) : int64_t(n);
    }

    int         fd_;
    bool        direct_;
    uint64_t    granularity_ = 0;
    struct stat opened_ = {};
};

int open_or_throw(const std::string & path, int flags) {
    const int fd = open(path.c_str(), flags | O_RDONLY | O_CLOEXEC);
    if (fd < 0 && errno != EINVAL) {
        throw Error(errno == ENOENT ? LS_ERR_NOT_FOUND : LS_ERR_UNREADABLE, format("%s cannot be opened: %s", path.c_str(),
            strerror(errno))).path(path).sys(errno);
    }
    return fd;
}

#if defined(__linux__)
// some file systems accept the flag and refuse the read
bool direct_read_works(int fd) {
    AddressSpace page(page_size());
    return pread(fd, page.base(), page_size(), 0) >= 0;
}
#endif

} // namespace

std::unique_ptr<Device> open_device(const std::string & path, bool want_direct, std::string & warning) {
#if defined(__linux__)
    if (want_direct) {
        const int fd = open_or_throw(path, O_DIRECT);
        if (fd >= 0 && direct_read_works(fd)) {
            return std::make_unique<PosixDevice>(path, fd, true);
        }
        if (fd >= 0) {
            close(fd);
        }
        warning = format("%s: this file system refuses direct reads; reading through the page cache and dropping the pages "
            "after each read (slower; move the file to a local ext4, xfs or btrfs disk)", path.c_str());
    }
    const int fd = open_or_throw(path, 0);
    return std::make_unique<PosixDevice>(path, fd, false);
#else
    const int fd = open_or_throw(path, 0);
    bool direct = false;
#  if defined(__APPLE__)
    direct = want_direct && fcntl(fd, F_NOCACHE, 1) == 0;
#  endif
    if (want_direct && !direct) {
        warning = format("%s: reads cannot bypass the page cache here", path.c_str());
    }
    return std::make_unique<PosixDevice>(path, fd, direct);
#endif
}

} // namespace ls

#endif
