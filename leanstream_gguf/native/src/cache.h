// Equal slots for streamed units under a limit in bytes: who is resident, who is pinned, who goes. No I/O and no locks.
#pragma once

#include "memory.h"
#include "policy.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace ls {

// Slots are of one size and lie side by side from the start of the address space, so that they can share large pages: reads
// into scattered small pages reach half the drive's rate (scripts/bench/LOG.md).
class SlotCache {
public:
    // slot_bytes: size of the largest unit, page-rounded if units are read in place. Reserves address space for all units.
    SlotCache(uint32_t n_units, uint64_t slot_bytes);

    void set_policy(std::unique_ptr<Policy> policy);
    const Policy & policy() const { return *policy_; }

    // Gives up units that no longer fit, the least useful first, and moves the others together; the memory beyond goes back
    // to the system. Only while nobody uses a unit's memory. False if pinned units alone are more (they stay).
    bool set_capacity(uint64_t n_bytes, std::vector<uint32_t> & evicted);
    uint64_t capacity_bytes() const { return n_slots_ * slot_bytes_; }
    uint64_t slot_bytes() const { return slot_bytes_; }
    uint64_t used_bytes() const { return n_resident_ * slot_bytes_; }
    uint32_t n_slots() const { return n_slots_; }
    uint32_t n_resident() const { return n_resident_; }
    uint32_t n_units() const { return uint32_t(slot_.size()); }

    uint8_t * base() const { return space_.base(); } // of the slots

    bool resident(uint32_t unit) const { return slot_[unit] >= 0; }
    // start of the unit's memory, page-aligned; valid while it is resident
    uint8_t * memory(uint32_t unit) const { return slot_memory(uint32_t(slot_[unit])); }

    // Give the unit a slot (not yet filled, not pinned). False if pinned units leave none. A unit that was given up for it is
    // appended to evicted. cold: for one pass only, first to go.
    bool admit(uint32_t unit, bool cold, std::vector<uint32_t> & evicted);
    // The same before its use: false if what would have to go is worth more, spared or pinned.
    bool admit_ahead(uint32_t unit, std::vector<uint32_t> & evicted);
    // not to be given up as long as others can be
    void spare(uint32_t unit, bool value) { spared_[unit] = value; }
    void next_round() { policy_->next_round(); }
    void ranked(uint32_t first, const float * margin, uint32_t n) { policy_->ranked(first, margin, n); }
    void predicted(uint32_t first, const float * p, uint32_t n) { policy_->predicted(first, p, n); }
    void touch(uint32_t unit) { policy_->touch(unit); }
    void evict(uint32_t unit);

    void pin(uint32_t unit) {
        if (pins_[unit]++ == 0) {
            n_pinned_++;
            policy_->hold(unit);
        }
    }
    void unpin(uint32_t unit) {
        if (--pins_[unit] == 0) {
            n_pinned_--;
            policy_->release(unit);
        }
    }
    bool pinned(uint32_t unit) const { return pins_[unit] > 0; }
    uint32_t n_pinned() const { return n_pinned_; }

private:
    uint8_t * slot_memory(uint32_t slot) const { return space_.base() + slot * slot_bytes_; }
    bool evict_one(std::vector<uint32_t> & evicted);
    void take_slot(uint32_t unit);
    void pack();

    uint64_t slot_bytes_;
    AddressSpace space_;
    std::vector<int32_t>  slot_;       // [unit] slot or -1
    std::vector<int32_t>  unit_;       // [slot] unit or -1
    std::vector<uint32_t> pins_;       // [unit]
    std::vector<uint8_t>  spared_;     // [unit]
    std::vector<uint32_t> free_slots_; // below n_slots_, the next one to use at the back
    std::unique_ptr<Policy> policy_;
    uint32_t n_slots_ = 0;
    uint32_t n_resident_ = 0;
    uint32_t n_pinned_ = 0;
};

} // namespace ls
