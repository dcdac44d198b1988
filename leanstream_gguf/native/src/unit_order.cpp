#include "unit_order.h"

#include <algorithm>

namespace ls {

namespace {

constexpr float    kStepsPerUnit = 32.0f;
constexpr uint32_t kSteps = uint32_t((ScoreOrder::kHighest - ScoreOrder::kLowest) * kStepsPerUnit) + 2;

} // namespace

uint16_t ScoreOrder::step(float score) {
    return uint16_t(1 + uint32_t((std::min(std::max(score, kLowest), kHighest) - kLowest) * kStepsPerUnit));
}

ScoreOrder::ScoreOrder(uint32_t n_units)
    : links_(n_units), steps_(kSteps), occupied_((kSteps + 63) / 64, 0), step_(n_units, kOut), lowest_(uint32_t(occupied_.size())) {}

void ScoreOrder::add(uint32_t u, uint16_t step, bool front) {
    front ? links_.push_front(steps_[step], u) : links_.push_back(steps_[step], u);
    step_[u] = step;
    occupied_[step / 64] |= uint64_t(1) << step % 64;
    lowest_ = std::min(lowest_, uint32_t(step / 64));
}

void ScoreOrder::place(uint32_t u, float score) {
    remove(u);
    add(u, step(score), false);
}

void ScoreOrder::place_first(uint32_t u) {
    remove(u);
    add(u, 0, true);
}

void ScoreOrder::remove(uint32_t u) {
    const uint16_t step = step_[u];
    if (step == kOut) {
        return;
    }
    links_.remove(steps_[step], u);
    step_[u] = kOut;
    if (steps_[step].front == Links::kNone) {
        occupied_[step / 64] &= ~(uint64_t(1) << step % 64);
        while (lowest_ < occupied_.size() && occupied_[lowest_] == 0) {
            lowest_++;
        }
    }
}

int64_t ScoreOrder::first(const std::function<bool(uint32_t)> & allowed) const {
    for (uint32_t w = lowest_; w < occupied_.size(); ++w) {
        for (uint64_t bits = occupied_[w]; bits; bits &= bits - 1) {
            const int64_t u = links_.find(steps_[w * 64 + uint32_t(__builtin_ctzll(bits))], allowed);
            if (u >= 0) {
                return u;
            }
        }
    }
    return -1;
}

} // namespace ls
