// Reading ahead of the choice: what was guessed, what came of it, and how far to look ahead.
#pragma once

#include "flow.h"
#include "predictor.h"
#include "units_ahead.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace ls {

class Json;
struct Session;
class TraceWriter;

// Where a guess is made, counted back from the choice it is about.
enum Lead : uint8_t {
    kLeadBlock  = 1, // the layer's input: one attention block earlier
    kLeadLayer  = 2, // before the FFN of the layer before
    kLeadLayers = 3, // before the FFN of the layer before that
    kLeadParts  = 4, // within the FFN of the layer before: some of its experts' outputs are complete. Corrects kLeadLayer
};
constexpr uint32_t kLeads = 5; // 0 is unused

struct SpeculationSettings {
    static constexpr uint32_t kAuto = UINT32_MAX;

    uint32_t depth  = kAuto; // layers to look ahead, 0 (off) to 2; kAuto: what pays, found while running
    uint32_t stages = kAuto; // 1: one guess, never corrected until demand; 2: corrected at each later lead; more: and up to stages - 2 times within an FFN
    // one guess at the farthest lead, or all up to it
    bool uses(uint8_t lead, uint8_t farthest) const {
        return stages == 1 ? lead == farthest : lead == kLeadParts ? farthest >= kLeadLayer : lead <= farthest;
    }
    // most guesses within one FFN, beside the one before and the one behind it
    uint32_t part_guesses(uint8_t farthest) const { return !uses(kLeadParts, farthest) ? 0 : stages == kAuto ? UINT32_MAX : stages - 2; }
    uint8_t farthest() const { return depth == 0 ? 0 : depth == kAuto ? uint8_t(kLeadLayers) : uint8_t(depth + 1); }
};

// The last guess about a layer at a lead, until the layer has chosen.
struct Guess {
    const Session * of = nullptr; // nullptr: none open
    std::vector<float> margin, p;
    Calibration calibration;
};

// Units used in turns of one token, and how many of them were among the k and 2k likeliest, where k are used.
struct Recall {
    uint64_t n = 0, k = 0, k2 = 0;

    void write(Json & j) const; // keys at_k, at_2k, n
};

struct Speculation {
    SpeculationSettings settings;
    std::vector<Router> routers;             // [layer]
    std::vector<Guess>  guesses;             // [layer * kLeads + lead]
    Recall              recall[kLeads];
    AheadCounters       counters;
    WasteLimit          waste;
    std::unique_ptr<UnitsAhead> ahead;       // over all units
    double drive_busy = 1;                   // share of the time, of the last tokens
    uint64_t busy_ns = 0;                    // of the drive when the graph began
    uint64_t last_end_ns = 0;                // of the last graph
    FlowControl flow;
    std::shared_ptr<TraceWriter> trace;      // shared with the neuron store
    std::atomic<bool> tracing{false};        // trace is set

    // A guess that is read saves its time if it is right, and costs it if it is wrong and the drive has no time left.
    float least_p() const { return std::max(waste.least_p, float(drive_busy / (1 + drive_busy))); }
    Guess & guess(uint32_t layer, uint8_t lead) { return guesses[layer * kLeads + lead]; }
};

} // namespace ls
