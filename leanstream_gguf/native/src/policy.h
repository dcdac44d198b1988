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
    virtual void touch (uint32_t unit) = 0;  // used while resident
    virtual void erase (uint32_t unit) = 0;  // no longer resident

    // The unit to give up: the first one in order of uselessness for which `allowed` holds; -1 = none.
    virtual int64_t victim(const std::function<bool(uint32_t)> & allowed) const = 0;
    virtual const char * name() const = 0;
};

struct PolicyParams {
    double protected_share = 0.8;  // slru: share of units in the protected segment
    double half_life       = 0.0;  // lfu: uses after which a use counts half; 0 = 32 uses for each unit of capacity
};

// "lru", "lfu" (frequency with exponential ageing), "slru" (segmented). Throws Error(LS_ERR_ARGUMENT) for other names.
// n_units: ids are below it. n_capacity: about how many units fit.
std::unique_ptr<Policy> make_policy(const std::string & name, const PolicyParams & params, uint32_t n_units, uint32_t n_capacity);

// {"key": number, ...} for the keys above. Throws Error(LS_ERR_ARGUMENT).
PolicyParams parse_policy_params(const std::string & name, const std::string & json);

} // namespace ls
