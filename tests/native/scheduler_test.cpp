#include "check.h"
#include "support.h"

#include "fake_device.h"
#include "memory.h"
#include "scheduler.h"

#include <atomic>
#include <cerrno>
#include <map>
#include <thread>

using namespace ls;
using ls::testing::FakeDevice;

namespace {

const uint64_t kPage = page_size();

class Sink final : public ReadSink {
public:
    void on_read(const ReadRequest & request, int error) override {
        std::lock_guard<std::mutex> lock(mutex_);
        order_.push_back(request.tag);
        errors_[request.tag] = error;
    }
    std::vector<uint64_t> order() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return order_;
    }
    int error(uint64_t tag) const {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto it = errors_.find(tag);
        return it == errors_.end() ? -1 : it->second;
    }

private:
    mutable std::mutex mutex_;
    std::vector<uint64_t> order_;
    std::map<uint64_t, int> errors_;
};

IoOptions pread_threads(uint32_t n) {
    IoOptions o;
    o.backend = IoOptions::Backend::pread;
    o.n_threads = n;
    return o;
}

ReadRequest request(Device & device, uint64_t page, uint8_t * dest, Priority priority, uint64_t tag) {
    ReadRequest r;
    r.device   = &device;
    r.offset   = page * kPage;
    r.dest     = dest + page * kPage;
    r.n_bytes  = r.n_needed = uint32_t(kPage);
    r.priority = priority;
    r.tag      = tag;
    return r;
}

// One reader that waits inside the read of page 0, so that everything submitted afterwards queues up.
struct HeldReader {
    HeldReader() : device(check::random_bytes(64 * kPage, 1)), memory(64 * kPage) {
        device.points.hold("read 0");
        scheduler = std::make_unique<Scheduler>(pread_threads(1), sink);
        scheduler->submit({request(device, 0, memory.data(), Priority::load, 1000)});
        device.points.wait_for("read 0");
    }
    void add(uint64_t page, Priority priority, uint64_t tag) {
        scheduler->submit({request(device, page, memory.data(), priority, tag)});
    }
    std::vector<uint64_t> finish() {
        device.points.release("read 0");
        scheduler->drain();
        return sink.order();
    }

    FakeDevice device;
    check::Pages memory;
    Sink sink;
    std::unique_ptr<Scheduler> scheduler;
};

using Tags = std::vector<uint64_t>;

} // namespace

TEST(urgent_reads_go_first_and_equal_ones_in_order) {
    HeldReader r;
    r.add(1, Priority::load, 1);
    r.add(2, Priority::readahead, 2);
    r.add(3, Priority::demand, 3);
    r.add(4, Priority::readahead, 4);
    r.add(5, Priority::demand, 5);
    CHECK_EQ(r.finish(), (Tags{1000, 3, 5, 2, 4, 1}));
}

TEST(promote_raises_every_request_of_a_tag) {
    HeldReader r;
    r.add(1, Priority::load, 7);
    r.add(2, Priority::readahead, 2);
    r.add(3, Priority::demand, 3);
    r.add(4, Priority::readahead, 7);
    r.scheduler->promote(7, Priority::demand);
    CHECK_EQ(r.finish(), (Tags{1000, 7, 3, 7, 2})); // by age among demands
    const auto reads = r.device.reads();
    CHECK_EQ(reads[1].offset, kPage);
    CHECK_EQ(reads[3].offset, 4 * kPage);
}

TEST(reads_ahead_go_behind_all_others) {
    HeldReader r;
    r.add(1, Priority::speculative, 1);
    r.add(2, Priority::refined, 2);
    r.add(3, Priority::load, 3);
    r.add(4, Priority::demand, 4);
    r.scheduler->promote(1, Priority::refined);
    CHECK_EQ(r.finish(), (Tags{1000, 4, 1, 2, 3}));
}

// A thread that waits for a read and asks for the counters at once must find it counted.
TEST(a_read_is_counted_before_it_is_delivered) {
    struct CountingSink final : ReadSink {
        void on_read(const ReadRequest &, int) override { counted = scheduler.load()->counters().n_bytes; }
        std::atomic<Scheduler *> scheduler{nullptr};
        std::atomic<uint64_t> counted{0};
    } sink;
    FakeDevice device(check::random_bytes(kPage, 1));
    check::Pages memory(kPage);
    Scheduler scheduler(pread_threads(1), sink);
    sink.scheduler = &scheduler;
    scheduler.submit({request(device, 0, memory.data(), Priority::demand, 1)});
    scheduler.drain();
    CHECK_EQ(sink.counted.load(), kPage);
}

TEST(withdrawn_reads_are_not_made) {
    HeldReader r;
    r.add(1, Priority::speculative, 7);
    r.add(2, Priority::refined, 7);
    r.add(3, Priority::speculative, 8);
    r.add(4, Priority::demand, 9);
    CHECK(!r.scheduler->withdraw(7, 3)); // one has left the queue already
    CHECK(!r.scheduler->withdraw(9, 1)); // demand stays
    CHECK(r.scheduler->withdraw(7, 2));
    CHECK_EQ(r.finish(), (Tags{1000, 9, 8}));
}

// Two readers, one of them held inside a demand read: an early guess waits until that is done, a late one does not.
TEST(an_early_guess_waits_while_demand_is_in_flight) {
    FakeDevice device(check::random_bytes(64 * kPage, 1));
    check::Pages memory(64 * kPage);
    Sink sink;
    device.points.hold("read 0");
    Scheduler scheduler(pread_threads(2), sink);
    scheduler.submit({request(device, 0, memory.data(), Priority::demand, 1)});
    device.points.wait_for("read 0");
    scheduler.submit({request(device, 1, memory.data(), Priority::speculative, 2)});
    scheduler.submit({request(device, 2, memory.data(), Priority::refined, 3)});
    while (sink.order().empty()) {
        std::this_thread::yield();
    }
    CHECK_EQ(sink.order(), (Tags{3}));
    device.points.release("read 0");
    scheduler.drain();
    CHECK_EQ(sink.order(), (Tags{3, 1, 2}));
}

TEST(promote_never_lowers) {
    HeldReader r;
    r.add(1, Priority::demand, 1);
    r.add(2, Priority::readahead, 2);
    r.scheduler->promote(1, Priority::load);
    r.scheduler->promote(1, Priority::readahead);
    r.scheduler->promote(99, Priority::demand); // nobody
    CHECK_EQ(r.finish(), (Tags{1000, 1, 2}));
}

TEST(drain_waits_for_what_is_queued_and_in_flight) {
    HeldReader r;
    r.add(1, Priority::load, 1);
    std::thread waiter([&] {
        r.scheduler->drain();
        CHECK_EQ(r.sink.order().size(), 2);
    });
    r.device.points.release("read 0");
    waiter.join();
    r.scheduler->drain(); // at once when idle
}

TEST(destructor_finishes_what_is_in_flight_and_drops_the_queue) {
    HeldReader r;
    for (uint64_t page = 1; page < 40; ++page) {
        r.add(page, Priority::demand, page);
    }
    Scheduler & scheduler = *r.scheduler;
    std::thread destroyer([&] { r.scheduler.reset(); });
    while (!scheduler.stopping()) { // it cannot be gone: its reader is held
        std::this_thread::yield();
    }
    r.device.points.release("read 0");
    destroyer.join();
    CHECK_EQ(r.sink.order(), Tags{1000});
    CHECK_EQ(r.device.reads().size(), 1);
}

TEST(errors_and_early_ends_reach_the_sink) {
    FakeDevice device(check::random_bytes(4 * kPage + 100, 2));
    device.fail_at(kPage + 5, EIO);
    check::Pages memory(8 * kPage);
    Sink sink;
    Scheduler scheduler(pread_threads(2), sink);
    std::vector<ReadRequest> requests;
    for (uint64_t page = 0; page < 6; ++page) {
        requests.push_back(request(device, page, memory.data(), Priority::demand, page));
    }
    requests[4].n_needed = 100; // the file's last bytes
    scheduler.submit(requests);
    scheduler.drain();
    CHECK_EQ(sink.error(0), 0);
    CHECK_EQ(sink.error(1), EIO);
    CHECK_EQ(sink.error(4), 0);
    CHECK_EQ(sink.error(5), ENODATA);
    scheduler.submit({requests[1]}); // the drive has recovered
    scheduler.drain();
    CHECK_EQ(sink.error(1), 0);
    requests[4].n_needed = 101; // one byte more than there is
    scheduler.submit({requests[4]});
    scheduler.drain();
    CHECK_EQ(sink.error(4), ENODATA);
}

TEST(short_and_interrupted_reads_are_continued) {
    const check::Bytes bytes = check::random_bytes(16 * kPage, 3);
    FakeDevice device(bytes);
    device.limit_calls(kPage + 700);
    device.fail_at(9 * kPage, EINTR, 3);
    check::Pages memory(bytes.size());
    Sink sink;
    Scheduler scheduler(pread_threads(1), sink);
    ReadRequest r = request(device, 0, memory.data(), Priority::demand, 1);
    r.n_bytes = r.n_needed = uint32_t(bytes.size());
    scheduler.submit({r});
    scheduler.drain();
    CHECK_EQ(sink.error(1), 0);
    CHECK(std::equal(bytes.begin(), bytes.end(), memory.data()));
    for (const auto & read : device.reads()) {
        CHECK_EQ(read.offset % kPage, 0); // a direct read must start at a page
    }
}

TEST(counters) {
    HeldReader r;
    r.add(1, Priority::load, 1);
    CHECK(r.scheduler->counters().busy_ns > 0); // one is in flight
    r.finish();
    const IoCounters c = r.scheduler->counters();
    CHECK_EQ(c.n_reads, 2);
    CHECK_EQ(c.n_bytes, 2 * kPage);
    CHECK_EQ(r.scheduler->counters().busy_ns, c.busy_ns); // idle time does not count
}

TEST(many_threads_submit_and_promote) {
    FakeDevice device(check::random_bytes(64 * kPage, 4));
    check::Pages memory(64 * kPage);
    Sink sink;
    Scheduler scheduler(pread_threads(3), sink);
    std::vector<std::thread> producers;
    for (uint64_t t = 0; t < 4; ++t) {
        producers.emplace_back([&, t] {
            for (uint64_t page = t * 16; page < t * 16 + 16; ++page) { // one reader of each page at a time
                scheduler.submit({request(device, page, memory.data(), Priority::load, page)});
                scheduler.promote(page, Priority::demand);
            }
        });
    }
    for (std::thread & p : producers) {
        p.join();
    }
    scheduler.drain();
    CHECK_EQ(sink.order().size(), 64);
    CHECK_EQ(scheduler.counters().n_reads, 64);
}

// a sink may submit: the prober keeps its queue full that way
TEST(sink_submits_the_next_read) {
    struct Chain final : ReadSink {
        void on_read(const ReadRequest & r, int) override {
            if (++n < 50) {
                scheduler->submit({r});
            }
        }
        std::atomic<int> n{0};
        Scheduler * scheduler = nullptr;
    } chain;
    FakeDevice device(check::random_bytes(kPage, 5));
    check::Pages memory(kPage);
    {
        Scheduler scheduler(pread_threads(2), chain);
        chain.scheduler = &scheduler;
        scheduler.submit({request(device, 0, memory.data(), Priority::demand, 1)});
        scheduler.drain();
        CHECK_EQ(chain.n.load(), 50);
    }
}

TEST(an_empty_submission_is_nothing) {
    Sink sink;
    Scheduler scheduler(pread_threads(0), sink); // at least one reader all the same
    scheduler.submit({});
    scheduler.drain();
    CHECK_EQ(scheduler.counters().n_reads, 0);
    CHECK_EQ(std::string(scheduler.backend_name()), "pread");
}
