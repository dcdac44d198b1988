#include "scheduler.h"

#if defined(LS_HAVE_LIBURING)

#include "memory.h"

#include <algorithm>
#include <cerrno>
#include <vector>

#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace ls {

namespace {

struct Flight {
    ReadRequest request;
    uint64_t    done = 0; // where the read goes on after a short one
    uint64_t    best = 0; // how far it came
};

// One ring, driven by one thread. New work arrives through an eventfd that the ring itself reads.
class Ring {
public:
    Ring(Scheduler & scheduler, uint32_t depth) : scheduler_(scheduler), flights_(depth) {
        for (uint32_t i = 0; i < depth; ++i) {
            free_.push_back(i);
        }
        event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        ok_ = event_ >= 0 && io_uring_queue_init(depth + 1, &ring_, 0) == 0;
    }

    ~Ring() {
        scheduler_.set_wake(nullptr, nullptr);
        if (ok_) {
            io_uring_queue_exit(&ring_);
        }
        if (event_ >= 0) {
            close(event_);
        }
    }

    bool ok() const { return ok_; }

    void run() {
        scheduler_.set_wake([](void * p) {
            const uint64_t one = 1;
            if (write(*(int *) p, &one, sizeof(one)) < 0) {
                // the counter is full: the reader is awake anyway
            }
        }, &event_);
        arm();
        while (!scheduler_.stopping()) {
            fill();
            io_uring_submit_and_wait(&ring_, 1);
            reap();
        }
        while (free_.size() < flights_.size()) {
            io_uring_submit_and_wait(&ring_, 1);
            reap();
        }
    }

private:
    void arm() {
        io_uring_sqe * sqe = io_uring_get_sqe(&ring_);
        io_uring_prep_poll_add(sqe, event_, POLLIN_);
        io_uring_sqe_set_data(sqe, nullptr);
    }

    void fill() {
        while (!free_.empty()) {
            const uint32_t i = free_.back();
            if (!scheduler_.try_take(flights_[i].request)) {
                return;
            }
            free_.pop_back();
            flights_[i].done = flights_[i].best = 0;
            queue(i);
        }
    }

    void queue(uint32_t i) {
        const Flight & f = flights_[i];
        io_uring_sqe * sqe = io_uring_get_sqe(&ring_);
        io_uring_prep_read(sqe, f.request.device->descriptor(), f.request.dest + f.done, unsigned(f.request.n_bytes - f.done),
                           f.request.offset + f.done);
        io_uring_sqe_set_data64(sqe, i + 1);
    }

    void reap() {
        io_uring_cqe * cqe;
        while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
            const uint64_t data = io_uring_cqe_get_data64(cqe);
            const int result = cqe->res;
            io_uring_cqe_seen(&ring_, cqe);
            if (data == 0) {
                uint64_t count;
                if (read(event_, &count, sizeof(count)) < 0) {
                    // spurious wake-up
                }
                arm();
            } else {
                completed(uint32_t(data - 1), result);
            }
        }
    }

    void completed(uint32_t i, int result) {
        Flight & f = flights_[i];
        if (result == -EINTR || result == -EAGAIN) {
            queue(i);
            return;
        }
        if (result > 0) {
            const uint64_t reached = f.done + uint64_t(result);
            const bool progress = reached > f.best;
            f.best = std::max(f.best, reached);
            if (progress && reached < f.request.n_needed) {
                f.done = page_floor(reached); // a direct read goes on at a page only
                queue(i);
                return;
            }
        }
        const ReadRequest request = f.request;
        const int64_t total = result < 0 ? result : int64_t(f.best);
        free_.push_back(i);
        if (total > 0) {
            request.device->after_read(request.offset, uint64_t(total));
        }
        scheduler_.finish(request, total);
    }

    static constexpr unsigned POLLIN_ = 0x001;

    Scheduler & scheduler_;
    std::vector<Flight> flights_;
    std::vector<uint32_t> free_;
    io_uring ring_ = {};
    int  event_ = -1;
    bool ok_ = false;
};

} // namespace

bool uring_available() {
    io_uring ring;
    if (io_uring_queue_init(2, &ring, 0) != 0) {
        return false; // old kernel, or forbidden by seccomp or sysctl
    }
    io_uring_queue_exit(&ring);
    return true;
}

bool run_uring(Scheduler & scheduler, uint32_t depth) {
    Ring ring(scheduler, depth);
    if (!ring.ok()) {
        return false;
    }
    ring.run();
    return true;
}

} // namespace ls

#else

namespace ls {

bool uring_available() { return false; }
bool run_uring(Scheduler &, uint32_t) { return false; }

} // namespace ls

#endif
