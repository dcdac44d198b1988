// Named places in a test's timing: threads arrive, the test holds and releases them. No sleeps.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace ls::testing {

class SeqPoints {
public:
    // Threads that arrive at this point from now on wait there.
    void hold(const std::string & point) {
        std::lock_guard<std::mutex> lock(mutex_);
        held_.insert(point);
    }

    void release(const std::string & point) {
        std::lock_guard<std::mutex> lock(mutex_);
        held_.erase(point);
        changed_.notify_all();
    }

    // Called by the code under test (through a fake).
    void arrive(const std::string & point) {
        std::unique_lock<std::mutex> lock(mutex_);
        n_arrived_[point]++;
        changed_.notify_all();
        changed_.wait(lock, [&] { return held_.count(point) == 0; });
    }

    // Returns when n threads have arrived since construction, those that went on included.
    void wait_for(const std::string & point, int n = 1) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return n_arrived_[point] >= n; });
    }

    int n_arrived(const std::string & point) {
        std::lock_guard<std::mutex> lock(mutex_);
        return n_arrived_[point];
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::set<std::string> held_;
    std::map<std::string, int> n_arrived_;
};

} // namespace ls::testing
