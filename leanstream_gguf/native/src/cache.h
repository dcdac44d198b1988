// Slots for streamed units under a limit in bytes: who is resident, who is pinned, who goes. No I/O and no locks.
#pragma once

#include "memory.h"
#include "policy.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace ls {

class SlotCache {
public:
    // unit_bytes: page-rounded size of each unit. Reserves address space for as many slots as could ever be used.
    explicit SlotCache(std::vector<uint64_t> unit_bytes);

    void set_policy(std::unique_ptr<Policy> policy);
    const Policy & policy() const { return *policy_; }

    // Evicts unpinned units until the rest fits. False if pinned units alone are larger (the limit is set all the same).
    bool set_capacity(uint64_t n_bytes);
    uint64_t capacity_bytes() const { return capacity_bytes_; }
    uint64_t used_bytes() const { return used_bytes_; }
    uint32_t n_resident() const { return n_resident_; }
    uint32_t n_units() const { return uint32_t(unit_bytes_.size()); }
    uint64_t unit_bytes(uint32_t unit) const { return unit_bytes_[unit]; }

    bool resident(uint32_t unit) const { return slot_[unit] >= 0; }
    // start of the unit's memory, page-aligned; valid while it is resident
    uint8_t * memory(uint32_t unit) const { return space_.base() + uint64_t(slot_[unit]) * stride_; }

    // Make room and give the unit a slot (not yet filled, not pinned). False if pinned units leave no room.
    // Units that were given up are appended to evicted. cold: for one pass only, first to go.
    bool admit(uint32_t unit, bool cold, std::vector<uint32_t> & evicted);
    void touch(uint32_t unit) { policy_->touch(unit); }
    void evict(uint32_t unit);

    void pin(uint32_t unit)   { if (pins_[unit]++ == 0) { pinned_bytes_ += unit_bytes_[unit]; } }
    void unpin(uint32_t unit) { if (--pins_[unit] == 0) { pinned_bytes_ -= unit_bytes_[unit]; } }
    bool pinned(uint32_t unit) const { return pins_[unit] > 0; }
    uint64_t pinned_bytes() const { return pinned_bytes_; }

    // memory that slots hold now, given-up units included; never above capacity_bytes() after a call that changes it
    uint64_t held_bytes() const { return held_bytes_; }

private:
    bool make_room(uint64_t n_bytes, std::vector<uint32_t> & evicted);
    void trim_free_slots();

    std::vector<uint64_t> unit_bytes_;
    uint64_t stride_ = 0;
    AddressSpace space_;
    std::vector<int32_t>  slot_;       // [unit] slot or -1
    std::vector<uint32_t> pins_;       // [unit]
    std::vector<uint32_t> free_slots_;
    std::vector<uint64_t> slot_touched_; // [slot] bytes from its start that hold memory
    std::unique_ptr<Policy> policy_;
    uint64_t capacity_bytes_ = 0;
    uint64_t held_bytes_ = 0;
    uint64_t used_bytes_ = 0;
    uint64_t pinned_bytes_ = 0;
    uint32_t n_resident_ = 0;
};

} // namespace ls
