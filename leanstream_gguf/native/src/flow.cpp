#include "flow.h"

#include <algorithm>

namespace ls {

void FlowControl::reset(uint8_t farthest) {
    *this = FlowControl();
    farthest_ = std::min<uint8_t>(farthest, kChoices - 1);
    best_ = farthest_;
}

uint8_t FlowControl::next() {
    const uint64_t t = n_tokens_++;
    const uint32_t n = farthest_ + 1u;
    if (t < uint64_t(kTrials) * n) {
        return uint8_t(t % n);
    }
    if (n > 1 && t % kRetryEvery == 0) {
        uint8_t choice = 0; // every second time whether it pays at all
        if (best_ == 0 || t / kRetryEvery % 2 == 0) {
            choice = retry_ = uint8_t((retry_ + 1) % n);
        }
        if (choice != best_) { // what it took long ago, perhaps with a cold cache, soon counts no more
            n_measured_[choice] = std::min(n_measured_[choice], 2u);
        }
        return choice;
    }
    return best_;
}

void FlowControl::measured(uint8_t choice, uint64_t ns) {
    const uint32_t n = ++n_measured_[choice];
    const double before = mean_ns_[choice];
    // one token that the machine held up says nothing
    const double value = n > 2 ? std::min(double(ns), 2.0 * before) : double(ns);
    mean_ns_[choice] = before + (value - before) / std::min(n, 24u);
    choose();
}

void FlowControl::choose() {
    uint8_t best = 0;
    for (uint8_t c = 1; c <= farthest_; ++c) {
        if (n_measured_[c] > 0 && n_measured_[best] > 0 && mean_ns_[c] < kWorthIt * mean_ns_[best]) {
            best = c;
        }
    }
    if (settled()) {
        best_ = best;
    }
}

} // namespace ls
