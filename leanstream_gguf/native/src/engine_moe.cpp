// Experts: cached by unit (one expert of one layer), loaded by part (gate, up, down).
#include "engine.h"

#include "awaited_experts.h"
#include "crc32c.h"

#include <algorithm>

namespace ls {

namespace {

// Experts that a wave has in hand: enough reads to fill the drive, few enough to leave the cache's regulars alone.
constexpr uint32_t kWaveAhead = 12;

// A batch with this many rows for each expert uses nearly all of them: a pass, not a preference.
constexpr size_t kPassRows = 8;

bool is_pass(const MoeRun & run, const MoeLayer & layer) {
    return run.rows.size() >= kPassRows * layer.n_experts;
}

} // namespace

void Engine::drop_parts_locked(uint32_t unit) {
    for (uint32_t p = 0; p < MoeLayer::kMaxParts; ++p) {
        n_parts_missing_ += Load(part_state(unit, p).exchange(uint8_t(Load::absent))) == Load::ready;
    }
}

// With a cache that holds every expert, runs need no lock, no pins and no policy.
void Engine::update_all_ready_locked() {
    experts_ready_.store(n_parts_missing_ == 0 && plan_.cache_bytes >= plan_.experts_bytes && activated_);
}

bool Engine::whole_unit_locked(uint32_t unit, uint32_t n_parts) const {
    if (!cache_->resident(unit)) {
        return false;
    }
    for (uint32_t p = 0; p < n_parts; ++p) {
        if (Load(part_state(unit, p).load()) != Load::ready) {
            return false;
        }
    }
    return true;
}

bool Engine::admit_locked(uint32_t unit, bool cold) {
    std::vector<uint32_t> evicted;
    const bool ok = cache_->admit(unit, cold, evicted);
    note_evicted_locked(evicted);
    return ok;
}

void Engine::start_part_locked(uint32_t layer, uint32_t expert, uint32_t part, Priority priority, std::vector<ReadRequest> & out,
                               bool alone) {
    const MoeLayer & l = weights.moe_layers[layer];
    const uint32_t unit = l.first_unit + expert;
    const uint64_t id = uint64_t(unit) * MoeLayer::kMaxParts + part;
    if (l.bundle && (!alone || !record_verified_[unit]) && start_record_locked(layer, expert, priority, out)) {
        return;
    }
    if (part_pending_[id] > 0) {
        if (priority == Priority::demand) {
            scheduler_->promote(tag(kPart, id), priority); // read ahead, and needed now
        }
        return;
    }
    if (Load(part_state_[id].load()) == Load::ready) {
        return;
    }
    const size_t before = out.size();
    add_requests(out, *devices_[l.parts[part]->entry->shard], l.file_offset(part, expert), l.part_bytes(part),
        cache_->memory(unit) + l.slot_offset(part, expert), options_.chunk_bytes, priority, tag(kPart, id));
    part_pending_[id] = uint32_t(out.size() - before);
    part_state_[id].store(uint8_t(Load::loading));
    stats_.needed_bytes += l.part_bytes(part);
    cache_->pin(unit); // until the read is done
}

// One read for all parts of an expert. False: some of it is there or on its way, part by part.
bool Engine::start_record_locked(uint32_t layer, uint32_t expert, Priority priority, std::vector<ReadRequest> & out) {
    const MoeLayer & l = weights.moe_layers[layer];
    const uint32_t unit = l.first_unit + expert;
    if (record_pending_[unit] > 0) {
        if (priority == Priority::demand) {
            scheduler_->promote(tag(kRecord, unit), priority);
        }
        return true;
    }
    for (uint32_t p = 0; p < l.parts.size(); ++p) {
        const Load state = Load(part_state(unit, p).load());
        if (state == Load::ready || state == Load::loading) {
            return false;
        }
    }
    const size_t before = out.size();
    add_requests(out, *devices_[l.bundle->shard], l.record_offset(expert), l.record_bytes(), cache_->memory(unit) +
        l.record_offset(expert) % page_size(), options_.chunk_bytes, priority, tag(kRecord, unit));
    record_pending_[unit] = uint32_t(out.size() - before);
    for (uint32_t p = 0; p < l.parts.size(); ++p) {
        part_state(unit, p).store(uint8_t(Load::loading));
    }
    stats_.needed_bytes += l.record_bytes();
    cache_->pin(unit); // until the read is done
    return true;
}

void Engine::load_expert_checksums() {
    expert_checksums_.assign(layer_of_unit_.size(), 0);
    for (const MoeLayer & l : weights.moe_layers) {
        const IndexEntry * e = l.checksums;
        if (e && (e->n_bytes != l.n_experts * sizeof(uint32_t) ||
                  !read_now(e->shard, e->offset, e->n_bytes, (uint8_t *) &expert_checksums_[l.first_unit]))) {
            const std::string & path = index_.shards[e->shard].path;
            throw Error(LS_ERR_FORMAT, format("%s: '%s' is damaged; copy the file again or repack the model", path.c_str(), e->name.c_str()))
                .path(path);
        }
    }
}

Error Engine::corrupt_expert(uint32_t unit) const {
    const MoeLayer & l = weights.moe_layers[layer_of_unit_[unit]];
    const uint32_t expert = unit - l.first_unit;
    const std::string & path = index_.shards[l.bundle->shard].path;
    return Error(LS_ERR_FORMAT, format("%s: expert %u of layer %d is corrupt (its checksum is wrong); copy the file again or repack the "
        "model, and check the disk", path.c_str(), expert, l.block)).path(path).offset(l.record_offset(expert));
}

bool Engine::record_read(const ReadRequest & request, int error) {
    const uint32_t unit = uint32_t(request.tag >> 3);
    Lock lock(mutex_);
    const MoeLayer & l = weights.moe_layers[layer_of_unit_[unit]];
    const uint32_t expert = unit - l.first_unit;
    if (error) {
        record_read_error(request, error);
        for (uint32_t p = 0; p < l.parts.size(); ++p) {
            part_state(unit, p).store(uint8_t(Load::failed));
        }
    }
    if (record_pending_[unit] > 1) {
        record_pending_[unit]--;
        return false;
    }
    if (Load(part_state(unit, 0).load()) == Load::loading && !record_verified_[unit] && l.checksums) {
        const uint8_t * record = cache_->memory(unit) + l.record_offset(expert) % page_size();
        lock.unlock(); // pinned and marked as loading: nobody else touches it
        const bool right = crc32c(record, l.record_bytes()) == expert_checksums_[unit];
        lock.lock();
        record_verified_[unit] = right;
        if (!right) {
            read_error_ = corrupt_expert(unit).info;
        }
        for (uint32_t p = 0; p < l.parts.size() && !right; ++p) {
            part_state(unit, p).store(uint8_t(Load::failed));
        }
    }
    record_pending_[unit] = 0;
    for (uint32_t p = 0; p < l.parts.size(); ++p) {
        uint8_t loading = uint8_t(Load::loading);
        if (part_state(unit, p).compare_exchange_strong(loading, uint8_t(Load::ready)) && --n_parts_missing_ == 0) {
            update_all_ready_locked();
        }
    }
    cache_->unpin(unit);
    return true;
}

// All or nothing: a run that holds some experts never waits for others, so contexts cannot block each other.
bool Engine::pin_run_locked(MoeRun & run) {
    const MoeLayer & l = weights.moe_layers[run.layer];
    if (run.experts.size() > cache_->n_slots()) {
        return false;
    }
    const uint32_t n_parts = uint32_t(l.parts.size());
    const auto missing = std::stable_partition(run.experts.begin(), run.experts.end(), [&](int32_t e) {
        return whole_unit_locked(l.first_unit + uint32_t(e), n_parts);
    });
    run.n_here = uint32_t(run.may_await && run.rows.size() == run.experts.size() ? missing - run.experts.begin()
                                                                                 : run.experts.end() - run.experts.begin());
    run.pinned.assign(run.experts.size(), 0);
    for (size_t k = 0; k < run.experts.size(); ++k) { // first what is there, so that admission cannot evict it
        const uint32_t unit = l.first_unit + uint32_t(run.experts[k]);
        if (cache_->resident(unit)) {
            cache_->pin(unit);
            run.pinned[k] = 1;
        }
    }
    for (size_t k = 0; k < run.experts.size(); ++k) {
        const uint32_t unit = l.first_unit + uint32_t(run.experts[k]);
        if (!run.pinned[k]) {
            if (!admit_locked(unit, is_pass(run, l))) {
                return false;
            }
            cache_->pin(unit);
            run.pinned[k] = 1;
        }
    }
    return true;
}

void Engine::unpin_run_locked(MoeRun & run) {
    if (!run.active) {
        return;
    }
    const MoeLayer & l = weights.moe_layers[run.layer];
    for (size_t k = 0; k < run.pinned.size(); ++k) {
        if (run.pinned[k]) {
            cache_->unpin(l.first_unit + uint32_t(run.experts[k]));
            run.pinned[k] = 0;
        }
    }
    run.active = false;
}

void Engine::moe_begin(Session & session, MoeRun & run, const float * logits) {
    if (experts_ready_.load(std::memory_order_acquire) && !spec_.tracing.load(std::memory_order_relaxed)) {
        run.active = run.wave = false;
        ready_hits_.fetch_add(run.experts.size(), std::memory_order_relaxed);
        return;
    }
    Lock lock(mutex_);
    const MoeLayer & l = weights.moe_layers[run.layer];
    const uint32_t n_parts = uint32_t(l.parts.size());
    unpin_run_locked(run);
    run.active = true;
    run.wave = false;
    run.wave_part = -1;
    run.pinned.clear();
    if (session.failed.load()) {
        return;
    }
    chosen_locked(session, run, logits, is_pass(run, l));
    for (int32_t e : run.experts) {
        const uint32_t unit = l.first_unit + uint32_t(e);
        const bool hit = whole_unit_locked(unit, n_parts);
        (hit ? stats_.hits : stats_.misses)++;
        if (!is_pass(run, l) && cache_->resident(unit)) { // a pass says nothing about what will be used again
            cache_->touch(unit);
        }
    }
    if (!pin_run_locked(run)) {
        unpin_run_locked(run);
        run.active = true;
        run.wave = true;
        run.n_here = uint32_t(run.experts.size());
        run.pinned.assign(run.experts.size(), 0);
        stats_.n_waves++;
        return;
    }
    std::vector<ReadRequest> requests;
    const uint32_t n = uint32_t(run.experts.size());
    for (uint32_t i = 0; i < n * n_parts; ++i) { // awaited experts come one by one, others part by part
        const uint32_t k = run.awaits() ? i / n_parts : i % n, part = run.awaits() ? i % n_parts : i / n;
        start_part_locked(run.layer, uint32_t(run.experts[k]), part, Priority::demand, requests);
    }
    scheduler_->submit(requests);
    if (run.awaits()) {
        session.awaited_scratch.resize((n - run.n_here) * awaited_bytes(l));
    }
    read_ahead_batch_locked(run);
}

// A batch of many tokens uses nearly every expert of every layer: the next layer's first products need not wait for its
// routing. Only the first part is read ahead, into room that nobody uses or that was read for one pass.
void Engine::read_ahead_batch_locked(const MoeRun & run) {
    const uint32_t next = run.layer + 1;
    if (next >= weights.moe_layers.size() || !is_pass(run, weights.moe_layers[next])) {
        return;
    }
    const MoeLayer & l = weights.moe_layers[next];
    std::vector<ReadRequest> requests;
    for (uint32_t e = 0; e < l.n_experts; ++e) {
        const uint32_t unit = l.first_unit + e;
        if (!cache_->resident(unit) && !admit_locked(unit, true)) {
            break;
        }
        start_part_locked(next, e, 0, Priority::readahead, requests);
    }
    scheduler_->submit(requests);
}

void Engine::moe_end(MoeRun & run) {
    if (!run.active) {
        return;
    }
    Lock lock(mutex_);
    unpin_run_locked(run);
    if (n_active_ > 1) {
        changed_.notify_all();
    }
}

void Engine::wave_enter(MoeRun & run, uint32_t part) {
    Lock lock(mutex_);
    if (run.wave_part == int32_t(part)) {
        return;
    }
    run.wave_part = int32_t(part);
    run.wave_next = 0;
    run.wave_in_hand = 0;
    // what this product can use at once comes first; counters are indexed by position, so they start afresh with it
    const MoeLayer & l = weights.moe_layers[run.layer];
    std::stable_partition(run.experts.begin(), run.experts.end(), [&](int32_t e) {
        const uint32_t unit = l.first_unit + uint32_t(e);
        return cache_->resident(unit) && Load(part_state(unit, part).load()) == Load::ready;
    });
    for (size_t k = 0; k < run.experts.size(); ++k) {
        run.assigned[k].store(0);
    }
    pump_wave_locked(run);
}

// Give the next experts slots and start their reads, as far as slots go.
void Engine::pump_wave_locked(MoeRun & run) {
    const MoeLayer & l = weights.moe_layers[run.layer];
    std::vector<ReadRequest> requests;
    bool moved = false;
    while (run.wave_next < run.experts.size() && run.wave_in_hand < kWaveAhead) {
        const uint32_t k = run.wave_next;
        const uint32_t expert = uint32_t(run.experts[k]);
        const uint32_t unit = l.first_unit + expert;
        if (!cache_->resident(unit) && !admit_locked(unit, true)) {
            break;
        }
        cache_->pin(unit);
        run.pinned[k] = 1;
        start_part_locked(run.layer, expert, uint32_t(run.wave_part), Priority::demand, requests, true);
        run.assigned[k].store(1, std::memory_order_release);
        run.wave_next++;
        run.wave_in_hand++;
        moved = true;
    }
    scheduler_->submit(requests);
    if (moved) {
        changed_.notify_all();
    }
}

void Engine::wave_computed(MoeRun & run, uint32_t part, uint32_t k) {
    if (run.threads_left[part * run.experts.size() + k].fetch_sub(1) != 1) {
        return; // other threads still read this expert
    }
    Lock lock(mutex_);
    cache_->unpin(weights.moe_layers[run.layer].first_unit + uint32_t(run.experts[k]));
    run.pinned[k] = 0;
    run.wave_in_hand--;
    pump_wave_locked(run);
    if (n_active_ > 1) {
        changed_.notify_all();
    }
}

bool Engine::part_settled(const MoeRun & run, uint32_t part, uint32_t k) const {
    if (run.wave && run.assigned[k].load(std::memory_order_acquire) == 0) {
        return false;
    }
    const uint32_t unit = weights.moe_layers[run.layer].first_unit + uint32_t(run.experts[k]);
    const Load state = Load(part_state(unit, part).load(std::memory_order_acquire));
    return state == Load::ready || state == Load::failed;
}

bool Engine::expert_settled(const MoeRun & run, uint32_t k) const {
    const uint32_t n_parts = uint32_t(weights.moe_layers[run.layer].parts.size());
    for (uint32_t part = 0; part < n_parts; ++part) {
        if (!part_settled(run, part, k)) {
            return false;
        }
    }
    return true;
}

void Engine::wait_part(Session & session, MoeRun & run, int32_t part, const std::vector<uint32_t> & pending, bool count_stall) {
    Lock lock(mutex_);
    for (;;) {
        if (session.failed.load()) {
            return;
        }
        for (uint32_t k : pending) {
            if (part < 0 ? expert_settled(run, k) : part_settled(run, uint32_t(part), k)) {
                return;
            }
        }
        if (run.wave) {
            pump_wave_locked(run); // another context may have left room
        }
        wait_locked(lock, count_stall);
    }
}

const uint8_t * Engine::part_data(Session & session, const MoeRun & run, uint32_t part, uint32_t k) {
    const MoeLayer & l = weights.moe_layers[run.layer];
    const uint32_t expert = uint32_t(run.experts[k]);
    const uint32_t unit = l.first_unit + expert;
    if (Load(part_state(unit, part).load(std::memory_order_acquire)) != Load::ready) {
        Lock lock(mutex_);
        fail(session, read_error_);
        changed_.notify_all();
        return nullptr;
    }
    return cache_->memory(unit) + l.slot_offset(part, expert);
}

void Engine::pin_experts(int32_t block, const int32_t * ids, size_t n_ids) {
    Lock lock(mutex_);
    if (!activated_) {
        throw Error(LS_ERR_STATE, "the model is not activated yet");
    }
    wait_reconfigured_locked(lock);
    const auto layer = std::find_if(weights.moe_layers.begin(), weights.moe_layers.end(), [&](const MoeLayer & l) { return l.block == block; });
    if (layer == weights.moe_layers.end()) {
        throw Error(LS_ERR_ARGUMENT, format("layer %d has no experts that stream", block));
    }
    std::vector<bool> kept = kept_;
    std::fill_n(kept.begin() + layer->first_unit, layer->n_experts, false);
    for (size_t i = 0; i < n_ids; ++i) {
        if (ids[i] < 0 || uint32_t(ids[i]) >= layer->n_experts) {
            throw Error(LS_ERR_ARGUMENT, format("layer %d has experts 0 to %u; %d is none of them", block, layer->n_experts - 1, ids[i]));
        }
        kept[layer->first_unit + uint32_t(ids[i])] = true;
    }
    check_kept_locked(kept, plan_);
    std::vector<ReadRequest> requests;
    bool room = true;
    for (uint32_t u = layer->first_unit; u < layer->first_unit + layer->n_experts; ++u) {
        if (kept_[u] && !kept[u]) {
            cache_->unpin(u);
        } else if (kept[u] && !kept_[u]) {
            room = room && (cache_->resident(u) || admit_locked(u, false));
            if (!room) {
                continue;
            }
            cache_->pin(u);
            for (uint32_t p = 0; p < layer->parts.size(); ++p) {
                start_part_locked(uint32_t(layer - weights.moe_layers.begin()), u - layer->first_unit, p, Priority::demand, requests);
            }
        }
        kept_[u] = kept[u];
    }
    scheduler_->submit(requests); // also when the rest found no room: somebody may wait for these parts by now
    if (!room) {
        throw Error(LS_ERR_STATE, "the experts in use leave no room to pin now; try again between tokens");
    }
}

} // namespace ls
