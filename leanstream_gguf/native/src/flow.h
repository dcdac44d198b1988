// How far to look ahead, from the times of the tokens themselves: each choice is tried for a few tokens at the start and now and
// then later, and the fastest is kept. Needs no profile, and notices when reading ahead stops paying. What a token takes changes with
// the cache's warmth and the drive's load, so a choice's time is kept as a ratio to the tokens around it.
#pragma once

#include <cstdint>

namespace ls {

class FlowControl {
public:
    static constexpr uint8_t kChoices = 4; // 0 = off, else the farthest lead

    // `farthest`: choices above it are not tried; forget what was measured
    void reset(uint8_t farthest);
    // the choice for the next token
    uint8_t next();
    // a token took this long under the choice that next() gave
    void measured(uint8_t choice, uint64_t ns);

    uint8_t best() const { return best_; }
    bool settled() const { return n_tokens_ >= kCold + uint64_t(kTrials) * (farthest_ + 1); }
    // by the pace of the last tokens; 0 = not measured
    double mean_ns(uint8_t choice) const { return choices_[choice].n == 0 ? 0 : choices_[choice].ratio * pace_ns_; }

private:
    static constexpr uint32_t kCold = 2;         // first tokens, that nothing is learnt from
    static constexpr uint32_t kTrials = 6;       // tokens of each choice at the start
    static constexpr uint32_t kWindow = 24;      // tokens that a choice's ratio is averaged over
    static constexpr double kWorthIt = 0.99;     // a farther choice must save this much
    static constexpr double kTrialCost = 0.003;  // of all time, that trying a slower choice may take
    static constexpr uint32_t kSoonest = 8, kLatest = 192; // tokens between two trials of a choice
    static constexpr double kSurprise = 0.25;    // a trial so much faster than expected is repeated soon

    struct Choice {
        double   ratio = 1;     // of its time to the pace
        uint32_t n = 0;         // measured
        uint64_t last = 0;      // token
        bool     again = false; // its last trial was a surprise, or it seems to be the best and few trials say so
    };

    bool due(uint8_t choice) const;
    void choose();

    uint8_t  farthest_ = 0;
    uint8_t  best_ = 0;
    uint64_t n_tokens_ = 0;
    double   pace_ns_ = 0;      // of a token whose choice has ratio 1, over the last few
    Choice   choices_[kChoices];
};

} // namespace ls
