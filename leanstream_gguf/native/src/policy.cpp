#include "policy.h"

#include "status.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>
#include <utility>
#include <vector>

namespace ls {

namespace {

// Doubly linked lists over unit ids; a unit is in at most one.
class Links {
public:
    explicit Links(uint32_t n_units) : prev_(n_units, kNone), next_(n_units, kNone) {}

    struct List {
        uint32_t front = kNone; // least useful
        uint32_t back  = kNone;
        uint32_t n = 0;
    };

    void push_back(List & l, uint32_t u) {
        prev_[u] = l.back;
        next_[u] = kNone;
        (l.back == kNone ? l.front : next_[l.back]) = u;
        l.back = u;
        l.n++;
    }

    void push_front(List & l, uint32_t u) {
        next_[u] = l.front;
        prev_[u] = kNone;
        (l.front == kNone ? l.back : prev_[l.front]) = u;
        l.front = u;
        l.n++;
    }

    void remove(List & l, uint32_t u) {
        (prev_[u] == kNone ? l.front : next_[prev_[u]]) = next_[u];
        (next_[u] == kNone ? l.back  : prev_[next_[u]]) = prev_[u];
        l.n--;
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
    void erase(uint32_t u) override { links_.remove(is_protected_[u] ? protected_ : probation_, u); }

    void touch(uint32_t u) override {
        erase(u);
        is_protected_[u] = true;
        links_.push_back(protected_, u);
        if (protected_.n > n_protected_) {
            const uint32_t demoted = protected_.front;
            links_.remove(protected_, demoted);
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
    uint32_t n_protected_;
};

// Frequency with exponential ageing. A use at time t adds 2^(t/h); scores are kept as log2 of the sum, so that ageing
// never touches units that are not used. Counts survive eviction: a unit that returns is not a stranger.
class Lfu final : public Policy {
public:
    Lfu(uint32_t n_units, double half_life) : score_(n_units, -HUGE_VAL), half_life_(half_life) {}

    void insert(uint32_t u) override { use(u); order_.insert({score_[u], u}); }
    void insert_cold(uint32_t u) override {
        score_[u] = kCold - double(++time_); // below every unit that was used; the latest first, as in the other policies
        order_.insert({score_[u], u});
    }
    void insert_ahead(uint32_t u) override {
        score_[u] = std::max(score_[u], double(time_) / half_life_ - 1e3); // a stranger goes before any unit that was used
        order_.insert({score_[u], u});
    }
    void touch(uint32_t u) override { order_.erase({score_[u], u}); use(u); order_.insert({score_[u], u}); }
    void erase(uint32_t u) override { order_.erase({score_[u], u}); }

    int64_t victim(const std::function<bool(uint32_t)> & allowed) const override {
        for (const auto & [score, u] : order_) {
            if (allowed(u)) {
                return u;
            }
        }
        return -1;
    }

    const char * name() const override { return "lfu"; }

private:
    void use(uint32_t u) {
        const double now = double(++time_) / half_life_;
        const double high = std::max(score_[u], now), low = std::min(score_[u], now);
        score_[u] = high + std::log2(1.0 + std::exp2(low - high));
    }

    static constexpr double kCold = -1e15;

    std::vector<double> score_;
    std::set<std::pair<double, uint32_t>> order_;
    double   half_life_;
    uint64_t time_ = 0;
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
        return std::make_unique<Lfu>(n_units, params.half_life > 0 ? params.half_life : 32.0 * std::max(1u, n_capacity));
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
