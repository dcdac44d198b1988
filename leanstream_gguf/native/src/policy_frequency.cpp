// Retention by frequency (lfu), and by what is known of the next use beyond it (lean): how near the router came to choosing a unit
// at its last turn, and what a predictor says of its coming one. All of it is logarithms and adds up; a scan touches each unit
// once and raises none of it.
#include "policy.h"
#include "unit_order.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace ls {

namespace {

// Frequency with exponential ageing. A use at time t (in half-lives) adds 2^t; counts are kept as log2 of the sum, so that ageing
// touches no unit that is not used. They survive eviction: a unit that returns is not a stranger.
class Lfu : public Policy {
public:
    Lfu(double half_life, uint32_t n_units) : order_(n_units), count_(n_units, kNever), state_(n_units, 0), step_(1.0 / half_life) {}

    void insert(uint32_t u) override { use(u); arrive(u, 0); }
    void insert_ahead(uint32_t u) override { arrive(u, 0); } // a stranger goes before any unit that was used
    void insert_cold(uint32_t u) override { arrive(u, kCold); }
    void touch(uint32_t u) override {
        use(u);
        state_[u] &= uint8_t(~kCold);
        place(u);
    }
    void erase(uint32_t u) override {
        order_.remove(u);
        state_[u] = 0;
    }
    void hold(uint32_t u) override {
        order_.remove(u);
        state_[u] |= kHeld;
    }
    void release(uint32_t u) override {
        state_[u] &= uint8_t(~kHeld);
        place(u);
    }
    int64_t victim(const std::function<bool(uint32_t)> & allowed) const override { return order_.first(allowed); }
    const char * name() const override { return "lfu"; }

protected:
    static constexpr float kNever = -60.0f;

    bool ordered(uint32_t u) const { return state_[u] == kResident; }
    bool cold(uint32_t u) const { return state_[u] & kCold; }
    float count(uint32_t u) const { return count_[u]; }
    uint64_t n_uses() const { return n_uses_; }
    // log2 of the uses of a unit with this count among n uses of any
    float log_rate(float count, double n) const {
        const double half_lives = double(n_uses_) * step_, all = (1.0 - std::exp2(-half_lives)) / (step_ * std::log(2.0)); // uses, aged
        return count - float(now_) + float(std::log2(n / std::max(1.0, all)));
    }
    void place(uint32_t u) {
        if (state_[u] & kHeld || !(state_[u] & kResident)) {
            return;
        }
        state_[u] & kCold ? order_.place_first(u) : order_.place(u, key(u));
    }
    virtual float key(uint32_t u) const { return count_[u]; }

private:
    enum State : uint8_t { kResident = 1, kHeld = 2, kCold = 4 };

    void arrive(uint32_t u, uint8_t state) {
        state_[u] = uint8_t(kResident | state);
        place(u);
    }

    void use(uint32_t u) {
        n_uses_++;
        now_ += step_;
        const float now = float(now_), high = std::max(count_[u], now), low = std::min(count_[u], now);
        count_[u] = high + std::log2(1.0f + std::exp2(low - high));
        if (now_ > double(ScoreOrder::kHighest) / 2) {
            start_time_again();
        }
    }

    void start_time_again() {
        for (float & c : count_) {
            c = std::max(c - float(now_), kNever);
        }
        now_ = 0.0;
        for (uint32_t u = 0; u < state_.size(); ++u) {
            if (ordered(u)) {
                order_.place(u, key(u));
            }
        }
    }

    ScoreOrder order_;
    std::vector<float>   count_; // [unit] resident or not
    std::vector<uint8_t> state_;
    double step_, now_ = 0.0;
    uint64_t n_uses_ = 0;
};

class Lean final : public Lfu {
public:
    Lean(const PolicyParams & params, double half_life, uint32_t n_units)
        : Lfu(half_life, n_units), margin_(n_units, 0.0f), hint_(n_units, 0.0f), predicted_(n_units, kNone), margin_weight_(float(params.margin_weight)),
          prediction_weight_(float(params.prediction_weight)) {}

    void next_round() override {
        round_uses_ = std::max<uint64_t>(1, n_uses() - round_begin_);
        round_begin_ = n_uses();
    }

    void ranked(uint32_t first, const float * margin, uint32_t n) override {
        for (uint32_t i = 0; i < n; ++i) {
            predicted_[first + i] = kNone;
            margin_[first + i] = margin ? margin_weight_ * std::min(std::max(margin[i], kLowest), kHighest) : 0.0f;
            hint(first + i, margin_[first + i]);
        }
    }

    void predicted(uint32_t first, const float * p, uint32_t n) override {
        for (uint32_t i = 0; i < n; ++i) {
            const float odds = std::log2(std::max(p[i], 1e-3f) / std::max(1.0f - p[i], 1e-3f));
            predicted_[first + i] = std::log2(std::max(p[i], 1e-3f));
            hint(first + i, margin_[first + i] + prediction_weight_ * std::max(odds, 0.0f));
        }
    }

    bool worth_less(uint32_t victim, uint32_t newcomer) const override {
        return cold(victim) || ScoreOrder::step(coming_key(victim)) < ScoreOrder::step(coming_key(newcomer));
    }
    const char * name() const override { return "lean"; }

private:
    static constexpr float kLowest = -6.0f, kHighest = 4.0f; // margins beyond say no more
    static constexpr float kNone = 1.0f;

    float key(uint32_t u) const override { return count(u) + hint_[u]; }

    // what is predicted of the coming turn, as the key of a unit that is used so often
    float coming_key(uint32_t u) const { return predicted_[u] != kNone ? predicted_[u] - log_rate(0, double(round_uses_)) : key(u); }

    void hint(uint32_t u, float value) {
        if (hint_[u] != value) {
            hint_[u] = value;
            if (ordered(u)) {
                place(u);
            }
        }
    }

    std::vector<float> margin_; // [unit] what its last turn told
    std::vector<float> hint_;   // [unit] what is known beyond its uses
    std::vector<float> predicted_; // [unit] log2 of the probability of a use at its coming turn, or kNone
    uint64_t round_begin_ = 0, round_uses_ = 1; // uses in a round
    float margin_weight_, prediction_weight_;
};

double half_life_of(const PolicyParams & params, uint32_t n_capacity) {
    return params.half_life > 0 ? params.half_life : 32.0 * std::max(1u, n_capacity);
}

} // namespace

std::unique_ptr<Policy> make_lfu_policy(const PolicyParams & params, uint32_t n_units, uint32_t n_capacity) {
    return std::make_unique<Lfu>(half_life_of(params, n_capacity), n_units);
}

std::unique_ptr<Policy> make_lean_policy(const PolicyParams & params, uint32_t n_units, uint32_t n_capacity) {
    return std::make_unique<Lean>(params, half_life_of(params, n_capacity), n_units);
}

} // namespace ls
