#include "check.h"
#include "support.h"

#include "device.h"
#include "fake_device.h"
#include "memory.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

using namespace ls;
using ls::testing::FakeDevice;

namespace {

const uint64_t kPage = page_size();

struct RealFile {
    explicit RealFile(size_t n_bytes) : bytes(check::random_bytes(n_bytes, 1)), path(folder.path("data")) {
        check::write_file(path, bytes);
    }
    std::unique_ptr<Device> open(bool direct) {
        std::string warning;
        return open_device(path, direct, warning);
    }
    struct stat status() const {
        struct stat st;
        stat(path.c_str(), &st);
        return st;
    }
    void set_times(const struct stat & st) const {
        const timespec times[2] = {st.st_atim, st.st_mtim};
        utimensat(AT_FDCWD, path.c_str(), times, 0);
    }

    check::ScratchFolder folder;
    check::Bytes bytes;
    std::string path;
};

// bytes of the file that the page cache holds
uint64_t cached_bytes(const std::string & path, size_t n_bytes) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    void * p = mmap(nullptr, n_bytes, PROT_READ, MAP_SHARED, fd, 0);
    const uint64_t n = check::resident_bytes(p, n_bytes);
    munmap(p, n_bytes);
    close(fd);
    return n;
}

} // namespace

TEST(direct_and_buffered_reads_give_the_files_bytes) {
    RealFile file(40 * kPage + 77);
    for (const bool direct : {true, false}) {
        const auto device = file.open(direct);
        CHECK(direct || !device->direct());
        CHECK(device->descriptor() >= 0);
        CHECK_EQ(device->path(), file.path);
        check::Pages memory(42 * kPage);
        CHECK_EQ(device->read(0, memory.data(), 42 * kPage), file.bytes.size()); // stops at the end
        CHECK(std::equal(file.bytes.begin(), file.bytes.end(), memory.data()));
        CHECK_EQ(device->read(7 * kPage, memory.data(), kPage), kPage);
        CHECK(memcmp(memory.data(), file.bytes.data() + 7 * kPage, kPage) == 0);
        CHECK_EQ(device->read(40 * kPage, memory.data(), kPage), 77);
        CHECK_EQ(device->read(80 * kPage, memory.data(), kPage), 0); // past the end
        CHECK_EQ(device->read(0, memory.data(), 0), 0);
    }
}

TEST(unaligned_reads_are_refused) {
    RealFile file(4 * kPage);
    const auto device = file.open(true);
    check::Pages memory(4 * kPage);
    CHECK_EQ(device->read(1, memory.data(), kPage), -EINVAL);
    CHECK_EQ(device->read(0, memory.data() + 64, kPage), -EINVAL);
    CHECK_EQ(device->read(0, memory.data(), 100), -EINVAL);
}

TEST(reads_leave_nothing_in_the_page_cache) {
    RealFile file(256 * kPage);
    if (!file.open(true)->direct()) {
        SKIP("this file system refuses direct reads");
    }
    check::Pages memory(256 * kPage);
    for (const bool direct : {true, false}) {
        const auto device = file.open(direct);
        posix_fadvise(device->descriptor(), 0, 0, POSIX_FADV_DONTNEED);
        CHECK_EQ(device->read(0, memory.data(), 256 * kPage), 256 * kPage);
        CHECK_EQ(cached_bytes(file.path, 256 * kPage), 0);
    }
}

TEST(files_that_cannot_be_opened) {
    std::string warning;
    check::ScratchFolder folder;
    const ls_error missing = check::error_of([&] { open_device(folder.path("absent"), true, warning); });
    CHECK_EQ(missing.status, LS_ERR_NOT_FOUND);
    CHECK_EQ(missing.sys_errno, ENOENT);
    CHECK(strstr(missing.path, "absent") != nullptr);
    if (geteuid() == 0) {
        return; // root may read everything
    }
    const std::string path = folder.path("secret");
    check::write_file(path, {1, 2, 3});
    chmod(path.c_str(), 0);
    CHECK_EQ(check::error_of([&] { open_device(path, true, warning); }).status, LS_ERR_UNREADABLE);
}

TEST(a_changed_file_is_noticed) {
    RealFile file(8 * kPage);
    const auto device = file.open(true);
    const struct stat before = file.status();
    device->check_unchanged();

    CHECK_EQ(truncate(file.path.c_str(), off_t(3 * kPage)), 0);
    const ls_error cut = check::error_of([&] { device->check_unchanged(); });
    CHECK_EQ(cut.status, LS_ERR_CHANGED);
    CHECK_EQ(cut.used_bytes, 3 * kPage);
    CHECK_EQ(cut.limit_bytes, 8 * kPage);
    CHECK_EQ(std::string(cut.path), file.path);
    check::Pages memory(8 * kPage);
    CHECK_EQ(device->read(0, memory.data(), 8 * kPage), 3 * kPage);

    check::write_file(file.path, file.bytes); // same length, later time
    file.set_times(before);
    device->check_unchanged(); // as it was
    struct stat later = before;
    later.st_mtim.tv_nsec = (before.st_mtim.tv_nsec + 1000) % 1000000000;
    file.set_times(later);
    CHECK_EQ(check::error_of([&] { device->check_unchanged(); }).status, LS_ERR_CHANGED);

    CHECK_EQ(truncate(file.path.c_str(), off_t(20 * kPage)), 0);
    CHECK_EQ(check::error_of([&] { device->check_unchanged(); }).status, LS_ERR_CHANGED);
}

TEST(a_deleted_file_stays_readable) {
    RealFile file(4 * kPage);
    const auto device = file.open(true);
    unlink(file.path.c_str());
    check::Pages memory(4 * kPage);
    CHECK_EQ(device->read(0, memory.data(), 4 * kPage), 4 * kPage);
    device->check_unchanged();
}

// ---- the shell around one system call, with a drive that misbehaves

TEST(short_reads_are_continued_from_a_page) {
    const check::Bytes bytes = check::random_bytes(10 * kPage, 2);
    for (const uint64_t limit : {kPage, kPage + 1, 3 * kPage - 1, 100 * kPage}) {
        FakeDevice device(bytes);
        device.limit_calls(limit);
        check::Pages memory(10 * kPage);
        CHECK_EQ(device.read(0, memory.data(), 10 * kPage), 10 * kPage);
        CHECK(std::equal(bytes.begin(), bytes.end(), memory.data()));
        CHECK_EQ(device.after_reads().size(), 1);
    }
}

TEST(a_drive_that_gives_less_than_a_page_ends_the_read) {
    FakeDevice device(check::random_bytes(4 * kPage, 3));
    device.limit_calls(kPage / 2);
    check::Pages memory(4 * kPage);
    CHECK_EQ(device.read(0, memory.data(), 4 * kPage), kPage / 2); // no endless loop
}

TEST(interrupted_reads_are_repeated_and_errors_returned) {
    FakeDevice device(check::random_bytes(4 * kPage, 4));
    check::Pages memory(4 * kPage);
    device.fail_at(kPage, EINTR, 3);
    CHECK_EQ(device.read(0, memory.data(), 4 * kPage), 4 * kPage);
    CHECK_EQ(device.reads().size(), 4);
    device.fail_at(kPage, EAGAIN, 2);
    CHECK_EQ(device.read(0, memory.data(), 4 * kPage), 4 * kPage);
    device.fail_at(2 * kPage, EIO);
    CHECK_EQ(device.read(0, memory.data(), 4 * kPage), -EIO);
    CHECK_EQ(device.read(0, memory.data(), kPage), kPage);
}

TEST(a_late_error_is_not_hidden_by_an_early_part) {
    FakeDevice device(check::random_bytes(4 * kPage, 5));
    device.limit_calls(kPage);
    device.fail_at(2 * kPage, EIO);
    check::Pages memory(4 * kPage);
    CHECK_EQ(device.read(0, memory.data(), 4 * kPage), -EIO);
}
