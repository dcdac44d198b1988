#include "policy.h"

#include "status.h"
#include "unit_order.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

namespace ls {

namespace {

class Lru final : public Policy {
public:
    explicit Lru(uint32_t n_units) : links_(n_units) {}
    void insert(uint32_t u) override { links_.push_back(list_, u); }
    void insert_cold(uint32_t u) override { links_.push_front(list_, u); }
    void touch(uint32_t u) override { links_.remove(list_, u); links_.push_back(list_, u); }
    void erase(uint32_t u) override { links_.remove(list_, u); }
    int64_t victim(const std::function<bool(uint32_t)> & allowed) const override { return links_.find(list_, allowed); }
    const char * name() const override { return "lru"; }

private:
    Links links_;
    Links::List list_;
};

// Segmented LRU: a second use moves a unit to the protected segment, whose overflow returns to probation.
class Slru final : public Policy {
public:
    Slru(uint32_t n_units, uint32_t n_protected) : links_(n_units), is_protected_(n_units, false), n_protected_(n_protected) {}

    void insert(uint32_t u) override { is_protected_[u] = false; links_.push_back(probation_, u); }
    void insert_cold(uint32_t u) override { is_protected_[u] = false; links_.push_front(probation_, u); }
    void erase(uint32_t u) override {
        links_.remove(is_protected_[u] ? protected_ : probation_, u);
        n_now_protected_ -= is_protected_[u];
    }

    void touch(uint32_t u) override {
        erase(u);
        is_protected_[u] = true;
        links_.push_back(protected_, u);
        if (++n_now_protected_ > n_protected_) {
            const uint32_t demoted = protected_.front;
            erase(demoted);
            is_protected_[demoted] = false;
            links_.push_back(probation_, demoted);
        }
    }

    int64_t victim(const std::function<bool(uint32_t)> & allowed) const override {
        const int64_t u = links_.find(probation_, allowed);
        return u >= 0 ? u : links_.find(protected_, allowed);
    }

    const char * name() const override { return "slru"; }

private:
    Links links_;
    Links::List probation_, protected_;
    std::vector<bool> is_protected_;
    uint32_t n_protected_, n_now_protected_ = 0;
};

} // namespace

std::unique_ptr<Policy> make_policy(const std::string & name, const PolicyParams & params, uint32_t n_units, uint32_t n_capacity) {
    if (name == "lru") {
        return std::make_unique<Lru>(n_units);
    }
    if (name == "slru") {
        return std::make_unique<Slru>(n_units, uint32_t(params.protected_share * n_capacity));
    }
    if (name == "lfu") {
        return make_lfu_policy(params, n_units, n_capacity);
    }
    if (name == "hotcold") {
        return make_hotcold_policy(params, n_units, n_capacity);
    }
    if (name == "lean") {
        return make_lean_policy(params, n_units, n_capacity);
    }
    throw Error(LS_ERR_ARGUMENT, format("no retention policy '%s'; choose lean, lfu, lru, slru or hotcold", name.c_str()));
}

namespace {

struct Parameter {
    const char * policy;
    const char * key;
    double PolicyParams::* field;
    double lowest, highest;
};

constexpr double kMost = 2147483648.0;
const Parameter kParameters[] = {
    {"slru", "protected_share", &PolicyParams::protected_share, 1e-9, 1.0 - 1e-9},
    {"lfu", "half_life", &PolicyParams::half_life, 1.0, kMost},
    {"lean", "half_life", &PolicyParams::half_life, 1.0, kMost},
    {"lean", "margin_weight", &PolicyParams::margin_weight, 0.0, 16.0},
    {"lean", "prediction_weight", &PolicyParams::prediction_weight, 0.0, 16.0},
    {"hotcold", "hot_share", &PolicyParams::hot_share, 0.0, 1.0},
};

void set_parameter(PolicyParams & params, const std::string & policy, const std::string & key, double value) {
    std::string known;
    for (const Parameter & p : kParameters) {
        if (policy != p.policy) {
            continue;
        }
        if (key == p.key && value >= p.lowest && value <= p.highest) {
            params.*p.field = value;
            return;
        }
        known += format("%s%s in [%g, %g]", known.empty() ? "" : ", ", p.key, p.lowest, p.highest);
    }
    throw Error(LS_ERR_ARGUMENT, format("policy %s: bad parameter '%s'; it takes %s", policy.c_str(), key.c_str(),
        known.empty() ? "none" : known.c_str()));
}

} // namespace

PolicyParams parse_policy_params(const std::string & name, const std::string & json) {
    PolicyParams p;
    size_t at = 0;
    if (!json.empty() && (json.front() != '{' || json.back() != '}')) {
        throw Error(LS_ERR_ARGUMENT, "policy parameters must be a JSON object of numbers, or empty");
    }
    while ((at = json.find('"', at)) != std::string::npos) {
        const size_t end = json.find('"', at + 1);
        const size_t colon = end == std::string::npos ? end : json.find(':', end);
        if (colon == std::string::npos) {
            throw Error(LS_ERR_ARGUMENT, "policy parameters must be a JSON object of numbers");
        }
        const std::string key = json.substr(at + 1, end - at - 1);
        char * rest = nullptr;
        const double value = strtod(json.c_str() + colon + 1, &rest);
        const bool is_number = rest != json.c_str() + colon + 1;
        set_parameter(p, name, key, is_number ? value : NAN); // NaN is in no range
        at = size_t(rest - json.c_str());
    }
    return p;
}

} // namespace ls
