#include "engine.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace ls {

void MoeRun::reserve_counters(uint32_t n_parts, int n_threads) {
    const size_t n = size_t(n_parts) * experts.size();
    if (n > room) {
        assigned.reset(new std::atomic<uint8_t>[n]);
        next_chunk.reset(new std::atomic<int32_t>[n]);
        threads_left.reset(new std::atomic<int32_t>[n]);
        progress.reset(new std::atomic<uint8_t>[n]);
        room = n;
    }
    for (size_t i = 0; i < n; ++i) {
        assigned[i].store(0, std::memory_order_relaxed);
        next_chunk[i].store(0, std::memory_order_relaxed);
        threads_left[i].store(n_threads, std::memory_order_relaxed);
        progress[i].store(0, std::memory_order_relaxed);
    }
    n_summed.store(0, std::memory_order_relaxed);
    n_guesses.store(0, std::memory_order_relaxed);
    for (std::atomic<int32_t> & n : threads_in_part) {
        n.store(n_threads, std::memory_order_relaxed);
    }
}

Engine::Engine(const Index & index, const EngineOptions & options) : weights(index), index_(index), options_(options) {
    for (const Shard & s : index.shards) {
        std::string warning;
        devices_.push_back(open_device(s.path, options.direct_io, warning));
        if (!warning.empty()) {
            warnings_.push_back(warning);
        }
    }
    stats_.used_buffered_io = !devices_[0]->direct();
    neurons = std::make_unique<NeuronStore>(index, devices_, uint64_t(kNeurons));
    repacked = options.repack ? std::make_unique<Repacked>() : nullptr;
    scheduler_ = std::make_unique<Scheduler>(options.io, *this);
    neurons->set_scheduler(scheduler_.get());
}

Engine::~Engine() = default;

bool Engine::activated() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return activated_;
}

// ---- contexts ------------------------------------------------------------------------------------------------------

void Engine::add_session(Session & session) {
    Lock lock(mutex_);
    sessions_.push_back(&session);
}

void Engine::note_graph(Session & session, const ggml_cgraph * graph, int64_t n_tokens, uint64_t work_bytes, uint32_t n_held_at_once) {
    Lock lock(mutex_);
    session.n_held_at_once = std::max(session.n_held_at_once, n_held_at_once);
    session.work_bytes = std::max(session.work_bytes, work_bytes);
    for (auto & [known, n] : session.graph_tokens) {
        if (known == graph) {
            n = n_tokens;
            return;
        }
    }
    session.graph_tokens.push_back({graph, n_tokens});
}

// A context made after activation: what it holds comes out of the same budget.
void Engine::charge_locked(Lock & lock, Session & session) {
    wait_reconfigured_locked(lock);
    FixedMemory fixed = fixed_;
    fixed.kv      += session.kv_bytes;
    fixed.compute += session.fixed_bytes();
    fixed.device_kv      += session.device_kv_bytes;
    fixed.device_compute += session.device_compute_bytes;
    check_device_locked(fixed);
    const Plan plan = make_plan(plan_input_locked(fixed, budget_bytes_, cache_bytes_));
    check_kept_locked(kept_, plan);
    session.charged = true;
    fixed_ = fixed;
    reconfigure_locked(lock, plan);
}

void Engine::begin(Session & session, const ggml_cgraph * graph) {
    Lock lock(mutex_);
    session.failed.store(false);
    session.error = {};
    session.acquired.store(nullptr);
    for (std::atomic<uint32_t> & n : session.next_chunk) {
        n.store(0);
    }
    session.begin_ns = now_ns();
    session.n_tokens = 0;
    for (const auto & [known, n] : session.graph_tokens) {
        session.n_tokens = known == graph ? n : session.n_tokens;
    }
    if (!activated_) {
        throw Error(LS_ERR_STATE, "the model was loaded but not activated: call ls_model_activate before decoding");
    }
    if (!session.charged) {
        charge_locked(lock, session);
    }
    if (plan_.streams_dense() || plan_.cache_bytes || plan_.neuron_cache_bytes) {
        for (const auto & d : devices_) {
            d->check_unchanged();
        }
    }
    // dense slots are held across ops: admit only as many contexts as can always make progress
    changed_.wait(lock, [&] {
        const bool room = !plan_.streams_dense() || n_active_ == 0 || held_at_once_ + session.n_held_at_once <= ring_.slots.size();
        return !reconfiguring_ && room && !(device_streams() && n_active_ > 0); // slots and stages are one context's at a time
    });
    begin_speculation_locked(session, graph);
    n_active_++;
    held_at_once_ += session.n_held_at_once;
    session.active = true;
}

void Engine::release_all_locked(Session & session) {
    for (uint32_t g : session.held_groups) {
        group_pins_[g]--;
        if (group_slot_[g] >= 0) {
            ring_.slots[size_t(group_slot_[g])].consumed = true;
        }
    }
    session.held_groups.clear();
    for (MoeRun & run : session.runs) {
        unpin_run_locked(run);
    }
    for (NeuronRun & run : session.neuron_runs) {
        neurons->release(run);
    }
}

void Engine::end(Session & session) {
    if (device_ && session.active) {
        device_->end(*this, session);
    }
    Lock lock(mutex_);
    if (!session.active) {
        return;
    }
    const uint32_t last = session.held_groups.empty() ? 0 : session.held_groups.back();
    release_all_locked(session);
    if (plan_.streams_dense() && !session.failed.load()) {
        readahead_locked(last);
    }
    end_speculation_locked(session);
    session.active = false;
    n_active_--;
    held_at_once_ -= session.n_held_at_once;
    stats_.n_graphs++;
    stats_.n_tokens   += uint64_t(session.n_tokens);
    stats_.compute_ns += now_ns() - session.begin_ns;
    changed_.notify_all();
}

void Engine::forget(Session & session) {
    Lock lock(mutex_);
    sessions_.erase(std::remove(sessions_.begin(), sessions_.end(), &session), sessions_.end());
    if (session.charged) { // what it held is free for the next context or budget change
        fixed_.kv      -= std::min(fixed_.kv, session.kv_bytes);
        fixed_.compute -= std::min(fixed_.compute, session.fixed_bytes());
        fixed_.device_kv      -= std::min(fixed_.device_kv, session.device_kv_bytes);
        fixed_.device_compute -= std::min(fixed_.device_compute, session.device_compute_bytes);
    }
}

void Engine::fail(Session & session, const ls_error & error) {
    if (!session.failed.exchange(true)) {
        session.error = error;
        if (session.error.status == LS_OK) {
            session.error.status = LS_ERR_INTERNAL;
        }
    }
}

void Engine::wait_locked(Lock & lock, bool count_stall) {
    const uint64_t begin = now_ns();
    changed_.wait(lock);
    if (count_stall) {
        stats_.stall_ns += now_ns() - begin;
    }
}

// ---- reads ---------------------------------------------------------------------------------------------------------

void Engine::record_read_error(const ReadRequest & request, int error) {
    const std::string & path = request.device->path();
    Error e(error == ENODATA ? LS_ERR_CHANGED : LS_ERR_READ, error == ENODATA
        ? format("%s ended early: %u bytes at offset %llu are missing; the file was cut while in use, restore it and load again",
            path.c_str(), request.n_needed, (unsigned long long) request.offset)
        : format("reading %s at offset %llu failed: %s; check the disk", path.c_str(), (unsigned long long) request.offset,
            strerror(error)));
    e.path(path).offset(request.offset).sys(error).sizes(request.n_needed, 0);
    read_error_ = e.info;
}

void Engine::on_read(const ReadRequest & request, int error) {
    if ((request.tag & 7) == kNeurons) {
        neurons->on_read(request, error);
        return;
    }
    if ((request.tag & 7) == kRecord) {
        if (record_read(request, error)) {
            changed_.notify_all();
        }
        return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (error) {
        record_read_error(request, error);
    }
    const uint64_t id = request.tag >> 3;
    bool done = false;
    switch (Kind(request.tag & 7)) {
        case kResident:
            done = --resident_pending_ == 0;
            break;
        case kGroup: {
            if (error) {
                group_state_[id].store(uint8_t(Load::failed));
            }
            if (--group_pending_[id] == 0) {
                done = true;
                if (Load(group_state_[id].load()) == Load::loading) {
                    group_state_[id].store(uint8_t(Load::ready), std::memory_order_release);
                    pinned_ready_[id].store(group_pinned_[id] && !group_zeroed_[id], std::memory_order_release);
                }
            }
            break;
        }
        case kPart: {
            if (error) {
                part_state_[id].store(uint8_t(Load::failed));
            }
            if (--part_pending_[id] == 0) {
                done = true;
                uint8_t loading = uint8_t(Load::loading);
                if (part_state_[id].compare_exchange_strong(loading, uint8_t(Load::ready)) && --n_parts_missing_ == 0) {
                    update_all_ready_locked();
                }
                cache_->unpin(uint32_t(id / MoeLayer::kMaxParts));
            }
            break;
        }
        case kRows: {
            RowBatch * batch = (RowBatch *) uintptr_t(id << 3);
            batch->error = error ? error : batch->error;
            done = --batch->n_pending == 0;
            break;
        }
        case kNeurons:
        case kRecord:
            break;
    }
    if (done) {
        changed_.notify_all();
    }
}

// ---- numbers -------------------------------------------------------------------------------------------------------

void Engine::get_stats(ls_stats & out) const {
    Lock lock(mutex_);
    const IoCounters io = scheduler_->counters();
    out = stats_;
    out.read_bytes   = io.n_bytes - io_base_.n_bytes;
    out.n_reads      = io.n_reads - io_base_.n_reads;
    out.read_busy_ns = io.busy_ns - io_base_.busy_ns;
    out.budget_bytes = budget_bytes_;
    out.hits += ready_hits_.load(std::memory_order_relaxed);
    const NeuronCounters n = neurons->counters();
    out.neurons_fired       = n.n_fired;
    out.neurons_fired_bytes = n.fired_bytes;
    out.cluster_hits        = n.hits;
    out.cluster_misses      = n.misses;
    out.needed_bytes       += n.needed_bytes;
    out.n_evictions        += n.evictions;
    out.n_waves            += n.n_waves;
    out.stall_ns           += n.stall_ns;
    out.cluster_capacity_bytes = neurons->capacity_bytes();
    add_speculation_locked(out);
    if (device_) {
        out.device_budget_bytes = device_->plan().budget_bytes;
        out.device_used_bytes   = device_->plan().used_bytes;
        out.device_copied_bytes = device_->counters.copied_bytes.load();
        out.device_hits         = device_->counters.hits.load();
        out.device_misses       = device_->counters.misses.load();
        out.device_syncs        = device_->counters.syncs.load();
        out.device_host_experts = device_->counters.on_host.load();
    }
    if (cache_) {
        out.cached_experts       = cache_->n_resident();
        out.cache_capacity_bytes = cache_->capacity_bytes();
        out.resident_now_bytes   = weights.resident_bytes() + plan_.pinned_bytes + ring_.slots.size() * weights.largest_group_bytes() +
            cache_->capacity_bytes() + neurons->resident_bytes() + out.cluster_capacity_bytes;
    }
}

void Engine::reset_stats() {
    Lock lock(mutex_);
    const ls_stats old = stats_;
    stats_ = {};
    spec_.counters = {};
    std::fill(spec_.recall, spec_.recall + kLeads, Recall());
    ready_hits_.store(0);
    neurons->reset_counters();
    if (device_) {
        device_->counters.reset();
    }
    stats_.load_bytes = old.load_bytes;
    stats_.load_ns    = old.load_ns;
    stats_.used_buffered_io = old.used_buffered_io;
    io_base_ = scheduler_->counters();
}

void Engine::get_memory(ls_memory & out) const {
    Lock lock(mutex_);
    out = {};
    out.baseline_bytes = fixed_.baseline;
    out.metadata_bytes = fixed_.metadata;
    out.kv_bytes       = fixed_.kv;
    out.compute_bytes  = fixed_.compute;
    out.margin_bytes   = fixed_.margin;
    out.resident_bytes = weights.resident_bytes() + neurons->resident_bytes();
    out.pinned_bytes   = plan_.pinned_bytes;
    out.ring_bytes     = ring_.slots.size() * weights.largest_group_bytes();
    out.cache_bytes    = plan_.cache_bytes + plan_.neuron_cache_bytes;
}

Plan Engine::current_plan() const {
    Lock lock(mutex_);
    return plan_;
}

FixedMemory Engine::fixed() const {
    Lock lock(mutex_);
    return fixed_;
}

uint64_t Engine::budget_bytes() const {
    Lock lock(mutex_);
    return budget_bytes_;
}

} // namespace ls
