// What the device tier needs of the engine: experts in host memory, the plan of device memory, and loading into it.
#include "engine.h"

#include "crc32c.h"
#include "llama.h"

#include <algorithm>

namespace ls {

void Engine::use_device(std::unique_ptr<DeviceTier> tier) {
    device_ = std::move(tier);
    if (!device_neurons_) {
        device_neurons_ = std::make_unique<DeviceNeuronTensors>(index_, weights);
    }
    weights.on_device = [this](const Weight & w, const ggml_tensor * node, int source) { return device_->places(w, node, source); };
}

uint64_t Engine::device_budget_in_force(const FixedMemory & fixed, bool allocated) const {
    uint64_t free_bytes = 0, total_bytes = 0;
    device_->memory(free_bytes, total_bytes);
    if (device_budget_bytes_) {
        return std::min(device_budget_bytes_, std::max<uint64_t>(total_bytes, 1)); // Metal's total is the working set it recommends
    }
    const uint64_t ours = fixed.device_driver + (allocated ? fixed.device_kv + fixed.device_compute : 0);
    const uint64_t most = std::min(total_bytes, free_bytes + ours), headroom = device_->headroom_bytes();
    return most > headroom ? most - headroom : 1;
}

DevicePlan Engine::plan_device(const FixedMemory & fixed, bool allocated) {
    if (device_->activated()) {
        return device_->plan();
    }
    const DevicePlan plan = make_device_plan(device_->plan_input(weights, fixed.device_sum(), device_budget_in_force(fixed, allocated)));
    device_->choose(weights, plan);
    device_fixed_bytes_ = fixed.device_sum();
    return plan;
}

// Slots and stages do not shrink for a context that is made later: it has to fit beside them.
void Engine::check_device_locked(const FixedMemory & fixed) const {
    if (!device_ || device_->plan().budget_bytes == 0) {
        return;
    }
    const DevicePlan & plan = device_->plan();
    const uint64_t needed = plan.used_bytes + fixed.device_sum() - std::min(fixed.device_sum(), device_fixed_bytes_);
    if (needed > plan.budget_bytes) {
        throw Error(LS_ERR_BUDGET, format("this context does not fit the device budget of %s beside the model: %s would be needed; make it "
            "before the model is activated, or raise device_budget", human_bytes(plan.budget_bytes).c_str(), human_bytes(needed).c_str()))
            .sizes(plan.budget_bytes, needed);
    }
}

// n_bytes of a load, from its byte `at` on
static void set_parts(const DeviceTier::Load & load, uint64_t at, uint64_t n_bytes, const uint8_t * data) {
    for (const DeviceTier::Load::Part & part : load.parts) {
        const uint64_t from = std::max(part.from, at), to = std::min(part.from + part.n_bytes, at + n_bytes);
        if (from < to) {
            ggml_backend_tensor_set(part.twin, data + (from - at), part.at + (from - part.from), to - from);
        }
    }
}

// Reads into two buffers in turn: the drive fills one while the device takes the other.
void Engine::load_device(Lock & lock) {
    constexpr uint64_t kPiece = 32u << 20;
    AddressSpace staging[2] = {AddressSpace(kPiece + page_size()), AddressSpace(kPiece + page_size())};
    RowBatch batch[2];
    struct Piece { const DeviceTier::Load * load; uint64_t at, n_bytes; uint8_t * data; };
    std::vector<Piece> pieces;
    const std::vector<DeviceTier::Load> loads = device_->loads(weights);
    uint32_t checksum = 0;
    for (const DeviceTier::Load & l : loads) {
        for (uint64_t at = 0; at < l.n_bytes; at += kPiece) {
            pieces.push_back({&l, at, std::min(kPiece, l.n_bytes - at), nullptr});
        }
    }
    for (AddressSpace & s : staging) {
        s.commit(s.base(), s.size());
        device_->lock_pages(s.base(), s.size());
    }
    const auto start = [&](size_t i) {
        const uint64_t offset = pieces[i].load->offset + pieces[i].at;
        pieces[i].data = staging[i % 2].base() + offset % page_size();
        std::vector<ReadRequest> requests;
        add_requests(requests, *devices_[pieces[i].load->shard], offset, pieces[i].n_bytes, pieces[i].data, options_.chunk_bytes, Priority::load,
            uint64_t(uintptr_t(&batch[i % 2])) | kRows);
        batch[i % 2].error = 0;
        batch[i % 2].n_pending = uint32_t(requests.size());
        scheduler_->submit(requests);
    };
    for (size_t i = 0; i < pieces.size(); ++i) {
        if (i == 0) {
            start(0);
        }
        changed_.wait(lock, [&] { return batch[i % 2].n_pending == 0; });
        if (batch[i % 2].error) {
            device_->unlock_all_pages();
            throw Error(ls_status(read_error_.status), read_error_.message).path(read_error_.path).sys(read_error_.sys_errno)
                .offset(read_error_.offset_bytes);
        }
        const Piece & piece = pieces[i];
        const bool checked = piece.load->unit != DeviceTier::Load::kUnchecked;
        checksum = checked ? crc32c(piece.data, piece.n_bytes, piece.at > 0 ? checksum : 0) : 0;
        const bool whole = checked && piece.at + piece.n_bytes == piece.load->n_bytes;
        if (whole && checksum != expert_checksums_[piece.load->unit]) {
            device_->unlock_all_pages();
            throw corrupt_expert(piece.load->unit);
        }
        if (i + 1 < pieces.size()) {
            start(i + 1);
        }
        lock.unlock(); // readers finish under it
        set_parts(*piece.load, piece.at, piece.n_bytes, piece.data);
        lock.lock();
    }
    device_->unlock_all_pages();
}

// Page-locked memory is copied at the bus's rate; other memory at about a third of it.
void Engine::lock_host_pages_locked() {
    if (!device_->plan().streams()) {
        return;
    }
    device_->lock_pages(cache_->base(), cache_->capacity_bytes());
    device_->lock_pages(ring_.space.base(), ring_.space.size());
    for (const Weight & w : weights.all()) {
        if (w.on_device && w.use == Use::dense && group_pinned_[size_t(w.group)] && !device_->group_resident(weights.groups[size_t(w.group)])) {
            device_->lock_pages((uint8_t *) uintptr_t(page_floor(uintptr_t(w.home))), span_bytes(w.entry->offset, w.entry->n_bytes));
        }
    }
}

void Engine::measure_host_cost_locked() {
    int n_threads = 1;
    for (const Session * s : sessions_) {
        n_threads = std::max(n_threads, llama_n_threads(const_cast<llama_context *>(s->context)));
    }
    device_->set_host_cost(*this, n_threads);
}

// ---- experts in host memory ----------------------------------------------------------------------------------------

size_t Engine::fetch_experts(uint32_t layer, const std::vector<uint32_t> & experts, size_t first, bool cold) {
    Lock lock(mutex_);
    const MoeLayer & l = weights.moe_layers[layer];
    std::vector<ReadRequest> requests;
    size_t i = first;
    for (; i < experts.size(); ++i) {
        const uint32_t unit = l.first_unit + experts[i];
        const Arrival arrival = arrival_locked(unit, uint32_t(l.parts.size()));
        if (!cache_->resident(unit) && !admit_locked(unit, cold)) {
            break;
        }
        if (!cold) {
            settle_use_locked(unit, arrival);
        }
        (whole_unit_locked(unit, uint32_t(l.parts.size())) ? stats_.hits : stats_.misses)++;
        if (!cold) {
            cache_->touch(unit);
        }
        cache_->pin(unit);
        for (uint32_t p = 0; p < l.parts.size(); ++p) {
            start_part_locked(layer, experts[i], p, Priority::demand, requests);
        }
    }
    scheduler_->submit(requests);
    return i;
}

void Engine::ranked(Session & session, uint32_t layer, uint32_t n_used, const std::vector<float> & p) {
    Lock lock(mutex_);
    const bool off = session.n_tokens == 1 ? session.lead == 0 : spec_.settings.depth == 0;
    if (off || !session.active || session.failed.load()) {
        return;
    }
    cache_->predicted(weights.moe_layers[layer].first_unit, p.data(), uint32_t(p.size()));
    // the device's rankings are nearly as good as late guesses, and the drive shall not stand idle behind a few reads of demand
    read_ahead_guessed_locked(layer, n_used, Priority::refined, p);
}

void Engine::pass_ahead(uint32_t layer) {
    Lock lock(mutex_);
    const MoeLayer & l = weights.moe_layers[layer];
    cache_->ranked(l.first_unit, nullptr, l.n_experts); // no prediction holds beyond its turn
    pass_ahead_locked(layer);
}

bool Engine::expert_ready(uint32_t layer, uint32_t expert) const {
    const MoeLayer & l = weights.moe_layers[layer];
    for (uint32_t p = 0; p < l.parts.size(); ++p) {
        if (Load(part_state(l.first_unit + expert, p).load(std::memory_order_acquire)) != Load::ready) {
            return false;
        }
    }
    return true;
}

bool Engine::has_room(uint32_t n) const {
    Lock lock(mutex_);
    return cache_->n_pinned() + n <= cache_->n_slots();
}

bool Engine::wait_expert(Session & session, uint32_t layer, uint32_t expert) {
    if (expert_ready(layer, expert)) {
        return true;
    }
    const MoeLayer & l = weights.moe_layers[layer];
    Lock lock(mutex_);
    for (;;) {
        bool pending = false;
        for (uint32_t p = 0; p < l.parts.size(); ++p) {
            const size_t id = size_t(l.first_unit + expert) * MoeLayer::kMaxParts + p;
            if (Load(part_state_[id].load()) == Load::failed && part_pending_[id] == 0) {
                fail(session, read_error_);
                return false;
            }
            pending = pending || Load(part_state_[id].load()) != Load::ready;
        }
        if (!pending) {
            return true;
        }
        wait_locked(lock, true);
    }
}

const uint8_t * Engine::expert_memory(uint32_t layer, uint32_t part, uint32_t expert) const {
    const MoeLayer & l = weights.moe_layers[layer];
    return cache_->memory(l.first_unit + expert) + l.slot_offset(part, expert);
}

uint32_t Engine::unit_of(uint32_t layer, uint32_t expert) const {
    return weights.moe_layers[layer].first_unit + expert;
}

void Engine::release_experts(const std::vector<uint32_t> & units) {
    if (units.empty()) {
        return;
    }
    Lock lock(mutex_);
    for (uint32_t u : units) {
        cache_->unpin(u);
    }
    changed_.notify_all();
}

void Engine::wait_for_room() {
    Lock lock(mutex_);
    if (cache_->n_pinned() == cache_->n_slots()) {
        wait_locked(lock, true);
    }
}

} // namespace ls
