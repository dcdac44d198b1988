// Clusters in memory: admission, reads through buffers, waves.
#include "neurons.h"

#include "crc32c.h"
#include "spin_pause.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace ls {

uint8_t * NeuronStore::memory(uint32_t unit) const {
    const Pool & pool = pools_[layers_[layer_of_unit_[unit]].pool];
    return pool.cache->memory(unit - pool.first_unit);
}

// ---- admission -----------------------------------------------------------------------------------------------------

bool NeuronStore::admit_locked(uint32_t unit, bool cold) {
    Pool & pool = pools_[layers_[layer_of_unit_[unit]].pool];
    std::vector<uint32_t> evicted;
    const bool ok = pool.cache->admit(unit - pool.first_unit, cold, evicted);
    note_evicted_locked(pool, evicted);
    return ok;
}

// Pin the unit for the wave at hand, if this wave has not done so; a unit that is not there joins `missing`.
bool NeuronStore::pin_locked(NeuronRun & run, const NeuronLayer & layer, uint32_t unit, std::vector<uint32_t> & missing) {
    if (stamp_[unit] == stamp_now_) {
        return true;
    }
    Pool & pool = pools_[layer.pool];
    const uint32_t local = unit - pool.first_unit;
    const bool counted = early_[unit];
    if (pool.cache->resident(local)) {
        if (!counted) {
            pool.cache->touch(local);
        }
    } else if (!admit_locked(unit, false)) {
        return false;
    }
    pool.cache->pin(local);
    early_[unit] = 0;
    stamp_[unit] = stamp_now_;
    run.pinned.push_back(unit);
    if (pool.ahead->holds(local)) {
        const bool late = state_[unit] != kReady;
        pool.ahead->use(local, layer.shape->stride, late);
        if (late) {
            promote_locked(unit);
        }
    }
    if (state_[unit] == kReady) {
        counters_.hits += !counted;
        return true;
    }
    counters_.misses += !counted;
    waiting_[unit] |= uint8_t(1u << run.id);
    run.n_pending.fetch_add(1, std::memory_order_relaxed);
    if (state_[unit] == kAbsent) {
        waste_.judge_demand(layer.shape->stride);
        state_[unit] = kLoading;
        pool.cache->pin(local); // until the read is done
        missing.push_back(unit);
    }
    return true;
}

// rounding block that a group of the run belongs to
uint32_t NeuronStore::block_of(const NeuronRun & run, uint32_t group) {
    return run.groups[group].group * run.layer->matrix.format->group / std::max(kMaxGroup, run.layer->rounding_block);
}

uint32_t NeuronStore::block_start(const NeuronRun & run, uint32_t group) {
    while (group > run.wave_begin && group < run.wave_end && block_of(run, group - 1) == block_of(run, group)) {
        group++; // the block belongs to the thread that has its first group
    }
    return group;
}

uint32_t NeuronStore::block_end(const NeuronRun & run, uint32_t group) {
    const uint32_t block = block_of(run, group);
    while (group < run.wave_end && block_of(run, group) == block) {
        group++;
    }
    return group;
}

// As many rounding blocks as there is room for, at least one. False: not even one, because others hold the slots.
bool NeuronStore::take_wave_locked(NeuronRun & run, std::vector<uint32_t> & missing) {
    const NeuronLayer & l = *run.layer;
    const uint32_t k = l.shape->cluster_size;
    stamp_now_++;
    run.wave_begin = run.wave_end;
    for (; run.wave_end < run.groups.size(); ++run.wave_end) {
        const NeuronRun::Group & g = run.groups[run.wave_end];
        for (uint32_t i = g.first; i < g.first + g.n; ++i) {
            if (!pin_locked(run, l, l.first_unit + run.positions[i] / k, missing)) {
                const uint32_t block = block_of(run, run.wave_end);
                while (run.wave_end > run.wave_begin && block_of(run, run.wave_end - 1) == block) {
                    run.wave_end--;
                }
                return run.wave_end > run.wave_begin;
            }
        }
    }
    return true;
}

void NeuronStore::unpin_locked(NeuronRun & run) {
    for (uint32_t unit : run.pinned) {
        Pool & pool = pools_[layers_[layer_of_unit_[unit]].pool];
        pool.cache->unpin(unit - pool.first_unit);
        if (run.id >= 0) {
            waiting_[unit] &= uint8_t(~(1u << run.id));
        }
    }
    run.pinned.clear();
}

// ---- waves ---------------------------------------------------------------------------------------------------------

void NeuronStore::point_at_records(NeuronRun & run) const {
    const NeuronShape & s = *run.layer->shape;
    for (uint32_t g = run.wave_begin; g < run.wave_end; ++g) {
        for (uint32_t i = run.groups[g].first; i < run.groups[g].first + run.groups[g].n; ++i) {
            const uint32_t at = run.positions[i];
            run.records[i] = memory(run.layer->first_unit + at / s.cluster_size) + at % s.cluster_size * s.record_bytes;
        }
    }
}

void NeuronStore::begin(NeuronRun & run, int n_threads, const Session * session, int64_t n_tokens) {
    run.records.resize(run.positions.size());
    run.computed.assign(run.positions.size(), 0);
    run.wave_begin = run.wave_end = 0;
    run.failed.store(false);
    run.wave.store(0);
    {
        Lock lock(mutex_);
        unpin_locked(run); // left by a micro-batch that failed
        run.n_pending.store(0);
        counters_.n_fired += run.positions.size();
        counters_.fired_bytes += run.positions.size() * run.layer->shape->record_bytes;
        if (session) {
            begin_turn_locked(*session, run, n_tokens);
        }
        if (all_ready_.load(std::memory_order_relaxed)) {
            release_early_locked(run);
            counters_.hits += run.positions.size();
        } else {
            changed_.wait(lock, [&] { return run.active || std::count(runs_.begin(), runs_.end(), nullptr) > 0; });
            if (!run.active) {
                run.id = int32_t(std::find(runs_.begin(), runs_.end(), nullptr) - runs_.begin());
                runs_[size_t(run.id)] = &run;
                run.active = true;
            }
        }
    }
    begin_wave(run, n_threads);
}

void NeuronStore::begin_wave(NeuronRun & run, int n_threads) {
    if (!run.active) { // everything is in memory and stays there
        run.wave_begin = run.wave_end;
        run.wave_end = uint32_t(run.groups.size());
        point_at_records(run);
    } else {
        Lock lock(mutex_);
        std::vector<uint32_t> missing;
        while (!take_wave_locked(run, missing)) {
            start_reads_locked(missing, Priority::demand); // others may wait for these by now
            missing.clear();
            unpin_locked(run);
            run.n_pending.store(0);
            run.wave_end = run.wave_begin;
            if (!run.early.empty()) {
                release_early_locked(run); // that may be the room it takes
                continue;
            }
            n_blocked_++;
            changed_.wait(lock);
            n_blocked_--;
        }
        release_early_locked(run);
        start_reads_locked(missing, Priority::demand);
        counters_.n_waves += run.wave_end < run.groups.size();
        if (run.wave_end == run.groups.size()) {
            NeuronsAhead & a = ahead_[run.layer->index];
            a.mean_units += 0.1f * (float(run.pinned.size()) - a.mean_units);
            end_turn_locked(run.layer->index);
        }
        point_at_records(run);
    }
    run.threads_left.store(n_threads, std::memory_order_relaxed);
    run.threads_in_rows.store(n_threads, std::memory_order_relaxed);
    {
        Lock lock(mutex_); // so that a thread about to sleep cannot miss it
        run.wave.fetch_add(1, std::memory_order_release);
    }
    changed_.notify_all();
}

bool NeuronStore::wait_taken(NeuronRun & run, uint32_t wave) {
    return wait_for(run, [&] { return run.wave.load(std::memory_order_acquire) >= wave; });
}

bool NeuronStore::wait_wave(NeuronRun & run, uint32_t wave) {
    return wait_for(run, [&] {
        return run.wave.load(std::memory_order_acquire) >= wave && run.n_pending.load(std::memory_order_acquire) == 0;
    });
}

template <typename Condition> bool NeuronStore::wait_for(NeuronRun & run, Condition condition) {
    const auto settled = [&] { return run.failed.load() || condition(); };
    if (!settled()) {
        const uint64_t begin = now_ns();
        Lock lock(mutex_);
        changed_.wait(lock, settled);
        counters_.stall_ns += now_ns() - begin;
    }
    return !run.failed.load();
}

bool NeuronStore::wait_rows(NeuronRun & run) {
    const auto done = [&] { return run.threads_in_rows.load(std::memory_order_acquire) == 0 || run.failed.load(); };
    if (run.threads_in_rows.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        {
            Lock lock(mutex_);
        }
        changed_.notify_all();
        return !run.failed.load();
    }
    for (int i = 0; i < 2000; ++i) { // the others are at the same work
        if (done()) {
            return !run.failed.load();
        }
        spin_pause();
    }
    Lock lock(mutex_);
    changed_.wait(lock, done);
    return !run.failed.load();
}

void NeuronStore::next_wave(NeuronRun & run, int n_threads) {
    const bool more = run.wave_end < run.groups.size();
    if (run.active) {
        Lock lock(mutex_);
        unpin_locked(run);
        if (!more) {
            runs_[size_t(run.id)] = nullptr;
            run.active = false;
            run.id = -1;
        }
        changed_.notify_all();
    }
    if (more) {
        begin_wave(run, n_threads);
    }
}

void NeuronStore::release(NeuronRun & run) {
    Lock lock(mutex_);
    release_early_locked(run);
    if (run.active) {
        unpin_locked(run);
        runs_[size_t(run.id)] = nullptr;
        run.active = false;
        run.id = -1;
        changed_.notify_all();
    }
}

// ---- reads ---------------------------------------------------------------------------------------------------------

// Neighbours are read together; each read goes through a buffer.
void NeuronStore::start_reads_locked(std::vector<uint32_t> & missing, Priority priority) {
    std::sort(missing.begin(), missing.end());
    for (size_t i = 0; i < missing.size();) {
        const uint32_t li = layer_of_unit_[missing[i]];
        const NeuronLayer & l = layers_[li];
        const uint64_t base = index_.tensors[size_t(l.shape->clusters)].offset, stride = l.shape->stride;
        Read r = { li, missing[i] - l.first_unit, 1, priority, { missing[i] } };
        const uint64_t begin = (base + r.first * stride) / alignment_ * alignment_;
        for (++i; i < missing.size() && layer_of_unit_[missing[i]] == li; ++i) {
            const uint32_t c = missing[i] - l.first_unit;
            const uint64_t end = (base + (r.first + r.n) * stride + alignment_ - 1) / alignment_ * alignment_;
            if ((base + c * stride) / alignment_ * alignment_ > end || base + (c + 1) * stride > begin + buffer_bytes_ - alignment_) {
                break;
            }
            r.units.push_back(missing[i]);
            r.n = c - r.first + 1;
        }
        n_loading_ += uint32_t(r.units.size());
        counters_.needed_bytes += r.units.size() * stride;
        queue_locked(std::move(r));
    }
    start_next_locked();
}

void NeuronStore::queue_locked(Read read) {
    const auto at = std::upper_bound(queued_.begin(), queued_.end(), read.priority, [](Priority p, const Read & r) { return p < r.priority; });
    queued_.insert(at, std::move(read));
}

void NeuronStore::release_buffer_locked(uint32_t buffer) {
    n_ahead_buffers_ -= reads_[buffer].ahead();
    reads_[buffer].units.clear();
    free_buffers_.push_back(buffer);
}

void NeuronStore::start_next_locked() {
    std::vector<ReadRequest> requests;
    while (!queued_.empty() && !free_buffers_.empty() && (!queued_.front().ahead() || n_ahead_buffers_ < kAheadBuffers)) {
        const uint32_t b = free_buffers_.back();
        free_buffers_.pop_back();
        reads_[b] = std::move(queued_.front());
        queued_.pop_front();
        n_ahead_buffers_ += reads_[b].ahead();
        const NeuronShape & s = *layers_[reads_[b].layer].shape;
        const IndexEntry & clusters = index_.tensors[size_t(s.clusters)];
        const uint64_t begin = clusters.offset + reads_[b].first * s.stride, end = begin + reads_[b].n * s.stride;
        ReadRequest q;
        q.device   = devices_[clusters.shard].get();
        q.offset   = begin / alignment_ * alignment_;
        q.dest     = buffers_.base() + b * buffer_bytes_;
        q.n_needed = uint32_t(end - q.offset);
        q.n_bytes  = uint32_t((q.n_needed + alignment_ - 1) / alignment_ * alignment_);
        q.priority = reads_[b].priority;
        q.tag      = tag_of(b);
        requests.push_back(q);
    }
    scheduler_->submit(requests);
}

void NeuronStore::on_read(const ReadRequest & request, int error) {
    const uint32_t b = uint32_t(request.tag >> 8);
    const Read & r = reads_[b]; // ours until the buffer is free again
    const NeuronLayer & l = layers_[r.layer];
    const NeuronShape & s = *l.shape;
    const IndexEntry & clusters = index_.tensors[size_t(s.clusters)];
    uint32_t corrupt = UINT32_MAX;
    for (uint32_t unit : r.units) {
        const uint32_t c = unit - l.first_unit;
        const uint8_t * from = request.dest + (clusters.offset + c * s.stride - request.offset);
        if (!error && !verified_[unit] && crc32c(from, s.stride) != l.checksums[c]) {
            corrupt = c;
        }
        if (!error && corrupt == UINT32_MAX) {
            memcpy(memory(unit), from, s.cluster_bytes());
        }
    }
    const bool ok = !error && corrupt == UINT32_MAX;
    Lock lock(mutex_);
    if (corrupt != UINT32_MAX) {
        error_ = Error(LS_ERR_FORMAT, format("%s: cluster %u of layer %d is corrupt (its checksum is wrong); copy the file again or repack the "
            "model, and check the disk", request.device->path().c_str(), corrupt, s.block)).path(request.device->path())
            .offset(clusters.offset + corrupt * s.stride).info;
    } else if (error) {
        error_ = Error(error == ENODATA ? LS_ERR_CHANGED : LS_ERR_READ, format("reading %s at offset %llu failed: %s; %s",
            request.device->path().c_str(), (unsigned long long) request.offset, error == ENODATA ? "the file ended early" : strerror(error),
            error == ENODATA ? "it was cut while in use, restore it and load again" : "check the disk")).path(request.device->path())
            .offset(request.offset).sys(error).info;
    }
    bool wake = false;
    for (uint32_t unit : r.units) {
        state_[unit] = ok ? kReady : kAbsent;
        verified_[unit] |= uint8_t(ok);
        n_ready_ += ok;
        for (uint32_t id = 0; waiting_[unit] >> id; ++id) {
            if (waiting_[unit] >> id & 1) {
                NeuronRun & run = *runs_[id];
                run.failed.store(run.failed.load() || !ok);
                wake |= run.n_pending.fetch_sub(1, std::memory_order_release) == 1 || !ok;
            }
        }
        waiting_[unit] = 0;
        Pool & pool = pools_[l.pool];
        pool.cache->unpin(unit - pool.first_unit);
    }
    n_loading_ -= uint32_t(r.units.size());
    wake |= n_loading_ == 0 || n_blocked_ > 0;
    release_buffer_locked(b);
    set_all_ready_locked();
    start_next_locked();
    if (wake) {
        changed_.notify_all();
    }
}

ls_error NeuronStore::error() const {
    Lock lock(mutex_);
    return error_;
}

NeuronCounters NeuronStore::counters() const {
    Lock lock(mutex_);
    return counters_;
}

void NeuronStore::reset_counters() {
    Lock lock(mutex_);
    counters_ = {};
    ahead_counters_ = {};
    for (NeuronsAhead & a : ahead_) {
        std::fill(a.recall, a.recall + kLeads, Recall());
    }
}

} // namespace ls
