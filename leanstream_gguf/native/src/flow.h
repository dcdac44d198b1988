// How far to look ahead, from the times of the tokens themselves: each choice is tried for a few tokens at the start and now and
// then later, and the fastest is kept. Needs no profile, and notices when reading ahead stops paying.
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
    bool settled() const { return n_tokens_ >= uint64_t(kTrials) * (farthest_ + 1); }
    double mean_ns(uint8_t choice) const { return mean_ns_[choice]; }

private:
    static constexpr uint32_t kTrials = 6;      // tokens of each choice at the start: 24 in all
    static constexpr uint32_t kRetryEvery = 48; // tokens between two trials of another choice
    static constexpr double kWorthIt = 0.99;    // a farther choice must save this much

    void choose();

    uint8_t  farthest_ = 0;
    uint8_t  best_ = 0;
    uint8_t  retry_ = 0;
    uint64_t n_tokens_ = 0;
    uint32_t n_measured_[kChoices] = {};
    double   mean_ns_[kChoices] = {};
};

} // namespace ls
