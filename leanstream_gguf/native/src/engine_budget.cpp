// What the engine holds in memory: the plan, activation, and budgets that change while the model lives.
#include "engine.h"

#include <algorithm>

namespace ls {

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

} // namespace ls
