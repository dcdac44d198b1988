// A static hot set and LRU for the rest, as PowerInfer-2 keeps them: what is used most at first stays for good.
#include "policy.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace ls {

namespace {

// Uses for each unit of capacity before the hot set is chosen; until then all is LRU.
constexpr uint64_t kLearnUses = 32;

class HotCold final : public Policy {
public:
    HotCold(const PolicyParams & params, uint32_t n_units, uint32_t n_capacity)
        : n_hot_(uint32_t(params.hot_share * n_capacity)), learn_(kLearnUses * std::max(1u, n_capacity)), uses_(n_units, 0),
          hot_(n_units, false), resident_(n_units, false), cold_list_(make_policy("lru", {}, n_units, n_capacity)),
          hot_list_(make_policy("lru", {}, n_units, n_capacity)) {}

    void insert(uint32_t u) override { use(u); resident_[u] = true; list(u).insert(u); }
    void insert_cold(uint32_t u) override { resident_[u] = true; list(u).insert_cold(u); }
    void insert_ahead(uint32_t u) override { resident_[u] = true; list(u).insert(u); }
    void touch(uint32_t u) override { use(u); list(u).touch(u); }
    void erase(uint32_t u) override { resident_[u] = false; list(u).erase(u); }

    int64_t victim(const std::function<bool(uint32_t)> & allowed) const override {
        const int64_t u = cold_list_->victim(allowed);
        return u >= 0 ? u : hot_list_->victim(allowed);
    }

    const char * name() const override { return "hotcold"; }

private:
    Policy & list(uint32_t u) { return hot_[u] ? *hot_list_ : *cold_list_; }

    void use(uint32_t u) {
        uses_[u]++;
        if (learn_ > 0 && --learn_ == 0) {
            choose();
        }
    }

    void choose() {
        std::vector<uint32_t> order(uses_.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [this](uint32_t a, uint32_t b) { return uses_[a] > uses_[b]; });
        for (size_t i = 0; i < order.size() && i < n_hot_; ++i) {
            const uint32_t u = order[i];
            if (resident_[u]) {
                cold_list_->erase(u);
                hot_list_->insert(u);
            }
            hot_[u] = true;
        }
    }

    uint32_t n_hot_;
    uint64_t learn_;
    std::vector<uint32_t> uses_;
    std::vector<bool> hot_, resident_;
    std::unique_ptr<Policy> cold_list_, hot_list_;
};

} // namespace

std::unique_ptr<Policy> make_hotcold_policy(const PolicyParams & params, uint32_t n_units, uint32_t n_capacity) {
    return std::make_unique<HotCold>(params, n_units, n_capacity);
}

} // namespace ls
