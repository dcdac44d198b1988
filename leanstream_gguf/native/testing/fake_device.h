// A drive in memory that fails on purpose: errors, short reads, an early end, waits at named points. Counts and orders reads.
#pragma once

#include "device.h"
#include "seq_points.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace ls::testing {

class FakeDevice final : public Device {
public:
    struct Read {
        uint64_t offset;
        uint64_t n_bytes; // asked for
        int64_t  result;
    };

    explicit FakeDevice(std::vector<uint8_t> bytes, std::string path = "fake") : Device(std::move(path)), bytes_(std::move(bytes)) {}

    // ---- faults; may be changed while reads go on

    // The next n_times calls that touch the byte at `offset` return -error_number (EINTR and EAGAIN are what a signal does).
    void fail_at(uint64_t offset, int error_number, int n_times = 1) {
        std::lock_guard<std::mutex> lock(mutex_);
        faults_[offset] = {error_number, n_times};
    }

    // No call returns more than this. 0 = no limit.
    void limit_calls(uint64_t n_bytes) { call_limit_ = n_bytes; }

    // The file ends here from now on.
    void truncate(uint64_t n_bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        bytes_.resize(n_bytes);
    }

    // Each call arrives at "read" and at "read <offset>".
    SeqPoints points;

    // ---- what happened, in order of the calls
    std::vector<Read> reads() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return reads_;
    }
    std::vector<std::pair<uint64_t, uint64_t>> after_reads() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return after_reads_;
    }

    void after_read(uint64_t offset, uint64_t n_bytes) override {
        std::lock_guard<std::mutex> lock(mutex_);
        after_reads_.push_back({offset, n_bytes});
    }

private:
    struct Fault { int error_number, n_left; };

    int64_t read_impl(uint64_t offset, uint8_t * dest, uint64_t n_bytes) override {
        points.arrive("read");
        points.arrive("read " + std::to_string(offset));
        std::lock_guard<std::mutex> lock(mutex_);
        const int64_t result = answer(offset, dest, n_bytes);
        reads_.push_back({offset, n_bytes, result});
        return result;
    }

    int64_t answer(uint64_t offset, uint8_t * dest, uint64_t n_bytes) {
        for (auto & [at, fault] : faults_) {
            if (at >= offset && at < offset + n_bytes && fault.n_left > 0) {
                fault.n_left--;
                return -int64_t(fault.error_number);
            }
        }
        uint64_t n = offset < bytes_.size() ? std::min<uint64_t>(n_bytes, bytes_.size() - offset) : 0;
        const uint64_t limit = call_limit_;
        n = limit ? std::min(n, limit) : n;
        memcpy(dest, bytes_.data() + std::min<uint64_t>(offset, bytes_.size()), n);
        return int64_t(n);
    }

    mutable std::mutex mutex_;
    std::vector<uint8_t> bytes_;
    std::map<uint64_t, Fault> faults_;
    std::atomic<uint64_t> call_limit_{0};
    std::vector<Read> reads_;
    std::vector<std::pair<uint64_t, uint64_t>> after_reads_;
};

} // namespace ls::testing
