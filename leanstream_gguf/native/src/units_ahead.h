// The life of what is read ahead of a choice, an expert or a cluster of neurons alike, and what it cost.
#pragma once

#include "cache.h"
#include "leanstream.h"

#include <cstdint>
#include <vector>

namespace ls {

struct AheadCounters {
    uint64_t n_ahead = 0;        // units read ahead
    uint64_t n_used = 0;         // of those, used before they were given up
    uint64_t n_late = 0;         // of the used ones, not in memory yet when they were needed
    uint64_t n_wasted = 0;       // given up unused
    uint64_t n_cancelled = 0;    // dropped before a byte was read
    uint64_t ahead_bytes = 0, used_bytes = 0, wasted_bytes = 0, cancelled_bytes = 0;
    void add_to(ls_stats & out) const;
};

// Guesses below a bound of probability are not read: the more of what is read is wasted, the surer they have to be.
struct WasteLimit {
    explicit WasteLimit(double window_bytes = 512e6);

    float  least_p;
    double window;          // bytes read; what was before counts little
    double wasted, read;    // bytes, of about the last window

    void judge(uint64_t wasted_bytes, uint64_t read_bytes);
    void judge_demand(uint64_t read_bytes) { judge(0, read_bytes); }
};

// Which units of a cache were read ahead and have not been used yet. Until its turn has come such a unit is spared; then it is
// used, or passes and may go. Counters and the waste limit may be shared with other caches.
class UnitsAhead {
public:
    UnitsAhead(SlotCache & cache, AheadCounters & counters, WasteLimit & waste)
        : cache_(&cache), counters_(&counters), waste_(&waste), state_(cache.n_units(), State::none) {}

    bool holds(uint32_t unit) const { return state_[unit] != State::none; }
    bool waiting(uint32_t unit) const { return state_[unit] == State::waiting; } // its turn comes
    uint32_t n_waiting() const { return n_waiting_; }

    void begin(uint32_t unit, uint64_t n_bytes);          // its reads start
    void use(uint32_t unit, uint64_t n_bytes, bool late); // late: not in memory yet
    void pass(uint32_t unit);                             // its turn came without a use
    void evicted(uint32_t unit, uint64_t n_bytes);        // also one that was not read ahead
    void withdraw_bytes(uint64_t n_bytes);                // reads that had not begun
    void forget(uint32_t unit);                           // all of its reads: as if it had never been asked for

private:
    enum class State : uint8_t { none, waiting, passed };
    void set(uint32_t unit, State state);

    SlotCache *     cache_;
    AheadCounters * counters_;
    WasteLimit *    waste_;
    std::vector<State> state_;
    uint32_t n_waiting_ = 0;
};

} // namespace ls
