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
    uint8_t choice = best_;
    if (!settled()) {
        choice = uint8_t(t % (farthest_ + 1u));
    } else {
        for (uint8_t c = 0; c <= farthest_ && choice == best_; ++c) {
            choice = due(c) ? c : choice;
        }
    }
    return choice;
}

// The slower a choice was, the more seldom it is tried, so that all trials together cost little; close rivals are told apart soon.
bool FlowControl::due(uint8_t choice) const {
    const Choice & c = choices_[choice];
    if (choice == best_) {
        return false;
    }
    const double slower = std::max(0.0, c.ratio / choices_[best_].ratio - 1.0);
    const double wait = std::min(double(kLatest), std::max(double(kSoonest), slower / kTrialCost));
    return n_tokens_ - c.last >= (c.again ? kSoonest / 2 : uint64_t(wait));
}

void FlowControl::measured(uint8_t choice, uint64_t ns) {
    if (n_tokens_ <= kCold) {
        return;
    }
    pace_ns_ = pace_ns_ > 0 ? pace_ns_ : double(ns);
    Choice & c = choices_[choice];
    // one token that the machine held up says little
    const double ratio = std::min(2.0, std::max(0.5, double(ns) / pace_ns_));
    const bool surprise = settled() && choice != best_ && ratio < (1.0 - kSurprise) * c.ratio && !c.again;
    // what it took long ago counts little
    const uint64_t gap = std::max<uint64_t>(1, n_tokens_ - c.last);
    c.n = std::min({ c.n, kWindow, uint32_t(1 + 8 * kWindow / gap) }) + 1;
    c.ratio += (ratio - c.ratio) / std::min(c.n, kWindow);
    c.last = n_tokens_;
    c.again = surprise || (settled() && choice != best_ && c.n < kTrials && c.ratio < kWorthIt * choices_[best_].ratio);
    pace_ns_ += (double(ns) / c.ratio - pace_ns_) / 8;
    choose();
}

void FlowControl::choose() {
    if (!settled()) {
        return;
    }
    // one lucky token does not make a choice the best: it is tried again until that is known
    const auto known = [this](uint8_t c) { return c == best_ || choices_[c].n >= kTrials; };
    uint8_t best = best_;
    for (uint8_t c = 0; c <= farthest_; ++c) {
        const bool nearer = c < best;
        if (known(c) && choices_[c].ratio * (nearer ? kWorthIt : 1.0) < choices_[best].ratio * (nearer ? 1.0 : kWorthIt)) {
            best = c;
        }
    }
    best_ = best;
}

} // namespace ls
