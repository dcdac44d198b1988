// Both backends on a real file, and the cutting of ranges into requests.
#include "check.h"
#include "support.h"

#include "fake_device.h"
#include "memory.h"
#include "scheduler.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

using namespace ls;
using ls::testing::FakeDevice;

namespace {

const uint64_t kPage = page_size();

struct CountingSink final : ReadSink {
    void on_read(const ReadRequest &, int error) override {
        n_reads++;
        if (error) {
            last_error = error;
            n_errors++;
        }
    }
    std::atomic<int> n_reads{0}, n_errors{0}, last_error{0};
};

IoOptions backend_options(IoOptions::Backend backend) {
    if (backend == IoOptions::Backend::uring && !uring_available()) {
        SKIP("no io_uring here");
    }
    IoOptions o;
    o.backend = backend;
    o.depth = 4;
    o.n_threads = 3;
    return o;
}

// A file on disk, read range by range into memory at the same distance from a page.
struct RealFile {
    explicit RealFile(bool direct = true) : bytes(check::random_bytes((1u << 20) + 1234, 6)), path(folder.path("data")) {
        check::write_file(path, bytes);
        std::string warning;
        device = open_device(path, direct, warning);
    }
    check::ScratchFolder folder;
    check::Bytes bytes;
    std::string path;
    std::unique_ptr<Device> device;
};

void read_random_ranges(IoOptions::Backend backend, bool direct) {
    const IoOptions options = backend_options(backend);
    RealFile file(direct);
    CountingSink sink;
    Scheduler scheduler(options, sink);
    check::Random random(7);
    for (int round = 0; round < 30; ++round) {
        const uint64_t n = 1 + random.below(200000);
        const uint64_t offset = round == 0 ? file.bytes.size() - n : random.next() % (file.bytes.size() - n);
        check::Pages memory(n + 2 * kPage);
        uint8_t * dest = memory.data() + offset % kPage;
        std::vector<ReadRequest> requests;
        add_requests(requests, *file.device, offset, n, dest, (1 + random.below(8)) * kPage, Priority::demand, 1);
        scheduler.submit(requests);
        scheduler.drain();
        CHECK_EQ(sink.n_errors.load(), 0);
        CHECK(memcmp(dest, file.bytes.data() + offset, n) == 0);
    }
    CHECK_EQ(scheduler.counters().n_reads, uint64_t(sink.n_reads.load()));
    CHECK(scheduler.counters().n_bytes > 0);
}

void fail_on_real_files(IoOptions::Backend backend) {
    const IoOptions options = backend_options(backend);
    RealFile file;
    CountingSink sink;
    Scheduler scheduler(options, sink);
    check::Pages memory(4 * kPage);
    std::vector<ReadRequest> requests;
    add_requests(requests, *file.device, file.bytes.size() - 10, 11, memory.data() + (file.bytes.size() - 10) % kPage, kPage,
        Priority::demand, 1); // one byte past the end
    scheduler.submit(requests);
    scheduler.drain();
    CHECK_EQ(sink.last_error.load(), ENODATA);
    CHECK_EQ(sink.n_errors.load(), 1);
    requests.clear();
    add_requests(requests, *file.device, 64 * file.bytes.size() / kPage * kPage, kPage, memory.data(), kPage, Priority::demand, 1);
    scheduler.submit(requests);
    scheduler.drain();
    CHECK_EQ(sink.n_errors.load(), 2);
}

void stop_with_queued_work(IoOptions::Backend backend) {
    const IoOptions options = backend_options(backend);
    RealFile file;
    check::Pages memory(1u << 20);
    for (int i = 0; i < 20; ++i) {
        CountingSink sink;
        int n = 0;
        {
            Scheduler scheduler(options, sink);
            std::vector<ReadRequest> requests;
            add_requests(requests, *file.device, 0, 1u << 20, memory.data(), kPage, Priority::load, 1);
            n = int(requests.size());
            scheduler.submit(requests);
            if (i % 2) {
                scheduler.drain();
            }
        }
        CHECK(sink.n_reads <= n);
        CHECK(i % 2 == 0 || sink.n_reads == n);
        CHECK_EQ(sink.n_errors.load(), 0);
    }
}

} // namespace

TEST(pread_reads_what_is_there) {
    read_random_ranges(IoOptions::Backend::pread, true);
    read_random_ranges(IoOptions::Backend::pread, false);
}
TEST(io_uring_reads_what_is_there) {
    read_random_ranges(IoOptions::Backend::uring, true);
    read_random_ranges(IoOptions::Backend::uring, false);
}
TEST(pread_fails_past_the_end)       { fail_on_real_files(IoOptions::Backend::pread); }
TEST(io_uring_fails_past_the_end)    { fail_on_real_files(IoOptions::Backend::uring); }
TEST(pread_stops_with_queued_work)   { stop_with_queued_work(IoOptions::Backend::pread); }
TEST(io_uring_stops_with_queued_work) { stop_with_queued_work(IoOptions::Backend::uring); }

TEST(io_uring_reports_the_systems_error) {
    const IoOptions options = backend_options(IoOptions::Backend::uring);
    FakeDevice without_descriptor(check::random_bytes(kPage, 8));
    CountingSink sink;
    Scheduler scheduler(options, sink);
    check::Pages memory(kPage);
    std::vector<ReadRequest> requests;
    add_requests(requests, without_descriptor, 0, kPage, memory.data(), kPage, Priority::demand, 1);
    scheduler.submit(requests);
    scheduler.drain();
    CHECK_EQ(sink.last_error.load(), EBADF);
}

TEST(a_file_cut_between_two_reads) {
    for (IoOptions::Backend backend : {IoOptions::Backend::pread, IoOptions::Backend::uring}) {
        const IoOptions options = backend_options(backend);
        RealFile file;
        CountingSink sink;
        Scheduler scheduler(options, sink);
        check::Pages memory(1u << 20);
        std::vector<ReadRequest> requests;
        add_requests(requests, *file.device, 0, 1u << 20, memory.data(), 16 * kPage, Priority::demand, 1);
        scheduler.submit(requests);
        scheduler.drain();
        CHECK_EQ(sink.n_errors.load(), 0);
        check::write_file(file.path, check::random_bytes(9 * kPage + 17, 9));
        scheduler.submit(requests);
        scheduler.drain();
        CHECK_EQ(sink.n_errors.load(), int(requests.size()));
        CHECK_EQ(sink.last_error.load(), ENODATA);
    }
}

TEST(ranges_are_cut_at_pages_and_cover_every_byte_once) {
    FakeDevice device({});
    check::Random random(9);
    check::Pages memory(1u << 20);
    for (int i = 0; i < 2000; ++i) {
        const uint64_t offset = random.below(1u << 30), n = 1 + random.below(900000), chunk = kPage * (1 + random.below(64));
        uint8_t * dest = memory.data() + offset % kPage;
        std::vector<ReadRequest> requests;
        add_requests(requests, device, offset, n, dest, chunk, Priority::readahead, 42);
        REQUIRE(!requests.empty());
        uint64_t at = page_floor(offset);
        for (const ReadRequest & r : requests) {
            CHECK_EQ(r.offset, at);
            CHECK_EQ(r.offset % kPage, 0);
            CHECK_EQ(uintptr_t(r.dest) % kPage, 0);
            CHECK_EQ(r.n_bytes % kPage, 0);
            CHECK(r.n_bytes <= chunk && r.n_needed <= r.n_bytes && r.n_bytes < r.n_needed + kPage);
            CHECK(int64_t(r.offset) - int64_t(offset) == r.dest - dest);
            CHECK(r.device == &device && r.tag == 42 && r.priority == Priority::readahead);
            at += r.n_needed;
        }
        CHECK_EQ(at, offset + n); // ends with the last byte that is needed, although n_bytes reaches on
    }
}

TEST(the_best_backend_reads_too) {
    read_random_ranges(IoOptions::Backend::best, true);
}
