// Retention by what is known of the next use: how often a unit was used (ageing counts), how near the router came to choosing it at
// its last turn, and what a predictor says of its coming one. All three are logarithms and add up; a scan touches each unit once
// and raises none of them.
#include "policy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace ls {

namespace {

constexpr float kNotResident = std::numeric_limits<float>::infinity();

// Keys with the least one found in two steps: the least of each block is kept, and looked for again only where a key changed.
class LeastKey {
public:
    explicit LeastKey(uint32_t n) : keys_(n, kNotResident), least_((n + kBlock - 1) / kBlock, kNotResident), stale_(least_.size(), 0) {}

    float get(uint32_t u) const { return keys_[u]; }

    void set(uint32_t u, float key) {
        float & least = least_[u / kBlock];
        if (key <= least) {
            least = key;
        } else if (keys_[u] <= least) {
            stale_[u / kBlock] = 1;
        }
        keys_[u] = key;
    }

    void add_to_all(float delta) {
        for (float & k : keys_) {
            k += delta;
        }
        for (float & k : least_) {
            k += delta;
        }
    }

    int64_t find(const std::function<bool(uint32_t)> & allowed) const {
        for (uint32_t b = 0; b < least_.size(); ++b) {
            refresh(b);
        }
        const uint32_t first = uint32_t(std::min_element(least_.begin(), least_.end()) - least_.begin());
        for (uint32_t u = first * kBlock; u < end(first); ++u) {
            if (keys_[u] == least_[first] && keys_[u] < kNotResident && allowed(u)) {
                return u;
            }
        }
        int64_t best = -1; // the least one may not go: look everywhere
        float best_key = kNotResident;
        for (uint32_t b = 0; b < least_.size(); ++b) {
            if (least_[b] >= best_key) {
                continue;
            }
            for (uint32_t u = b * kBlock; u < end(b); ++u) {
                if (keys_[u] < best_key && allowed(u)) {
                    best = u;
                    best_key = keys_[u];
                }
            }
        }
        return best;
    }

private:
    static constexpr uint32_t kBlock = 64;

    uint32_t end(uint32_t b) const { return std::min<uint32_t>(uint32_t(keys_.size()), (b + 1) * kBlock); }

    void refresh(uint32_t b) const {
        if (stale_[b]) {
            stale_[b] = 0;
            least_[b] = *std::min_element(keys_.begin() + b * kBlock, keys_.begin() + end(b));
        }
    }

    std::vector<float> keys_;
    mutable std::vector<float>   least_; // [block] no key is below it, and one equals it unless the block is stale
    mutable std::vector<uint8_t> stale_;
};

class Lean final : public Policy {
public:
    Lean(const PolicyParams & params, uint32_t n_units, uint32_t n_capacity)
        : keys_(n_units), count_(n_units, kNever), margin_(n_units, 0.0f), hint_(n_units, 0.0f), resident_(n_units, 0),
          step_(1.0f / float(params.half_life > 0 ? params.half_life : 32.0 * std::max(1u, n_capacity))),
          margin_weight_(float(params.margin_weight)), prediction_weight_(float(params.prediction_weight)) {}

    void insert(uint32_t u) override { use(u); place(u); }
    void insert_ahead(uint32_t u) override { place(u); }
    void insert_cold(uint32_t u) override {
        resident_[u] = 1;
        keys_.set(u, kCold - cold_++);
    }
    void touch(uint32_t u) override { use(u); place(u); }
    void erase(uint32_t u) override {
        resident_[u] = 0;
        keys_.set(u, kNotResident);
    }

    void ranked(uint32_t first, const float * margin, uint32_t n) override {
        for (uint32_t i = 0; i < n; ++i) {
            margin_[first + i] = margin ? margin_weight_ * std::min(std::max(margin[i], kLowest), kHighest) : 0.0f;
            hint(first + i, margin_[first + i]);
        }
    }

    void predicted(uint32_t first, const float * p, uint32_t n) override {
        for (uint32_t i = 0; i < n; ++i) {
            const float odds = std::log2(std::max(p[i], 1e-3f) / std::max(1.0f - p[i], 1e-3f));
            hint(first + i, margin_[first + i] + prediction_weight_ * std::max(odds, 0.0f));
        }
    }

    bool worth_less(uint32_t victim, uint32_t newcomer) const override { return keys_.get(victim) < key(newcomer); }

    int64_t victim(const std::function<bool(uint32_t)> & allowed) const override { return keys_.find(allowed); }
    const char * name() const override { return "lean"; }

private:
    static constexpr float kCold = -1e6f, kNever = -60.0f;
    static constexpr float kLowest = -6.0f, kHighest = 4.0f; // margins beyond say no more
    static constexpr float kRebase = 512.0f;                 // floats lose nothing below it

    float key(uint32_t u) const { return count_[u] + hint_[u]; }

    void place(uint32_t u) {
        resident_[u] = 1;
        keys_.set(u, key(u));
    }

    void hint(uint32_t u, float value) {
        hint_[u] = value;
        if (resident_[u] && keys_.get(u) > kCold / 2) {
            keys_.set(u, key(u));
        }
    }

    // As in Lfu: log2 of the sum over uses of 2^(time of use / half-life), so that ageing touches no unit that is not used.
    void use(uint32_t u) {
        now_ += step_;
        const float high = std::max(count_[u], now_), low = std::min(count_[u], now_);
        count_[u] = high + std::log2(1.0f + std::exp2(low - high));
        if (now_ > kRebase) {
            rebase();
        }
    }

    void rebase() {
        for (float & c : count_) {
            c = std::max(c - now_, kNever);
        }
        keys_.add_to_all(-now_);
        now_ = 0.0f;
    }

    LeastKey keys_;
    std::vector<float>   count_; // [unit] resident or not
    std::vector<float>   margin_; // [unit] what its last turn told
    std::vector<float>   hint_;  // [unit] what is known beyond its uses
    std::vector<uint8_t> resident_;
    float step_, margin_weight_, prediction_weight_;
    float now_  = 0.0f;
    float cold_ = 0.0f;
};

} // namespace

std::unique_ptr<Policy> make_lean_policy(const PolicyParams & params, uint32_t n_units, uint32_t n_capacity) {
    return std::make_unique<Lean>(params, n_units, n_capacity);
}

} // namespace ls
