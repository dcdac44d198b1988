// Which resident unit to give up. Units are small integers; a policy holds the resident ones.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace ls {

class Policy {
public:
    virtual ~Policy() = default;

    virtual void insert(uint32_t unit) = 0;  // became resident, by a use
    // Became resident for a pass over everything: give it up before all others, and the latest of these first, because a pass
    // comes round in the same order.
    virtual void insert_cold(uint32_t unit) = 0;
    // Became resident ahead of its use: a guess says nothing about how often a unit is used.
    virtual void insert_ahead(uint32_t unit) { insert(unit); }
    virtual void touch (uint32_t unit) = 0;  // used while resident
    virtual void erase (uint32_t unit) = 0;  // no longer resident
    // From hold() to release() the unit is in use and cannot be a victim: a policy may leave it out of its order.
    virtual void hold(uint32_t /*unit*/) {}
    virtual void release(uint32_t /*unit*/) {}

    // A token begins: every layer has a turn until the next one.
    virtual void next_round() {}
    // A layer's units first .. first + n - 1 were just chosen from. margin: [n] score of each less the score at the border between
    // chosen and not chosen, resident or not; how near a unit came tells of its next turn; nullptr: unknown. Before the uses of that turn are told.
    virtual void ranked(uint32_t /*first*/, const float * /*margin*/, uint32_t /*n*/) {}
    // The layer's turn comes soon. p: [n] how probable the use of each is then. Until its ranked().
    virtual void predicted(uint32_t /*first*/, const float * /*p*/, uint32_t /*n*/) {}
    // Is `victim` less likely to be used at its coming turn than `newcomer`, which is not resident? Policies without a ranking say yes.
    virtual bool worth_less(uint32_t /*victim*/, uint32_t /*newcomer*/) const { return true; }

    // The unit to give up: the first one in order of uselessness for which `allowed` holds; -1 = none.
    virtual int64_t victim(const std::function<bool(uint32_t)> & allowed) const = 0;
    virtual const char * name() const = 0;
};

struct PolicyParams {
    double protected_share = 0.8;  // slru: share of units in the protected segment
    double half_life       = 0.0;  // lfu, lean: uses after which a use counts half; 0 = 32 uses for each unit of capacity
    double hot_share       = 0.5;  // hotcold: share of the capacity for the units that are never given up
    double margin_weight   = 0.3;  // lean: powers of two of frequency that a margin of 1 is worth
    double prediction_weight = 1.0; // lean: the same for the log2 of a prediction's odds, where they are above even
};

// "lru", "lfu" (frequency with exponential ageing), "slru" (segmented), "hotcold" (a fixed set of the most used ones, chosen once,
// and lru for the rest), "lean" (frequency, how near each came at its last turn, and predictions).
// Throws Error(LS_ERR_ARGUMENT) for other names. n_units: ids are below it. n_capacity: about how many units fit.
std::unique_ptr<Policy> make_policy(const std::string & name, const PolicyParams & params, uint32_t n_units, uint32_t n_capacity);

std::unique_ptr<Policy> make_lfu_policy(const PolicyParams & params, uint32_t n_units, uint32_t n_capacity);     // policy_frequency.cpp
std::unique_ptr<Policy> make_lean_policy(const PolicyParams & params, uint32_t n_units, uint32_t n_capacity);    // policy_frequency.cpp
std::unique_ptr<Policy> make_hotcold_policy(const PolicyParams & params, uint32_t n_units, uint32_t n_capacity); // policy_hotcold.cpp

// {"key": number, ...} for the keys above. Throws Error(LS_ERR_ARGUMENT).
PolicyParams parse_policy_params(const std::string & name, const std::string & json);

} // namespace ls
