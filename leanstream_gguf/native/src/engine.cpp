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

// ---- plan and budget -----------------------------------------------------------------------------------------------

PlanInput Engine::plan_input(const FixedMemory & fixed, uint64_t budget_bytes, uint64_t cache_bytes) const {
    Lock lock(mutex_);
    return plan_input_locked(fixed, budget_bytes, cache_bytes);
}

PlanInput Engine::plan_input_locked(const FixedMemory & fixed, uint64_t budget_bytes, uint64_t cache_bytes) const {
    PlanInput in;
    in.fixed_bytes    = fixed.sum();
    in.resident_bytes = weights.resident_bytes();
    for (const DenseGroup & g : weights.groups) {
        in.group_bytes.push_back(device_ && device_->group_resident(g) ? 0 : g.home_bytes);
    }
    in.ring_slot_bytes     = weights.largest_group_bytes();
    in.n_ring_slots_wanted = options_.n_ring_slots;
    in.keeps_dense         = options_.repack;
    for (const Session * s : sessions_) {
        in.n_held_at_once = std::max(in.n_held_at_once, s->n_held_at_once);
    }
    if (device_) {
        in.n_held_at_once = std::max(in.n_held_at_once, device_->groups_held());
    }
    in.expert_bytes = weights.largest_expert_bytes();
    for (const MoeLayer & l : weights.moe_layers) {
        const bool elsewhere = device_ && device_->layer_resident(uint32_t(&l - weights.moe_layers.data()));
        in.n_experts.push_back(elsewhere ? 0 : l.n_experts);
    }
    in.resident_bytes   += neurons->resident_bytes();
    in.neurons_bytes     = neurons->all_cache_bytes();
    in.neurons_min_bytes = neurons->min_cache_bytes();
    in.n_expert_used = std::max(1u, index_.n_expert_used);
    in.budget_bytes  = budget_bytes;
    in.cache_bytes   = cache_bytes;
    return in;
}

void Engine::activate(const FixedMemory & fixed, uint64_t budget_bytes, uint64_t cache_bytes) {
    Lock lock(mutex_);
    if (activated_) {
        throw Error(LS_ERR_STATE, "the model is already activated; use set_budget to change the budget");
    }
    if (weights.all().empty() || sessions_.empty()) {
        throw Error(LS_ERR_STATE, "the model is opened but not loaded, or has no context yet: load it and make one first");
    }
    if (device_) {
        plan_device(fixed, true);
    }
    const Plan plan = make_plan(plan_input_locked(fixed, budget_bytes, cache_bytes));
    weights.freeze();
    if (device_) {
        device_->allocate(weights);
    }

    const size_t n_groups = weights.groups.size();
    group_state_.reset(new std::atomic<uint8_t>[n_groups]());
    pinned_ready_.reset(new std::atomic<bool>[n_groups]());
    group_pending_.assign(n_groups, 0);
    group_slot_.assign(n_groups, -1);
    group_pins_.assign(n_groups, 0);
    group_pinned_.assign(n_groups, false);
    next_streamed_.assign(n_groups, 0);
    group_zeroed_.assign(n_groups, false);
    zeros_ = AddressSpace(weights.largest_group_bytes());
    zeros_.commit(zeros_.base(), zeros_.size());

    n_parts_missing_ = 0;
    layer_of_unit_.clear();
    for (const MoeLayer & l : weights.moe_layers) {
        layer_of_unit_.insert(layer_of_unit_.end(), l.n_experts, uint32_t(&l - weights.moe_layers.data()));
        n_parts_missing_ += uint64_t(l.n_experts) * l.parts.size();
    }
    const size_t n_units = layer_of_unit_.size();
    part_state_.reset(new std::atomic<uint8_t>[n_units * MoeLayer::kMaxParts]());
    part_pending_.assign(n_units * MoeLayer::kMaxParts, 0);
    record_pending_.assign(n_units, 0);
    record_verified_.assign(n_units, false);
    load_expert_checksums();
    kept_.assign(n_units, false);
    cache_ = std::make_unique<SlotCache>(uint32_t(n_units), weights.largest_expert_bytes());
    prepare_speculation_locked();

    const uint64_t begin = now_ns();
    const IoCounters before = scheduler_->counters();
    fixed_ = fixed;
    budget_bytes_ = budget_bytes;
    cache_bytes_  = cache_bytes;
    for (Session * s : sessions_) {
        s->charged = true;
    }
    neurons->load();
    prefer_large_pages_locked(plan); // before the first byte arrives
    load_resident(lock);
    if (device_) {
        load_device(lock);
    }
    apply_locked(lock, plan);
    wait_idle_locked(lock);
    for (size_t g = 0; g < n_groups; ++g) {
        if (group_pinned_[g] && Load(group_state_[g].load()) == Load::failed) {
            throw Error(LS_ERR_READ, read_error_.message).path(read_error_.path).sys(read_error_.sys_errno);
        }
    }
    if (repacked) {
        repacked->convert(weights);
    }
    if (device_) {
        measure_host_cost_locked();
    }
    lock.unlock();
    neurons->fill(); // no graph runs: the model is not activated yet
    lock.lock();
    activated_ = true;
    update_all_ready_locked();
    const IoCounters after = scheduler_->counters();
    stats_.load_ns    = now_ns() - begin;
    stats_.load_bytes = after.n_bytes - before.n_bytes;
    io_base_ = after;
}

void Engine::load_resident(Lock & lock) {
    std::vector<ReadRequest> requests;
    for (Weight & w : weights.all()) {
        const bool table = device_ && budget_bytes_ == 0 && w.home && (w.use == Use::rows || weights.looked_up(w));
        if ((w.use == Use::resident && !w.on_device) || table) {
            w.in_memory = table;
            add_requests(requests, *devices_[w.entry->shard], w.entry->offset, w.entry->n_bytes, w.home, options_.chunk_bytes,
                Priority::load, tag(kResident, 0));
            w.tensor->data = w.home;
        }
    }
    // file order: the drive sees one sweep
    std::sort(requests.begin(), requests.end(), [](const ReadRequest & a, const ReadRequest & b) {
        return a.device != b.device ? a.device < b.device : a.offset < b.offset;
    });
    resident_pending_ = uint32_t(requests.size());
    read_error_ = {};
    populate(requests);
    scheduler_->submit(requests);
    changed_.wait(lock, [this] { return resident_pending_ == 0; });
    if (read_error_.status) {
        throw Error(ls_status(read_error_.status), read_error_.message).path(read_error_.path).sys(read_error_.sys_errno)
            .offset(read_error_.offset_bytes);
    }
}

void Engine::wait_idle_locked(Lock & lock) {
    lock.unlock();
    scheduler_->drain();
    lock.lock();
}

void Engine::rebuild_cache_policy_locked() {
    cache_->set_policy(make_policy(policy_name_, policy_params_, cache_->n_units(), cache_->n_slots()));
}

void Engine::apply_locked(Lock & lock, const Plan & plan) {
    wait_idle_locked(lock);
    if (device_) {
        device_->unlock_all_pages(); // memory is about to move
    }
    std::vector<std::vector<ReadRequest>> loads;
    apply_dense_locked(plan, loads);
    std::vector<uint32_t> evicted;
    const uint32_t n_slots_before = cache_->n_slots();
    cache_->set_capacity(plan.cache_bytes, evicted);
    note_evicted_locked(evicted);
    if (cache_->n_slots() != n_slots_before) {
        rebuild_cache_policy_locked();
    }
    neurons->set_capacity(plan.neuron_cache_bytes, policy_name_, policy_params_);
    plan_ = plan;
    if (device_) {
        device_->set_from_drive(plan.cache_bytes < plan.experts_bytes);
    }
    update_all_ready_locked();
    if (plan.cache_bytes && (device_streams() || plan.mode() == std::string("resident"))) {
        loads.push_back(start_all_experts_locked());
    }
    if (device_) {
        lock_host_pages_locked();
    }
    // no graph runs, so nobody waits for these yet; readers that finish need the lock
    lock.unlock();
    for (const std::vector<ReadRequest> & load : loads) {
        populate(load); // while the readers fill the one before
        scheduler_->submit(load);
    }
    lock.lock();
}

// Nothing will be given up, so read it all now; behind a device as many as fit, those first that have no slot there.
std::vector<ReadRequest> Engine::start_all_experts_locked() {
    std::vector<ReadRequest> requests;
    for (const bool in_slot : {false, true}) {
        for (uint32_t u = 0; u < cache_->n_units() && cache_->n_resident() < cache_->n_slots(); ++u) {
            const uint32_t l = layer_of_unit_[u];
            const uint32_t expert = u - weights.moe_layers[l].first_unit;
            const bool wanted = !device_ || (!device_->layer_resident(l) && device_->has_slot(l, expert) == in_slot);
            if (!wanted || cache_->resident(u) || !admit_locked(u, false)) {
                continue;
            }
            for (uint32_t p = 0; p < weights.moe_layers[l].parts.size(); ++p) {
                start_part_locked(l, expert, p, Priority::load, requests);
            }
        }
    }
    return requests;
}

void Engine::set_budget(uint64_t budget_bytes, uint64_t cache_bytes) {
    Lock lock(mutex_);
    if (!activated_) {
        throw Error(LS_ERR_STATE, "the model is not activated yet");
    }
    wait_reconfigured_locked(lock);
    const Plan plan = make_plan(plan_input_locked(fixed_, budget_bytes, cache_bytes));
    check_kept_locked(kept_, plan);
    budget_bytes_ = budget_bytes;
    cache_bytes_  = cache_bytes;
    reconfigure_locked(lock, plan);
}

// Before a plan is made and before experts are pinned: an older plan must not be applied after a newer one, and nothing may be
// read into slots that are about to move.
void Engine::wait_reconfigured_locked(Lock & lock) {
    changed_.wait(lock, [this] { return !reconfiguring_; });
}

// Between graphs: lets none start, waits for those that run, applies the plan.
void Engine::reconfigure_locked(Lock & lock, const Plan & plan) {
    struct End {
        Engine & engine;
        ~End() { // also when memory is refused
            engine.reconfiguring_ = false;
            engine.changed_.notify_all();
        }
    } end{*this};
    reconfiguring_ = true;
    changed_.wait(lock, [this] { return n_active_ == 0; });
    apply_locked(lock, plan);
}

// Pinned experts must leave room for one token's experts of any layer.
void Engine::check_kept_locked(const std::vector<bool> & kept, const Plan & plan) const {
    const uint64_t n_bytes = uint64_t(std::count(kept.begin(), kept.end(), true)) * cache_->slot_bytes();
    const uint64_t needed  = n_bytes + plan.layer_demand_bytes;
    if (n_bytes > 0 && plan.cache_bytes < plan.experts_bytes && needed > plan.cache_bytes) {
        throw Error(LS_ERR_BUDGET, format("an expert cache of %s is too small for %s of pinned experts beside one token's experts of "
            "one layer (%s); pin fewer or raise the budget", human_bytes(plan.cache_bytes).c_str(), human_bytes(n_bytes).c_str(),
            human_bytes(plan.layer_demand_bytes).c_str())).sizes(plan.cache_bytes, needed);
    }
}

void Engine::set_policy(const std::string & name, const PolicyParams & params) {
    Lock lock(mutex_);
    make_policy(name, params, 0, 0); // checks the name
    policy_name_   = name;
    policy_params_ = params;
    neurons->set_policy(name, params);
    if (device_) {
        device_->set_policy(name, params);
    }
    if (cache_ && cache_->n_units()) {
        rebuild_cache_policy_locked();
    }
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
