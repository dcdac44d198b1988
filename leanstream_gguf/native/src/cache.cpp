#include "cache.h"

#include <algorithm>
#include <cstring>

namespace ls {

SlotCache::SlotCache(uint32_t n_units, uint64_t slot_bytes)
    : slot_bytes_(slot_bytes), space_(slot_bytes * n_units), slot_(n_units, -1), unit_(n_units, -1), pins_(n_units, 0), spared_(n_units, 0),
      policy_(make_policy("lru", {}, n_units, n_units)) {}

void SlotCache::set_policy(std::unique_ptr<Policy> policy) {
    for (uint32_t u = 0; u < n_units(); ++u) {
        if (resident(u)) {
            policy->insert(u);
            if (pinned(u)) {
                policy->hold(u);
            }
        }
    }
    policy_ = std::move(policy);
}

bool SlotCache::set_capacity(uint64_t n_bytes, std::vector<uint32_t> & evicted) {
    const uint32_t wanted = slot_bytes_ ? uint32_t(std::min<uint64_t>(n_units(), n_bytes / slot_bytes_)) : 0;
    while (n_resident_ > wanted && evict_one(evicted)) {
    }
    n_slots_ = std::max(wanted, n_resident_);
    pack();
    space_.commit(space_.base(), n_slots_ * slot_bytes_);
    AddressSpace::prefer_large_pages(space_.base(), n_slots_ * slot_bytes_);
    uint8_t * const beyond = (uint8_t *) uintptr_t(page_ceil(uintptr_t(slot_memory(n_slots_))));
    AddressSpace::discard(beyond, size_t(space_.base() + space_.size() - beyond));
    return n_slots_ == wanted;
}

// Move units from beyond the last slot into free ones, and list the free ones anew.
void SlotCache::pack() {
    uint32_t free = 0;
    for (uint32_t s = n_slots_; s < n_units(); ++s) {
        if (unit_[s] < 0) {
            continue;
        }
        while (unit_[free] >= 0) {
            ++free;
        }
        space_.commit(slot_memory(free), slot_bytes_);
        memcpy(slot_memory(free), slot_memory(s), slot_bytes_);
        slot_[size_t(unit_[s])] = int32_t(free);
        std::swap(unit_[free], unit_[s]);
    }
    free_slots_.clear();
    for (uint32_t s = n_slots_; s-- > 0;) {
        if (unit_[s] < 0) {
            free_slots_.push_back(s);
        }
    }
}

bool SlotCache::evict_one(std::vector<uint32_t> & evicted) {
    int64_t u = policy_->victim([this](uint32_t v) { return pins_[v] == 0 && !spared_[v]; });
    if (u < 0) {
        u = policy_->victim([this](uint32_t v) { return pins_[v] == 0; });
    }
    if (u < 0) {
        return false;
    }
    evict(uint32_t(u));
    evicted.push_back(uint32_t(u));
    return true;
}

bool SlotCache::admit(uint32_t unit, bool cold, std::vector<uint32_t> & evicted) {
    if (free_slots_.empty() && !evict_one(evicted)) {
        return false;
    }
    take_slot(unit);
    if (cold) {
        policy_->insert_cold(unit);
    } else {
        policy_->insert(unit);
    }
    return true;
}

bool SlotCache::admit_ahead(uint32_t unit, std::vector<uint32_t> & evicted) {
    if (free_slots_.empty()) {
        const int64_t u = policy_->victim([this](uint32_t v) { return pins_[v] == 0 && !spared_[v]; });
        if (u < 0 || !policy_->worth_less(uint32_t(u), unit)) {
            return false;
        }
        evict(uint32_t(u));
        evicted.push_back(uint32_t(u));
    }
    take_slot(unit);
    policy_->insert_ahead(unit);
    return true;
}

void SlotCache::take_slot(uint32_t unit) {
    const uint32_t s = free_slots_.back();
    free_slots_.pop_back();
    slot_[unit] = int32_t(s);
    unit_[s] = int32_t(unit);
    n_resident_++;
}

void SlotCache::evict(uint32_t unit) {
    policy_->erase(unit);
    const uint32_t s = uint32_t(slot_[unit]);
    free_slots_.push_back(s);
    unit_[s] = -1;
    slot_[unit] = -1;
    n_resident_--;
}

} // namespace ls
