// Orders over unit ids for retention policies: arrays only, every change in constant time.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace ls {

// Doubly linked lists over unit ids; a unit is in at most one.
class Links {
public:
    explicit Links(uint32_t n_units) : prev_(n_units, kNone), next_(n_units, kNone) {}

    struct List {
        uint32_t front = kNone; // least useful
        uint32_t back  = kNone;
    };

    void push_back(List & l, uint32_t u) {
        prev_[u] = l.back;
        next_[u] = kNone;
        (l.back == kNone ? l.front : next_[l.back]) = u;
        l.back = u;
    }

    void push_front(List & l, uint32_t u) {
        next_[u] = l.front;
        prev_[u] = kNone;
        (l.front == kNone ? l.back : prev_[l.front]) = u;
        l.front = u;
    }

    void remove(List & l, uint32_t u) {
        (prev_[u] == kNone ? l.front : next_[prev_[u]]) = next_[u];
        (next_[u] == kNone ? l.back  : prev_[next_[u]]) = prev_[u];
    }

    int64_t find(const List & l, const std::function<bool(uint32_t)> & allowed) const {
        for (uint32_t u = l.front; u != kNone; u = next_[u]) {
            if (allowed(u)) {
                return u;
            }
        }
        return -1;
    }

    static constexpr uint32_t kNone = UINT32_MAX;

private:
    std::vector<uint32_t> prev_, next_;
};

// Units by score, in steps of 1/32: within a step, the one placed first comes first. Scores beyond kLowest .. kHighest count as
// these.
class ScoreOrder {
public:
    static constexpr float kLowest = -64.0f, kHighest = 128.0f;

    explicit ScoreOrder(uint32_t n_units);

    static uint16_t step(float score); // units of one step are equal
    bool holds(uint32_t u) const { return step_[u] != kOut; }
    void place(uint32_t u, float score); // adds it, or moves it behind the others of its step
    void place_first(uint32_t u);        // before all others, whatever their scores
    void remove(uint32_t u);             // it may be out already
    int64_t first(const std::function<bool(uint32_t)> & allowed) const; // -1 = none

private:
    static constexpr uint16_t kOut = UINT16_MAX;

    void add(uint32_t u, uint16_t step, bool front);

    Links links_;
    std::vector<Links::List> steps_;   // [0] those placed first
    std::vector<uint64_t> occupied_;   // a bit for each step
    std::vector<uint16_t> step_;       // [unit]
    uint32_t lowest_ = 0;              // no word of occupied_ below it has a bit
};

} // namespace ls
