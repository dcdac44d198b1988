#include "scheduler.h"

#include "memory.h"

#include <algorithm>
#include <cerrno>
#include <chrono>

#if defined(__linux__)
#  include <sys/resource.h>
#  include <sys/syscall.h>
#  include <unistd.h>
#endif

namespace ls {

uint64_t now_ns() {
    return uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::steady_clock::now().time_since_epoch()).count());
}

// A reader works for microseconds at a time and must get a core at once, also while every core computes: otherwise the drive
// stands idle until a compute thread has used up its turn (milliseconds).
static void run_promptly() {
#if defined(__linux__)
    struct { // sched_attr of linux/sched/types.h, first version
        uint32_t size, policy;
        uint64_t flags;
        int32_t  nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } attr = {};
    attr.size    = sizeof(attr);
    attr.nice    = -10;      // needs a privilege
    attr.runtime = 100000;   // a turn of 0.1 ms: Linux 6.12 and later let short turns go first, without any privilege
    if (syscall(SYS_sched_setattr, 0, &attr, 0u) != 0) {
        attr.nice = getpriority(PRIO_PROCESS, 0);
        syscall(SYS_sched_setattr, 0, &attr, 0u);
    }
#endif
}

Scheduler::Scheduler(const IoOptions & options, ReadSink & sink) : sink_(sink) {
    if (options.backend != IoOptions::Backend::pread && uring_available()) {
        backend_name_ = "io_uring";
        threads_.emplace_back([this, depth = options.depth] {
            run_promptly();
            if (!run_uring(*this, depth)) {
                run_pread();
            }
        });
        return;
    }
    for (uint32_t i = 0; i < std::max(1u, options.n_threads); ++i) {
        threads_.emplace_back([this] {
            run_promptly();
            run_pread();
        });
    }
}

Scheduler::~Scheduler() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        queue_.clear();
        if (wake_) {
            wake_(wake_argument_);
        }
    }
    work_.notify_all();
    for (std::thread & t : threads_) {
        t.join();
    }
}

void Scheduler::submit(const std::vector<ReadRequest> & requests) {
    if (requests.empty()) {
        return;
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        for (const ReadRequest & r : requests) {
            queue_.emplace(std::make_pair(r.priority, next_++), r);
        }
        if (wake_) {
            wake_(wake_argument_);
        }
    }
    if (requests.size() == 1) {
        work_.notify_one();
    } else {
        work_.notify_all();
    }
}

void Scheduler::promote(uint64_t tag, Priority priority) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = queue_.lower_bound({Priority(uint8_t(priority) + 1), 0}); it != queue_.end();) {
        if (it->second.tag == tag) {
            ReadRequest r = it->second;
            r.priority = priority;
            queue_.emplace(std::make_pair(priority, it->first.second), r);
            it = queue_.erase(it);
        } else {
            ++it;
        }
    }
}

bool Scheduler::withdraw(uint64_t tag, uint32_t n) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto first = queue_.lower_bound({Priority::refined, 0}); // what demand wants is not withdrawn
    const auto is_tagged = [tag](const auto & entry) { return entry.second.tag == tag; };
    if (std::count_if(first, queue_.end(), is_tagged) != std::ptrdiff_t(n)) {
        return false;
    }
    for (auto it = first; it != queue_.end();) {
        it = is_tagged(*it) ? queue_.erase(it) : std::next(it);
    }
    if (queue_.empty() && in_flight_ == 0) {
        idle_.notify_all();
    }
    return true;
}

void Scheduler::drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return (queue_.empty() && in_flight_ == 0) || stop_; });
}

void Scheduler::cancel() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        queue_.clear();
    }
    drain();
}

IoCounters Scheduler::counters() const {
    std::lock_guard<std::mutex> lock(mutex_);
    IoCounters c = counters_;
    if (in_flight_ > 0) {
        c.busy_ns += now_ns() - busy_since_ns_;
    }
    return c;
}

namespace {

bool is_ahead(Priority p) {
    return p == Priority::refined || p == Priority::speculative;
}

} // namespace

bool Scheduler::can_pop_locked() const {
    if (queue_.empty()) {
        return false;
    }
    const Priority p = queue_.begin()->first.first;
    return !is_ahead(p) || (ahead_in_flight_ < kAheadInFlight && (p == Priority::refined || demand_in_flight_ == 0));
}

void Scheduler::pop_locked(ReadRequest & out) {
    out = queue_.begin()->second;
    queue_.erase(queue_.begin());
    demand_in_flight_ += out.priority == Priority::demand;
    ahead_in_flight_  += is_ahead(out.priority);
    if (in_flight_++ == 0) {
        busy_since_ns_ = now_ns();
    }
}

bool Scheduler::take(ReadRequest & out) {
    std::unique_lock<std::mutex> lock(mutex_);
    work_.wait(lock, [this] { return can_pop_locked() || stop_; });
    if (stop_) {
        return false;
    }
    pop_locked(out);
    return true;
}

bool Scheduler::try_take(ReadRequest & out) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stop_ || !can_pop_locked()) {
        return false;
    }
    pop_locked(out);
    return true;
}

bool Scheduler::stopping() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return stop_;
}

void Scheduler::set_wake(void (*wake)(void *), void * argument) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_ = wake;
    wake_argument_ = argument;
}

void Scheduler::finish(const ReadRequest & request, int64_t result) {
    const int error = result < 0 ? int(-result) : uint64_t(result) < request.n_needed ? ENODATA : 0;
    { // before anybody can see that the bytes are there, so that counters asked for after a decode hold all of its reads
        std::lock_guard<std::mutex> lock(mutex_);
        counters_.n_reads++;
        counters_.n_bytes += result > 0 ? uint64_t(result) : 0;
    }
    sink_.on_read(request, error);
    std::lock_guard<std::mutex> lock(mutex_);
    demand_in_flight_ -= request.priority == Priority::demand;
    ahead_in_flight_  -= is_ahead(request.priority);
    if (!queue_.empty()) {
        work_.notify_one(); // one that had to wait for this read
    }
    if (--in_flight_ == 0) {
        counters_.busy_ns += now_ns() - busy_since_ns_;
        if (queue_.empty()) {
            idle_.notify_all();
        }
    }
}

void Scheduler::run_pread() {
    ReadRequest r;
    while (take(r)) {
        finish(r, r.device->read(r.offset, r.dest, r.n_bytes));
    }
}

void add_requests(std::vector<ReadRequest> & out, Device & device, uint64_t offset, uint64_t n_bytes, uint8_t * dest,
                  uint64_t chunk_bytes, Priority priority, uint64_t tag) {
    const uint64_t begin = page_floor(offset);
    const uint64_t end   = offset + n_bytes;
    uint8_t * to = dest - (offset - begin);
    for (uint64_t at = begin; at < end; at += chunk_bytes) {
        ReadRequest r;
        r.device   = &device;
        r.offset   = at;
        r.dest     = to + (at - begin);
        r.n_needed = uint32_t(std::min(chunk_bytes, end - at));
        r.n_bytes  = uint32_t(page_ceil(r.n_needed));
        r.priority = priority;
        r.tag      = tag;
        out.push_back(r);
    }
}

void populate(const std::vector<ReadRequest> & requests) {
    for (const ReadRequest & r : requests) {
        AddressSpace::populate(r.dest, r.n_bytes);
    }
}

} // namespace ls
