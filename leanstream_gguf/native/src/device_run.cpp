// The device tier while graphs run. When one of these functions is called the device has finished everything before it:
// llama.cpp's scheduler waits for the ids that they read. So slots and stages that no later node uses can be overwritten, and
// host memory that was being copied can be given back.
#include "device_tier.h"

#include "engine.h"
#include "host_cost.h"
#include "ops.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <cstring>

namespace ls {

namespace {

// some bytes of a device buffer as a tensor
ggml_tensor bytes_at(ggml_backend_buffer_t buffer, void * data, uint64_t n_bytes) {
    ggml_tensor t = {};
    t.type   = GGML_TYPE_I8;
    t.buffer = buffer;
    t.data   = data;
    t.ne[0]  = int64_t(n_bytes);
    t.ne[1] = t.ne[2] = t.ne[3] = 1;
    t.nb[0] = 1;
    t.nb[1] = t.nb[2] = t.nb[3] = n_bytes;
    return t;
}

constexpr uint64_t kGap = 512; // what a kernel may read past the end of an expert; blocks of zeros are zeros in every type
const uint8_t zeros[kGap] = {};

// A batch with this many rows for each expert uses nearly all of them.
constexpr int64_t kPassRows = 2;

template <typename F>
void for_each_id(const ggml_tensor * ids, F && f) {
    for (int64_t t = 0; t < ids->ne[1]; ++t) {
        const int32_t * row = (const int32_t *) ((const char *) ids->data + t * ids->nb[1]);
        for (int64_t s = 0; s < ids->ne[0]; ++s) {
            f(row[s], t * ids->ne[0] + s);
        }
    }
}

bool ids_valid(const ggml_tensor * ids, size_t n_experts) {
    bool ok = true;
    for_each_id(ids, [&](int32_t e, int64_t) { ok = ok && e >= 0 && size_t(e) < n_experts; });
    return ok;
}

} // namespace

ggml_backend_t DeviceTier::copier(Session & session) const {
    return copies_beside_ ? copy_backend_ : session.device_backend;
}

void DeviceTier::copy_in(ggml_backend_t via, ggml_tensor * dst, uint64_t offset, const uint8_t * src, uint64_t n_bytes) {
    ggml_backend_tensor_set_async(via, dst, src, offset, n_bytes);
    counters.copied_bytes += n_bytes;
}

void DeviceTier::put_expert(Engine & engine, ggml_backend_t via, uint32_t layer, uint32_t expert, const std::vector<ggml_tensor *> & to,
                            uint32_t at) {
    for (uint32_t p = 0; p < to.size(); ++p) {
        copy_in(via, to[p], at * to[p]->nb[2], engine.expert_memory(layer, p, expert), to[p]->nb[2]);
    }
}

// ---- few tokens: slots ---------------------------------------------------------------------------------------------

// A free slot, or that of the least useful expert that this run does not use; -1 if the run uses all.
int32_t DeviceTier::free_slot(Layer & l) {
    const auto empty = std::find(l.expert_of.begin(), l.expert_of.end(), -1);
    if (empty != l.expert_of.end()) {
        return int32_t(empty - l.expert_of.begin());
    }
    const int64_t e = l.policy->victim([&](uint32_t v) { return l.used_in[size_t(l.slot_of[v])] != n_runs_; });
    if (e < 0) {
        return -1;
    }
    const int32_t slot = l.slot_of[size_t(e)];
    l.policy->erase(uint32_t(e));
    l.slot_of[size_t(e)] = -1;
    l.expert_of[size_t(slot)] = -1;
    return slot;
}

// Takes those of the missing experts that are computed on the host out of the list: the router's least liked ones, as far as they
// are in host memory. A copy that nobody foresaw shares the bus with those made ahead; what was foreseen is copied for nothing.
std::vector<uint32_t> DeviceTier::leave_to_host(Engine & engine, uint32_t layer, std::vector<uint32_t> & missing) {
    const uint32_t n = host_share(uint32_t(missing.size()), copies_beside_ ? host_cost() / 2 : host_cost());
    std::vector<uint32_t> on_host;
    if (n == 0 || !engine.has_room(uint32_t(missing.size()))) {
        return on_host;
    }
    for (size_t i = missing.size(); i-- > 0 && on_host.size() < n;) {
        if (engine.expert_ready(layer, missing[i])) {
            on_host.push_back(missing[i]);
            missing.erase(missing.begin() + std::ptrdiff_t(i));
        }
    }
    return on_host;
}

void DeviceTier::send_ids(Session & session, const Choice & choice, const std::vector<uint32_t> & on_host) {
    Layer & l = layers_[choice.layer];
    const size_t t = size_t(choice.ids->ne[1] - 1);
    const bool ok = !session.failed.load();
    for_each_id(choice.ids, [&](int32_t e, int64_t i) {
        const int32_t slot = ok ? l.slot_of[size_t(e)] : 0;
        l.ids_host[size_t(i)] = std::max(slot, 0);
        if (choice.host_run) {
            l.mask_host[size_t(i)] = std::find(on_host.begin(), on_host.end(), uint32_t(e)) == on_host.end() ? 1.0f : 0.0f;
        }
    });
    ggml_backend_tensor_set_async(session.device_backend, l.ids.at(t), l.ids_host, 0, ggml_nbytes(l.ids.at(t)));
    if (choice.host_run) {
        ggml_backend_tensor_set_async(session.device_backend, l.masks.at(t), l.mask_host, 0, ggml_nbytes(l.masks.at(t)));
    }
}

void DeviceTier::select(Engine & engine, Session & session, const Choice & choice) {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint32_t layer = choice.layer;
    const ggml_tensor * ids = choice.ids;
    Layer & l = layers_[layer];
    counters.syncs += choice.host_run ? 4 : 2; // for the router's result, and for its copy; likewise for what the host computed
    engine.release_experts(slot_units_);
    slot_units_.clear();
    settle_ahead(engine, session, layer);
    n_runs_++;
    const bool usable = ids_valid(ids, l.slot_of.size());
    if (!usable && !session.failed.load()) {
        engine.fail(session, Error(LS_ERR_INTERNAL, "the router chose an expert that does not exist").info);
    }
    std::vector<uint32_t> missing, on_host;
    if (!session.failed.load()) {
        for_each_id(ids, [&](int32_t e, int64_t) {
            const int32_t slot = l.slot_of[size_t(e)];
            if (slot < 0) {
                if (std::find(missing.begin(), missing.end(), uint32_t(e)) == missing.end()) {
                    missing.push_back(uint32_t(e));
                }
            } else if (l.used_in[size_t(slot)] != n_runs_) {
                l.used_in[size_t(slot)] = n_runs_;
                l.policy->touch(uint32_t(e));
                counters.hits++;
            }
        });
        counters.misses += missing.size();
        if (choice.host_run) {
            on_host = leave_to_host(engine, layer, missing);
            counters.on_host += on_host.size();
        }
    }
    if (choice.host_run) { // first: what it pins may not go for what is copied
        begin_run(session, *choice.host_run, layer, ids, nullptr, choice.n_threads, &on_host);
    }
    if (!session.failed.load()) {
        learn_ranking(layer, ids);
        const size_t started = engine.fetch_experts(layer, missing, 0, false);
        if (from_drive_) {
            take_ranking(session, layer, choice.ranked);
            read_ahead(engine, session, layer);
        }
        bring_to_slots(engine, session, layer, missing, started);
        if (from_drive_) {
            engine.pass_ahead(layer);
        }
    }
    send_ids(session, choice, on_host);
    if (!session.failed.load() && copies_beside_) {
        copy_ahead(engine, layer);
        if (!from_drive_) {
            take_ranking(session, layer, choice.ranked);
        }
    }
}

// used: by the run at hand; otherwise it is the first to go until it is used
bool DeviceTier::give_slot(Layer & l, uint32_t expert, bool used) {
    const int32_t slot = free_slot(l);
    if (slot < 0) {
        return false;
    }
    l.slot_of[expert] = slot;
    l.expert_of[size_t(slot)] = int32_t(expert);
    l.used_in[size_t(slot)] = n_runs_;
    if (used) {
        l.policy->insert(expert);
    } else {
        l.policy->insert_cold(expert);
    }
    return true;
}

// started: so many of the missing experts have room in host memory, and reads where they need them
void DeviceTier::bring_to_slots(Engine & engine, Session & session, uint32_t layer, std::vector<uint32_t> & missing, size_t started) {
    Layer & l = layers_[layer];
    for (size_t done = 0; done < missing.size(); started = engine.fetch_experts(layer, missing, started, false)) {
        if (started == done) { // the host's cache holds nothing but experts that are being copied
            ggml_backend_synchronize(session.device_backend);
            counters.syncs++;
            engine.release_experts(slot_units_);
            if (slot_units_.empty()) {
                engine.wait_for_room(); // another model's reads, or a read-ahead that has to finish
            }
            slot_units_.clear();
            continue;
        }
        // what is there is copied while the others are read
        std::stable_partition(missing.begin() + std::ptrdiff_t(done), missing.begin() + std::ptrdiff_t(started),
            [&](uint32_t e) { return engine.expert_ready(layer, e); });
        for (; done < started; ++done) {
            const uint32_t e = missing[done];
            slot_units_.push_back(engine.unit_of(layer, e));
            if (!engine.wait_expert(session, layer, e) || !give_slot(l, e, true)) { // failed: the rest is let go
                for (++done; done < started; ++done) {
                    slot_units_.push_back(engine.unit_of(layer, missing[done]));
                }
                return;
            }
            put_expert(engine, session.device_backend, layer, e, l.slots, uint32_t(l.slot_of[e]));
        }
    }
}

// ---- many tokens: stages -------------------------------------------------------------------------------------------

void DeviceTier::recycle_stage(Engine & engine, Session & session, Stage & s, int32_t owner) {
    engine.release_experts(s.units);
    s.units.clear();
    for (uint32_t g : s.groups) {
        engine.release_group(session, g);
    }
    s.groups.clear();
    s.owner = owner;
    std::fill(s.have.begin(), s.have.end(), uint8_t(0));
}

void DeviceTier::stage_from_slot(ggml_backend_t via, Layer & l, uint32_t expert) {
    for (size_t p = 0; p < l.slots.size(); ++p) {
        const uint64_t n = l.slots[p]->nb[2];
        ggml_tensor from = bytes_at(l.slots[p]->buffer, (uint8_t *) l.slots[p]->data + uint64_t(l.slot_of[expert]) * n, n);
        ggml_tensor to   = bytes_at(l.stacked[p]->buffer, (uint8_t *) l.stacked[p]->data + expert * n, n);
        ggml_backend_tensor_copy_async(via, via, &from, &to);
    }
}

// wait: also what is not in host memory yet; false if it could not be read
bool DeviceTier::fill_stage(Engine & engine, Session & session, uint32_t layer, const std::vector<uint8_t> & wanted, bool wait) {
    Layer & l = layers_[layer];
    Stage & s = expert_stages_[size_t(l.stage)];
    ggml_backend_t via = copier(session);
    s.have.resize(std::max(s.have.size(), wanted.size()));
    std::vector<uint32_t> missing;
    for (uint32_t e = 0; e < wanted.size(); ++e) {
        if (!wanted[e] || s.have[e]) {
            continue;
        }
        if (l.slot_of[e] >= 0) { // many small copies within the device would hold up those from the host
            if (wait) {
                stage_from_slot(session.device_backend, l, e);
                s.have[e] = 1;
            }
        } else if (wait || engine.expert_ready(layer, e)) {
            missing.push_back(e);
        }
    }
    for (size_t done = 0, started = 0; done < missing.size();) {
        started = engine.fetch_experts(layer, missing, started, true);
        if (started == done) {
            if (!wait) {
                return true;
            }
            ggml_backend_synchronize(via);
            counters.syncs++;
            const bool any = !s.units.empty();
            engine.release_experts(s.units);
            s.units.clear();
            if (!any) {
                for (Stage & other : expert_stages_) { // read ahead for another layer, and copied by now
                    engine.release_experts(other.units);
                    other.units.clear();
                }
                engine.wait_for_room();
            }
            continue;
        }
        for (; done < started; ++done) {
            s.units.push_back(engine.unit_of(layer, missing[done]));
            if (!engine.wait_expert(session, layer, missing[done])) {
                for (++done; done < started; ++done) {
                    s.units.push_back(engine.unit_of(layer, missing[done]));
                }
                return false;
            }
            put_expert(engine, via, layer, missing[done], l.stacked, missing[done]);
            s.have[missing[done]] = 1;
        }
    }
    return true;
}

// Kernels that step through a row by more than it holds read into the next expert, or past the last one, and multiply by zero.
void DeviceTier::zero_gaps(ggml_backend_t via, Layer & l, const Stage & s) {
    for (ggml_tensor * t : l.stacked) {
        if (t->ne[0] % 256 == 0) {
            continue;
        }
        const uint64_t room = ggml_backend_buft_get_alloc_size(buffer_type_, t);
        for (size_t e = 0; e < l.slot_of.size(); ++e) {
            const uint64_t end = (e + 1) * t->nb[2];
            if (s.have[e] && (e + 1 == l.slot_of.size() || !s.have[e + 1]) && end < room) {
                ggml_tensor gap = bytes_at(t->buffer, (uint8_t *) t->data + end, std::min(kGap, room - end));
                ggml_backend_tensor_set_async(via, &gap, zeros, 0, ggml_nbytes(&gap));
            }
        }
    }
}

void DeviceTier::stage(Engine & engine, Session & session, uint32_t layer, const ggml_tensor * ids) {
    std::lock_guard<std::mutex> lock(mutex_);
    Layer & l = layers_[layer];
    Stage & s = expert_stages_[size_t(l.stage)];
    ggml_backend_t via = copier(session);
    counters.syncs += 2;
    engine.release_experts(slot_units_);
    slot_units_.clear();
    settle_ahead(engine, session, layer);
    if (!ids_valid(ids, l.slot_of.size()) && !session.failed.load()) {
        engine.fail(session, Error(LS_ERR_INTERNAL, "the router chose an expert that does not exist").info);
    }
    if (s.owner != int32_t(layer)) {
        recycle_stage(engine, session, s, int32_t(layer));
    }
    bool ok = !session.failed.load();
    if (ok) {
        std::vector<uint8_t> wanted(l.slot_of.size(), 0);
        for_each_id(ids, [&](int32_t e, int64_t) { wanted[size_t(e)] = 1; });
        for (size_t e = 0; e < wanted.size(); ++e) {
            (wanted[e] && l.slot_of[e] >= 0 ? counters.hits : counters.misses) += wanted[e];
        }
        ok = fill_stage(engine, session, layer, wanted, true);
        zero_gaps(via, l, s);
    }
    if (!ok) { // what the graph goes on to compute must be finite
        ggml_backend_synchronize(via);
        ggml_backend_buffer_clear(s.buffer, 0);
        recycle_stage(engine, session, s, -1);
        return;
    }
    if (!copies_beside_) {
        return;
    }
    ggml_backend_event_record(s.filled, via);
    ggml_backend_event_wait(session.device_backend, s.filled);
    const int64_t n_rows = ids->ne[0] * ids->ne[1];
    if (l.next_streamed >= 0 && expert_stages_.size() > 1 && n_rows >= kPassRows * int64_t(l.slot_of.size())) {
        Layer & next = layers_[size_t(l.next_streamed)];
        Stage & t = expert_stages_[size_t(next.stage)];
        if (t.owner != l.next_streamed) {
            recycle_stage(engine, session, t, l.next_streamed);
            fill_stage(engine, session, uint32_t(l.next_streamed), std::vector<uint8_t>(next.slot_of.size(), 1), false);
        }
    }
}

// ---- dense blocks --------------------------------------------------------------------------------------------------

// false: not all of it is in host memory yet, and we must not wait
bool DeviceTier::copy_block(Engine & engine, Session & session, uint32_t b, bool wait) {
    Stage & s = block_stages_[b % block_stages_.size()];
    if (s.owner == int32_t(b)) {
        return true;
    }
    const StreamedBlock & block = streamed_blocks_[b];
    if (!wait && !std::all_of(block.groups.begin(), block.groups.end(), [&](uint32_t g) { return engine.group_ready(g); })) {
        return false;
    }
    recycle_stage(engine, session, s, int32_t(b));
    for (uint32_t g : block.groups) {
        engine.acquire_group(session, g); // after a failure its tensors point at zeros
        s.groups.push_back(g);
    }
    for (const Weight * w : block.members) {
        ggml_tensor * t = twin(*w);
        copy_in(copier(session), t, 0, (const uint8_t *) w->tensor->data, w->entry->n_bytes);
        const uint64_t room = ggml_backend_buft_get_alloc_size(buffer_type_, t);
        if (room > w->entry->n_bytes) { // rows are padded; another block's bytes lay there
            ggml_tensor gap = bytes_at(t->buffer, (uint8_t *) t->data + w->entry->n_bytes, std::min(kGap, room - w->entry->n_bytes));
            ggml_backend_tensor_set_async(copier(session), &gap, zeros, 0, ggml_nbytes(&gap));
        }
    }
    if (session.failed.load()) {
        s.owner = -1;
    }
    if (copies_beside_) {
        ggml_backend_event_record(s.filled, copy_backend_);
    }
    return true;
}

void DeviceTier::acquire(Engine & engine, Session & session, uint32_t b) {
    std::lock_guard<std::mutex> lock(mutex_);
    ggml_backend_synchronize(session.device_backend);
    counters.syncs++;
    Stage & s = block_stages_[b % block_stages_.size()];
    (s.owner == int32_t(b) ? counters.hits : counters.misses)++;
    copy_block(engine, session, b, true);
    if (!copies_beside_) {
        return;
    }
    ggml_backend_event_wait(session.device_backend, s.filled);
    if (b + 1 < streamed_blocks_.size() && !session.failed.load()) {
        copy_block(engine, session, b + 1, false); // while this one is computed with
    }
}

// ---- around a graph ------------------------------------------------------------------------------------------------

void DeviceTier::end(Engine & engine, Session & session) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!activated_ || !plan_.streams() || !session.device_backend) {
        return;
    }
    ggml_backend_synchronize(session.device_backend);
    if (copies_beside_) {
        ggml_backend_synchronize(copy_backend_);
    }
    counters.syncs++;
    engine.release_experts(slot_units_);
    slot_units_.clear();
    for (Ahead & a : ahead_) {
        engine.release_experts(a.units);
        a.units.clear();
        a.layer  = -1;
        a.waited = false;
    }
    for (Ranking & r : rankings_) {
        r.layer = -1;
    }
    for (std::vector<Stage> * stages : {&block_stages_, &expert_stages_}) {
        for (Stage & s : *stages) {
            engine.release_experts(s.units);
            s.units.clear();
            for (uint32_t g : s.groups) {
                engine.release_group(session, g);
            }
            s.groups.clear();
            if (session.failed.load()) {
                s.owner = -1; // it may hold zeros
            }
        }
    }
}

} // namespace ls
