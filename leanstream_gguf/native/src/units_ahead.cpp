#include "units_ahead.h"

#include <algorithm>

namespace ls {

namespace {

constexpr float kLowestP = 0.25f, kHighestP = 0.95f;
constexpr double kNoMatter = 0.07, kTooMuch = 0.13; // of the bytes read: wasted shares for the lowest and the highest bound

} // namespace

// Begins in the middle, as if an eighth of the window had been read.
WasteLimit::WasteLimit(double window_bytes) : window(window_bytes), wasted((kNoMatter + kTooMuch) / 2 * window / 8), read(window / 8) {
    judge(0, 0);
}

void WasteLimit::judge(uint64_t wasted_bytes, uint64_t read_bytes) {
    const double keep = 1.0 - std::min(1.0, double(read_bytes) / window);
    wasted = keep * wasted + double(wasted_bytes);
    read   = keep * read + double(read_bytes);
    const double excess = std::min(1.0, std::max(0.0, (wasted / read - kNoMatter) / (kTooMuch - kNoMatter)));
    least_p = kLowestP + float(excess) * (kHighestP - kLowestP);
}

void AheadCounters::add_to(ls_stats & out) const {
    out.n_ahead               += n_ahead;
    out.n_ahead_used          += n_used;
    out.n_ahead_late          += n_late;
    out.n_ahead_wasted        += n_wasted;
    out.n_ahead_cancelled     += n_cancelled;
    out.ahead_bytes           += ahead_bytes;
    out.ahead_used_bytes      += used_bytes;
    out.ahead_wasted_bytes    += wasted_bytes;
    out.ahead_cancelled_bytes += cancelled_bytes;
}

void UnitsAhead::set(uint32_t unit, State state) {
    n_waiting_ -= state_[unit] == State::waiting;
    n_waiting_ += state == State::waiting;
    state_[unit] = state;
    cache_->spare(unit, state == State::waiting);
}

void UnitsAhead::begin(uint32_t unit, uint64_t n_bytes) {
    set(unit, State::waiting);
    counters_->n_ahead++;
    counters_->ahead_bytes += n_bytes;
}

void UnitsAhead::use(uint32_t unit, uint64_t n_bytes, bool late) {
    set(unit, State::none);
    counters_->n_used++;
    counters_->n_late += late;
    counters_->used_bytes += n_bytes;
    waste_->judge(0, n_bytes);
}

void UnitsAhead::pass(uint32_t unit) {
    set(unit, State::passed);
}

void UnitsAhead::evicted(uint32_t unit, uint64_t n_bytes) {
    if (holds(unit)) {
        set(unit, State::none);
        counters_->n_wasted++;
        counters_->wasted_bytes += n_bytes;
        waste_->judge(n_bytes, 0);
    }
}

void UnitsAhead::withdraw_bytes(uint64_t n_bytes) {
    counters_->ahead_bytes     -= n_bytes;
    counters_->cancelled_bytes += n_bytes;
}

void UnitsAhead::forget(uint32_t unit) {
    set(unit, State::none);
    counters_->n_ahead--;
    counters_->n_cancelled++;
}

} // namespace ls
