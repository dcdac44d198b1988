// Dense groups: pinned ones live at their own address, the others pass through ring slots in graph order.
#include "engine.h"
#include "spin_pause.h"

#include <algorithm>
#include <chrono>

namespace ls {

// groups after `from` in graph order until `to` comes round
uint32_t Engine::distance(uint32_t from, uint32_t to) const {
    const uint32_t n = uint32_t(weights.groups.size());
    return (to + n - from) % n;
}

void Engine::apply_dense_locked(const Plan & plan, std::vector<std::vector<ReadRequest>> & loads) {
    const uint32_t n = uint32_t(weights.groups.size());
    const uint64_t slot_bytes = weights.largest_group_bytes();

    // what was streamed has to be read again: ring slots move
    for (uint32_t g = 0; g < n; ++g) {
        const bool stays = group_pinned_[g] && plan.pinned[g];
        if (stays && Load(group_state_[g].load()) == Load::ready) {
            continue;
        }
        if (device_ && device_->group_resident(weights.groups[g])) { // nothing of it is held here
            group_pinned_[g] = true;
            continue;
        }
        if (group_pinned_[g] && !plan.pinned[g]) {
            for (const Weight * w : weights.groups[g].members) {
                AddressSpace::discard((uint8_t *) uintptr_t(page_floor(uintptr_t(w->home))), home_bytes(w->entry->n_bytes));
            }
        }
        group_state_[g].store(uint8_t(Load::absent));
        pinned_ready_[g].store(false);
        group_slot_[g] = -1;
        group_pinned_[g] = plan.pinned[g];
    }
    streams_dense_.store(plan.streams_dense());
    ring_.slots.assign(plan.n_ring_slots, {});
    ring_.space = AddressSpace();
    if (plan.n_ring_slots) {
        ring_.space = AddressSpace(plan.n_ring_slots * slot_bytes);
        ring_.space.commit(ring_.space.base(), plan.n_ring_slots * slot_bytes);
        AddressSpace::prefer_large_pages(ring_.space.base(), plan.n_ring_slots * slot_bytes);
        AddressSpace::populate(ring_.space.base(), plan.n_ring_slots * slot_bytes);
    }
    // next streamed group for each position, walking backwards over two rounds
    uint32_t next = n;
    for (uint32_t i = 2 * n; i-- > 0;) {
        const uint32_t g = i % n;
        next_streamed_[g] = next;
        next = plan.pinned[g] ? next : g;
    }
    prefer_large_pages_locked(plan);
    for (uint32_t g = 0; g < n; ++g) {
        const bool elsewhere = device_ && device_->group_resident(weights.groups[g]);
        if (plan.pinned[g] && !elsewhere && Load(group_state_[g].load()) == Load::absent) {
            loads.push_back(start_group_locked(g, Priority::load));
        }
    }
    if (plan.streams_dense()) {
        readahead_locked(n - 1); // the first groups of the first token
    }
}

// Neighbours in memory that are filled together get large pages across their borders.
void Engine::prefer_large_pages_locked(const Plan & plan) {
    std::vector<std::pair<uint8_t *, uint64_t>> ranges;
    for (const Weight & w : weights.all()) {
        const bool elsewhere = w.on_device && (w.use != Use::dense || device_->group_resident(weights.groups[size_t(w.group)]));
        if (!elsewhere && (w.use == Use::resident || (w.use == Use::dense && plan.pinned[size_t(w.group)]))) {
            ranges.push_back({(uint8_t *) uintptr_t(page_floor(uintptr_t(w.home))), home_bytes(w.entry->n_bytes)});
        }
    }
    std::sort(ranges.begin(), ranges.end());
    for (size_t i = 0; i < ranges.size();) {
        uint8_t * begin = ranges[i].first;
        uint8_t * end = begin;
        for (; i < ranges.size() && (ranges[i].first == end || end == begin); ++i) {
            end = ranges[i].first + ranges[i].second;
        }
        AddressSpace::prefer_large_pages(begin, size_t(end - begin));
    }
}

// Where the group's member i lies in the slot, or at home for slot -1.
uint8_t * Engine::member_memory(uint32_t g, int32_t slot, size_t i) const {
    const DenseGroup & group = weights.groups[g];
    const Weight & w = *group.members[i];
    return slot < 0 ? w.home
                    : ring_.space.base() + uint64_t(slot) * weights.largest_group_bytes() + group.slot_offset[i] + w.entry->offset % page_size();
}

void Engine::place_group(uint32_t g, int32_t slot) {
    group_zeroed_[g] = false;
    for (size_t i = 0; i < weights.groups[g].members.size(); ++i) {
        weights.groups[g].members[i]->tensor->data = member_memory(g, slot, i);
    }
}

std::vector<ReadRequest> Engine::start_group_locked(uint32_t g, Priority priority) {
    if (!zeros_in_use_locked(g)) { // else acquire_group() places it
        place_group(g, group_slot_[g]);
    }
    std::vector<ReadRequest> requests;
    const std::vector<Weight *> & members = weights.groups[g].members;
    for (size_t i = 0; i < members.size(); ++i) {
        const IndexEntry & e = *members[i]->entry;
        add_requests(requests, *devices_[e.shard], e.offset, e.n_bytes, member_memory(g, group_slot_[g], i), options_.chunk_bytes, priority,
            tag(kGroup, g));
        stats_.needed_bytes += e.n_bytes;
    }
    group_pending_[g] = uint32_t(requests.size());
    group_state_[g].store(uint8_t(Load::loading));
    return requests;
}

void Engine::submit_group_locked(uint32_t g, Priority priority) {
    scheduler_->submit(start_group_locked(g, priority));
}

// A slot for group g while the graph is at `from`: an empty one, or the one whose group is needed last. Read-ahead takes
// only slots that have been used and whose group comes later than g; demand takes any that nobody holds.
int32_t Engine::slot_for_locked(uint32_t g, uint32_t from, bool demand) const {
    int32_t best = -1;
    uint32_t best_distance = 0;
    for (size_t s = 0; s < ring_.slots.size(); ++s) {
        const Ring::Slot & slot = ring_.slots[s];
        if (slot.group < 0) {
            return int32_t(s);
        }
        const uint32_t held = uint32_t(slot.group);
        if (group_pins_[held] > 0 || group_pending_[held] > 0) {
            continue;
        }
        // a used group comes round after a whole token
        const uint32_t d = distance(from, held) + (slot.consumed ? uint32_t(weights.groups.size()) : 0);
        const bool allowed = demand || (slot.consumed && distance(from, held) + weights.groups.size() > distance(from, g));
        if (allowed && (best < 0 || d > best_distance)) {
            best = int32_t(s);
            best_distance = d;
        }
    }
    return best;
}

void Engine::give_slot_locked(uint32_t g, int32_t slot) {
    Ring::Slot & s = ring_.slots[size_t(slot)];
    if (s.group >= 0) {
        group_state_[size_t(s.group)].store(uint8_t(Load::absent));
        group_slot_[size_t(s.group)] = -1;
    }
    s.group = int32_t(g);
    s.consumed = false;
    group_slot_[g] = slot;
}

void Engine::readahead_locked(uint32_t from) {
    uint32_t g = next_streamed_[from];
    for (size_t i = 0; i < ring_.slots.size() && g != from; ++i, g = next_streamed_[g]) {
        if (group_slot_[g] >= 0) {
            continue; // there, or on its way
        }
        const int32_t slot = slot_for_locked(g, from, false);
        if (slot < 0) {
            return;
        }
        give_slot_locked(g, slot);
        submit_group_locked(g, Priority::readahead);
    }
}

// A graph goes on after a failed read, and what it computes reaches the KV cache before the micro-batch is removed: it must be
// finite. Never-written memory reads as zeros and costs nothing. A group that another context uses is in memory, or zeros already.
void Engine::use_zeros_locked(Session & session, uint32_t g) {
    if (group_pins_[g] == 0) {
        group_zeroed_[g] = true;
        const DenseGroup & group = weights.groups[g];
        for (size_t i = 0; i < group.members.size(); ++i) {
            group.members[i]->tensor->data = zeros_.base() + group.slot_offset[i] + group.members[i]->entry->offset % page_size();
        }
    }
    hold_group_locked(session, g);
}

void Engine::hold_group_locked(Session & session, uint32_t g) {
    group_pins_[g]++;
    session.held_groups.push_back(g);
}

void Engine::acquire_group(Session & session, uint32_t g) {
    Lock lock(mutex_);
    bool waited = false;
    bool asked = false;
    while (zeros_in_use_locked(g) || Load(group_state_[g].load(std::memory_order_acquire)) != Load::ready) {
        const Load state = Load(group_state_[g].load());
        if (state == Load::failed && asked && group_pending_[g] == 0) {
            fail(session, read_error_);
            group_state_[g].store(uint8_t(Load::absent)); // the next use tries again
            changed_.notify_all();
        }
        if (session.failed.load()) {
            use_zeros_locked(session, g);
            return;
        }
        if (state != Load::loading && state != Load::ready && group_pending_[g] == 0) {
            const int32_t slot = group_pinned_[g] || group_slot_[g] >= 0 ? group_slot_[g] : slot_for_locked(g, g, true);
            if (group_pinned_[g] || slot >= 0) {
                if (!group_pinned_[g] && group_slot_[g] < 0) {
                    give_slot_locked(g, slot);
                }
                submit_group_locked(g, Priority::demand);
                asked = true;
                continue;
            }
        } else if (!asked) {
            scheduler_->promote(tag(kGroup, g), Priority::demand);
            asked = true;
        }
        waited = true;
        wait_locked(lock, true);
    }
    if (group_zeroed_[g]) { // left so by a context that failed
        place_group(g, group_slot_[g]);
        pinned_ready_[g].store(group_pinned_[g], std::memory_order_release);
    }
    (waited ? stats_.dense_waits : stats_.dense_hits)++;
    hold_group_locked(session, g);
    if (plan_.streams_dense()) {
        readahead_locked(g);
    }
}

void Engine::release_group(Session & session, uint32_t g) {
    Lock lock(mutex_);
    const auto it = std::find(session.held_groups.begin(), session.held_groups.end(), g);
    if (it == session.held_groups.end()) {
        return;
    }
    session.held_groups.erase(it);
    group_pins_[g]--;
    if (group_slot_[g] >= 0) {
        ring_.slots[size_t(group_slot_[g])].consumed = true;
    }
    if (n_active_ > 1) {
        changed_.notify_all(); // another context may wait for this slot
    }
}

void Engine::publish_acquired(Session & session, const ggml_tensor * node) {
    {
        Lock lock(mutex_); // so that a thread about to sleep cannot miss it
        session.acquired.store(node, std::memory_order_release);
    }
    changed_.notify_all();
}

void Engine::wait_acquired(Session & session, const ggml_tensor * node, uint32_t g) {
    const auto done = [&] {
        return session.acquired.load(std::memory_order_acquire) == node || group_is_pinned_ready(g) || session.failed.load();
    };
    // most groups are ready: thread 0 is through in a few microseconds
    for (int i = 0; i < 2000; ++i) {
        if (done()) {
            return;
        }
        spin_pause();
    }
    Lock lock(mutex_);
    changed_.wait(lock, done);
}

bool Engine::read_now(uint32_t shard, uint64_t offset, uint64_t n_bytes, uint8_t * dest) {
    const uint64_t begin = page_floor(offset);
    AddressSpace staging(page_ceil(offset + n_bytes) - begin);
    staging.commit(staging.base(), staging.size());
    const int64_t n = devices_[shard]->read(begin, staging.base(), staging.size());
    if (n < int64_t(offset - begin + n_bytes)) {
        return false;
    }
    std::copy_n(staging.base() + (offset - begin), n_bytes, dest);
    return true;
}

bool Engine::read_rows(Session & session, const Weight & weight, const int32_t * rows, size_t n_rows, uint8_t * dest) {
    const uint64_t row_bytes = weight.tensor->nb[1];
    for (size_t i = 0; i < n_rows && weight.in_memory; ++i) {
        std::copy_n(weight.home + uint64_t(rows[i]) * row_bytes, row_bytes, dest + i * row_bytes);
    }
    if (weight.in_memory) {
        return true;
    }
    const uint64_t span = page_ceil(row_bytes + page_size());
    constexpr size_t kBatch = 32;
    AddressSpace staging(span * std::min(n_rows, kBatch));
    staging.commit(staging.base(), staging.size());
    for (size_t first = 0; first < n_rows; first += kBatch) {
        const size_t n = std::min(kBatch, n_rows - first);
        RowBatch batch;
        std::vector<ReadRequest> requests;
        std::vector<uint8_t *> at(n);
        for (size_t i = 0; i < n; ++i) {
            const uint64_t offset = weight.entry->offset + uint64_t(rows[first + i]) * row_bytes;
            at[i] = staging.base() + i * span + offset % page_size();
            add_requests(requests, *devices_[weight.entry->shard], offset, row_bytes, at[i], options_.chunk_bytes, Priority::demand,
                uint64_t(uintptr_t(&batch)) | kRows);
        }
        batch.n_pending = uint32_t(requests.size());
        {
            Lock lock(mutex_);
            stats_.needed_bytes += n * row_bytes;
            scheduler_->submit(requests);
            while (batch.n_pending > 0) {
                wait_locked(lock, true);
            }
            if (batch.error) {
                fail(session, read_error_);
                return false;
            }
        }
        for (size_t i = 0; i < n; ++i) {
            std::copy(at[i], at[i] + row_bytes, dest + (first + i) * row_bytes);
        }
    }
    return true;
}

} // namespace ls
