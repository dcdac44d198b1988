// Reading ahead of the choice: what was guessed, what came of it, and how far to look ahead.
#pragma once

#include "flow.h"
#include "leanstream.h"
#include "predictor.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace ls {

struct Session;
class TraceWriter;

// Where a guess is made, counted back from the choice it is about.
enum Lead : uint8_t {
    kLeadBlock  = 1, // the layer's input: one attention block earlier
    kLeadLayer  = 2, // before the FFN of the layer before
    kLeadLayers = 3, // before the FFN of the layer before that
};
constexpr uint32_t kLeads = 4; // 0 is unused

struct SpeculationSettings {
    static constexpr uint32_t kAuto = UINT32_MAX;

    uint32_t depth  = kAuto; // layers to look ahead, 0 (off) to 2; kAuto: what pays, found while running
    uint32_t stages = kAuto; // 1: one guess, never corrected until demand; more: corrected at each later lead
    // one guess at the farthest lead, or all up to it
    bool uses(uint8_t lead, uint8_t farthest) const { return stages == 1 ? lead == farthest : lead <= farthest; }
    uint8_t farthest() const { return depth == 0 ? 0 : depth == kAuto ? uint8_t(kLeadLayers) : uint8_t(depth + 1); }
};

struct SpeculationCounters {
    uint64_t n_ahead = 0;        // units read ahead
    uint64_t n_used = 0;         // of those, used before they were given up
    uint64_t n_late = 0;         // of the used ones, not in memory yet when they were needed
    uint64_t n_wasted = 0;       // given up unused
    uint64_t n_cancelled = 0;    // dropped before a byte was read
    uint64_t ahead_bytes = 0, used_bytes = 0, wasted_bytes = 0, cancelled_bytes = 0;
    // of turns of one token: units used, and how many of them were among the k and 2k likeliest
    uint64_t recall_n[kLeads] = {}, recall_k[kLeads] = {}, recall_2k[kLeads] = {};

    void add_to(ls_stats & out) const;
};

// Guesses below a bound of probability are not read: fewer, surer ones while too much of what is read is wasted, more while little is.
struct WasteLimit {
    float  least_p = 0.6f;
    float  step = 0.01f;           // of the bound, for a unit wasted or used
    double recent_limit = 256e6;   // bytes; then they count half
    double recent_wasted = 0, recent_read = 0;

    void judge(uint64_t wasted_bytes, uint64_t read_bytes);
    void judge_demand(uint64_t read_bytes) { recent_read += double(read_bytes); }
};

// The last guess about a layer at a lead, until the layer has chosen.
struct Guess {
    const Session * of = nullptr; // nullptr: none open
    std::vector<float> margin, p;
    Calibration calibration;
};

struct Speculation {
    enum State : uint8_t { kNone = 0, kWaiting = 1, kPassed = 2 }; // its turn comes; its turn came without a use

    SpeculationSettings settings;
    std::vector<Router> routers;             // [layer]
    std::vector<Guess>  guesses;             // [layer * kLeads + lead]
    std::vector<uint8_t> state;              // [unit] State of units read ahead and not used yet
    SpeculationCounters counters;
    FlowControl flow;
    WasteLimit waste;
    std::shared_ptr<TraceWriter> trace;      // shared with the neuron store
    std::atomic<bool> tracing{false};        // trace is set

    Guess & guess(uint32_t layer, uint8_t lead) { return guesses[layer * kLeads + lead]; }
};

} // namespace ls
