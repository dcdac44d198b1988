// The one queue of reads. Readers take the most urgent request; within a priority, the oldest.
#pragma once

#include "device.h"

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace ls {

enum class Priority : uint8_t {
    demand    = 0, // compute waits for it, or will within microseconds
    readahead = 1, // the next weights in graph order
    refined   = 2, // ahead of the choice, on a late guess
    load      = 3, // activation and budget changes
    speculative = 4, // ahead of the choice, on an early guess: only while the drive does nothing for demand
};

struct ReadRequest {
    Device * device = nullptr;
    uint64_t offset = 0;    // page-aligned
    uint8_t * dest = nullptr; // page-aligned
    uint32_t n_bytes = 0;   // page-aligned, may reach past the end of the file
    uint32_t n_needed = 0;  // fewer bytes than this is a failed read
    Priority priority = Priority::demand;
    uint64_t tag = 0;       // whose read it is; see ReadSink
};

// Told of each finished request, on a reader's thread, with no lock of the scheduler held.
class ReadSink {
public:
    virtual ~ReadSink() = default;
    // error: 0, or the errno of the failed read (ENODATA: the file ended early)
    virtual void on_read(const ReadRequest & request, int error) = 0;
};

struct IoOptions {
    enum class Backend : uint32_t { best = 0, pread = 1, uring = 2 };

    Backend  backend = Backend::best;
    uint32_t n_threads = 4; // pread
    uint32_t depth = 16;    // io_uring
};

struct IoCounters {
    uint64_t n_reads = 0;
    uint64_t n_bytes = 0;
    uint64_t busy_ns = 0; // time with at least one read in flight
};

class Scheduler {
public:
    Scheduler(const IoOptions & options, ReadSink & sink);
    ~Scheduler(); // waits for reads in flight, drops the rest

    void submit(const std::vector<ReadRequest> & requests);
    // raise every queued request of this tag to a more urgent priority
    void promote(uint64_t tag, Priority priority);
    // take the n requests of this tag out of the queue; false, and nothing changes, if one has left it already
    bool withdraw(uint64_t tag, uint32_t n);
    // wait until nothing is queued or in flight
    void drain();
    // drop what is queued, wait for what is in flight; the sink is not told of what was dropped
    void cancel();

    IoCounters counters() const;
    const char * backend_name() const { return backend_name_; }

    // For readers. take() waits for a request and counts it as in flight; false = stop. try_take() does not wait.
    bool take(ReadRequest & out);
    bool try_take(ReadRequest & out);
    bool stopping() const;
    void finish(const ReadRequest & request, int64_t result); // result: bytes read or -errno
    // called under the lock after each submit, to wake a reader that waits elsewhere than in take()
    void set_wake(void (*wake)(void *), void * argument);

private:
    static constexpr uint32_t kAheadInFlight = 8; // reads ahead of a choice at once; a limit in bytes made no difference

    bool can_pop_locked() const;
    void pop_locked(ReadRequest & out);
    void run_pread();

    mutable std::mutex      mutex_;
    std::condition_variable work_;
    std::condition_variable idle_;
    std::map<std::pair<Priority, uint64_t>, ReadRequest> queue_;
    uint64_t   next_ = 0;
    uint32_t   in_flight_ = 0;
    uint32_t   demand_in_flight_ = 0, ahead_in_flight_ = 0; // of those
    uint64_t   busy_since_ns_ = 0;
    IoCounters counters_;
    bool       stop_ = false;
    void    (* wake_)(void *) = nullptr;
    void     * wake_argument_ = nullptr;
    ReadSink & sink_;
    const char * backend_name_ = "pread";
    std::vector<std::thread> threads_;
};

// io_uring.cpp: true if the kernel lets this process use it
bool uring_available();
// Runs on the calling thread until the scheduler stops. False: the ring could not be made and nothing was read.
bool run_uring(Scheduler & scheduler, uint32_t depth);

// Cut one contiguous range of a file into requests of at most chunk_bytes. dest is where byte `offset` goes; its
// distance from a page start must equal offset's.
void add_requests(std::vector<ReadRequest> & out, Device & device, uint64_t offset, uint64_t n_bytes, uint8_t * dest,
                  uint64_t chunk_bytes, Priority priority, uint64_t tag);

// Give the destinations memory before their reads are submitted.
void populate(const std::vector<ReadRequest> & requests);

uint64_t now_ns();

} // namespace ls
