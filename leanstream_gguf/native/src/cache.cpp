#include "cache.h"

#include <algorithm>

namespace ls {

SlotCache::SlotCache(std::vector<uint64_t> unit_bytes)
    : unit_bytes_(std::move(unit_bytes)), slot_(unit_bytes_.size(), -1), pins_(unit_bytes_.size(), 0) {
    for (uint64_t b : unit_bytes_) {
        stride_ = std::max(stride_, b);
    }
    space_ = AddressSpace(stride_ * unit_bytes_.size());
    slot_touched_.assign(unit_bytes_.size(), 0);
    for (size_t i = unit_bytes_.size(); i-- > 0;) {
        free_slots_.push_back(uint32_t(i));
    }
    policy_ = make_policy("lru", {}, n_units(), n_units());
}

void SlotCache::set_policy(std::unique_ptr<Policy> policy) {
    for (uint32_t u = 0; u < n_units(); ++u) {
        if (resident(u)) {
            policy->insert(u);
        }
    }
    policy_ = std::move(policy);
}

bool SlotCache::set_capacity(uint64_t n_bytes) {
    capacity_bytes_ = n_bytes;
    std::vector<uint32_t> evicted;
    const bool fits = make_room(0, evicted);
    trim_free_slots();
    return fits;
}

void SlotCache::trim_free_slots() {
    for (size_t i = 0; i < free_slots_.size() && held_bytes_ > capacity_bytes_; ++i) {
        const uint32_t s = free_slots_[i];
        AddressSpace::discard(space_.base() + s * stride_, slot_touched_[s]);
        held_bytes_ -= slot_touched_[s];
        slot_touched_[s] = 0;
    }
}

bool SlotCache::make_room(uint64_t n_bytes, std::vector<uint32_t> & evicted) {
    while (used_bytes_ + n_bytes > capacity_bytes_) {
        const int64_t u = policy_->victim([this](uint32_t v) { return pins_[v] == 0; });
        if (u < 0) {
            return false;
        }
        evict(uint32_t(u));
        evicted.push_back(uint32_t(u));
    }
    return true;
}

bool SlotCache::admit(uint32_t unit, bool cold, std::vector<uint32_t> & evicted) {
    if (pinned_bytes_ + unit_bytes_[unit] > capacity_bytes_ || !make_room(unit_bytes_[unit], evicted)) {
        return false;
    }
    const uint32_t s = free_slots_.back();
    free_slots_.pop_back();
    uint8_t * memory = space_.base() + s * stride_;
    space_.commit(memory, unit_bytes_[unit]);
    if (slot_touched_[s] > unit_bytes_[unit]) { // a larger unit was here: its tail goes back to the system
        AddressSpace::discard(memory + unit_bytes_[unit], slot_touched_[s] - unit_bytes_[unit]);
    }
    held_bytes_ = held_bytes_ - slot_touched_[s] + unit_bytes_[unit];
    slot_touched_[s] = unit_bytes_[unit];
    slot_[unit] = int32_t(s);
    used_bytes_ += unit_bytes_[unit];
    n_resident_++;
    trim_free_slots();
    if (cold) {
        policy_->insert_cold(unit);
    } else {
        policy_->insert(unit);
    }
    return true;
}

void SlotCache::evict(uint32_t unit) {
    policy_->erase(unit);
    free_slots_.push_back(uint32_t(slot_[unit]));
    slot_[unit] = -1;
    used_bytes_ -= unit_bytes_[unit];
    n_resident_--;
}

} // namespace ls
