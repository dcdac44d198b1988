#include "device_tier.h"

#include "engine.h"
#include "host_cost.h"
#include "status.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace ls {

namespace {

constexpr uint64_t MiB = 1u << 20;
constexpr uint64_t kBufferBytes = 1024 * MiB; // tensors share buffers up to this size
constexpr uint64_t kDriverBytes = 2 * MiB;    // that a driver may round a buffer up by

uint64_t align_up(uint64_t n, uint64_t to) {
    return (n + to - 1) / to * to;
}

bool is_view_op(ggml_op op) {
    return op == GGML_OP_VIEW || op == GGML_OP_RESHAPE || op == GGML_OP_PERMUTE || op == GGML_OP_TRANSPOSE;
}

std::string backend_name(ggml_backend_dev_t device) {
    return ggml_backend_reg_name(ggml_backend_dev_backend_reg(device));
}

bool is_cuda(ggml_backend_dev_t device) {
    const std::string name = backend_name(device);
    return name == "CUDA" || name == "ROCm" || name == "MUSA";
}

// What the device holds when this process asks first: the driver's context appears then. What others hold already is counted as
// ours up to a limit, which errs on the side of the budget.
uint64_t first_driver_bytes(ggml_backend_dev_t device) {
    static std::mutex mutex;
    static std::unordered_map<ggml_backend_dev_t, uint64_t> known;
    std::lock_guard<std::mutex> lock(mutex);
    const auto it = known.find(device);
    if (it != known.end()) {
        return it->second;
    }
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(device, &free, &total);
    return known[device] = std::min<uint64_t>(total - std::min(free, total), 1024 * MiB);
}

// Metal's batched product aborts for shapes it has no kernel for, and supports_op does not say so (kernel_mul_mm_id_map0).
bool metal_refuses(const ggml_tensor * experts, uint32_t n_used) {
    static const uint32_t kernels[] = {1, 2, 4, 5, 6, 8, 10, 16, 22};
    const bool known = std::find(std::begin(kernels), std::end(kernels), n_used) != std::end(kernels);
    return !known || experts->ne[2] > 1024 || experts->ne[2] * n_used * 2 > 32 * 1024;
}

struct Block { int32_t id; std::vector<Weight *> members; std::vector<uint32_t> groups; };

// the device's blocks in graph order, with their matrices
std::vector<Block> device_blocks(const Weights & weights) {
    std::vector<Block> blocks;
    for (size_t g = 0; g < weights.groups.size(); ++g) {
        const DenseGroup & group = weights.groups[g];
        if (!group.on_device) {
            continue;
        }
        auto at = std::find_if(blocks.begin(), blocks.end(), [&](const Block & b) { return b.id == group.block; });
        if (at == blocks.end()) {
            blocks.push_back({group.block, {}, {}});
            at = blocks.end() - 1;
        }
        at->members.insert(at->members.end(), group.members.begin(), group.members.end());
        at->groups.push_back(uint32_t(g));
    }
    return blocks;
}

bool layer_on_device(const MoeLayer & l) {
    return std::all_of(l.parts.begin(), l.parts.end(), [](const Weight * w) { return w->on_device; });
}

} // namespace

DeviceTier::DeviceTier(const DevicePlacement & placement, uint32_t n_tensors, uint32_t n_expert_used)
    : placement_(placement), buffer_type_(ggml_backend_dev_buffer_type(placement.device)),
      alignment_(ggml_backend_buft_get_alignment(buffer_type_)), n_expert_used_(n_expert_used) {
    constexpr float kRankP = 0.7f; // before anything is known
    rank_p_.assign(n_expert_used, kRankP);
    driver_bytes_ = is_cuda(placement.device) ? first_driver_bytes(placement.device) : 0;
    copies_beside_ = is_cuda(placement.device);
    const ggml_init_params params = {(size_t(n_tensors) * 8 + 1024) * ggml_tensor_overhead(), nullptr, true};
    ctx_ = ggml_init(params);
    unallocated_ = ggml_backend_buft_alloc_buffer(buffer_type_, 0);
    if (!ctx_ || !unallocated_) {
        throw Error(LS_ERR_MEMORY, "out of memory for the device's tensors");
    }
    ggml_backend_buffer_set_usage(unallocated_, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(placement.device);
    lock_pages_   = (bool (*)(void *, size_t)) ggml_backend_reg_get_proc_address(reg, "ggml_backend_register_host_buffer");
    unlock_pages_ = (void (*)(void *)) ggml_backend_reg_get_proc_address(reg, "ggml_backend_unregister_host_buffer");
}

DeviceTier::~DeviceTier() {
    unlock_all_pages();
    for (std::vector<Stage> * stages : {&block_stages_, &expert_stages_}) {
        for (Stage & s : *stages) {
            ggml_backend_event_free(s.filled);
        }
    }
    for (Ahead & a : ahead_) {
        ggml_backend_event_free(a.copied);
    }
    ggml_backend_buffer_free(pinned_);
    ggml_backend_free(copy_backend_);
    for (ggml_backend_buffer_t b : buffers_) {
        ggml_backend_buffer_free(b);
    }
    ggml_backend_buffer_free(unallocated_);
    ggml_free(ctx_);
}

// ---- which weights -------------------------------------------------------------------------------------------------

bool DeviceTier::places(const Weight & w, const ggml_tensor * node, int source) const {
    const int32_t block = block_of(w.entry->name);
    if (block < 0 ? node->op == GGML_OP_GET_ROWS : !has_block(block)) {
        return false;
    }
    if (is_view_op(node->op)) {
        return true;
    }
    if (node->op == GGML_OP_MUL_MAT_ID && backend_name(placement_.device) == "MTL" && metal_refuses(w.tensor, n_expert_used_)) {
        return false;
    }
    ggml_tensor weight = *w.tensor; // as llama.cpp asks before it places a weight
    weight.buffer   = unallocated_;
    weight.view_src = nullptr;
    ggml_tensor op  = *node;
    op.src[source]  = &weight;
    return ggml_backend_dev_supports_op(placement_.device, &op);
}

// ---- plan ----------------------------------------------------------------------------------------------------------

void DeviceTier::memory(uint64_t & free_bytes, uint64_t & total_bytes) const {
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(placement_.device, &free, &total);
    free_bytes  = std::min(free, total);
    total_bytes = total;
}

uint64_t DeviceTier::margin_bytes() const {
    return is_cuda(placement_.device) ? 256 * MiB : 64 * MiB; // kernels loaded at first use, pools, cuBLAS; measured (LOG.md)
}

uint64_t DeviceTier::headroom_bytes() const {
    uint64_t free_bytes = 0, total_bytes = 0;
    memory(free_bytes, total_bytes);
    return std::max(256 * MiB, total_bytes / 20);
}

std::string DeviceTier::description() const {
    return std::string(ggml_backend_dev_name(placement_.device)) + ": " + ggml_backend_dev_description(placement_.device);
}

uint64_t DeviceTier::room_for(ggml_tensor * t) const {
    return align_up(ggml_backend_buft_get_alloc_size(buffer_type_, t), alignment_);
}

DevicePlanInput DeviceTier::plan_input(Weights & weights, uint64_t fixed_bytes, uint64_t budget_bytes) {
    DevicePlanInput in;
    in.fixed_bytes   = fixed_bytes;
    in.n_expert_used = n_expert_used_;
    in.budget_bytes  = budget_bytes;
    uint64_t total = 0;
    for (const Weight & w : weights.all()) {
        if (w.on_device && twin(w)) {
            total += room_for(twin(w));
            in.resident_bytes += w.use == Use::resident ? room_for(twin(w)) : 0;
        }
    }
    for (const Block & b : device_blocks(weights)) {
        in.block_bytes.push_back(0);
        for (const Weight * w : b.members) {
            in.block_bytes.back() += room_for(twin(*w));
        }
    }
    for (const MoeLayer & l : weights.moe_layers) {
        DevicePlanInput::Experts e;
        if (layer_on_device(l)) {
            e.n_experts = l.n_experts;
            for (uint32_t p = 0; p < l.parts.size(); ++p) {
                e.expert_bytes += l.part_bytes(p);
                e.stack_bytes  += room_for(twin(*l.parts[p]));
                in.resident_bytes += 2 * alignment_ + room_for(twin(*l.parts[p])) - ggml_nbytes(twin(*l.parts[p])); // padding of the slots
            }
            in.resident_bytes += (1 + inexact()) * align_up(uint64_t(kSlotTokens) * n_expert_used_ * sizeof(int32_t), alignment_); // ids, mask
        }
        in.layers.push_back(e);
    }
    in.resident_bytes += (total / kBufferBytes + 8) * kDriverBytes;
    return in;
}

// ---- tensors -------------------------------------------------------------------------------------------------------

ggml_tensor * DeviceTier::new_tensor(const Weight & w, int64_t n_stacked) {
    const ggml_tensor * t = w.tensor;
    ggml_tensor * twin = ggml_new_tensor_4d(ctx_, t->type, t->ne[0], t->ne[1], n_stacked, t->ne[3]);
    ggml_set_name(twin, ggml_get_name(t));
    twin->buffer = unallocated_;
    return twin;
}

ggml_tensor * DeviceTier::twin(const Weight & w) {
    const auto known = twins_.find(&w);
    if (known != twins_.end()) {
        return known->second;
    }
    return activated_ ? nullptr : twins_[&w] = new_tensor(w, w.tensor->ne[2]);
}

ggml_tensor * DeviceTier::slots(const Weight & w) {
    const auto known = slot_twins_.find(&w);
    if (known != slot_twins_.end()) {
        return known->second;
    }
    return activated_ ? nullptr : slot_twins_[&w] = new_tensor(w, w.tensor->ne[2]);
}

ggml_tensor * DeviceTier::ids(uint32_t layer, int64_t n_used, int64_t n_tokens) {
    if (layers_.size() <= layer && !activated_) {
        layers_.resize(layer + 1);
    }
    Layer & l = layers_.at(layer);
    for (int64_t t = int64_t(l.ids.size()) + 1; t <= kSlotTokens && !activated_; ++t) {
        ggml_tensor * ids = ggml_new_tensor_2d(ctx_, GGML_TYPE_I32, n_used, t);
        ggml_format_name(ids, "leanstream_ids_%u", layer);
        ids->buffer = unallocated_;
        l.ids.push_back(ids);
        if (inexact()) {
            l.masks.push_back(ggml_new_tensor_3d(ctx_, GGML_TYPE_F32, 1, n_used, t));
            ggml_format_name(l.masks.back(), "leanstream_mask_%u", layer);
            l.masks.back()->buffer = unallocated_;
        }
    }
    ggml_tensor * ids = l.ids.at(size_t(n_tokens - 1));
    return ids->ne[0] == n_used ? ids : nullptr;
}

bool DeviceTier::uses_slots(uint32_t layer, int64_t n_used, int64_t n_tokens) const {
    if (n_tokens > kSlotTokens) {
        return false;
    }
    return !activated_ || int64_t(layers_[layer].expert_of.size()) >= n_used * n_tokens;
}

bool DeviceTier::streams_layer(uint32_t layer) const {
    return !activated_ || !layers_[layer].resident;
}

int32_t DeviceTier::layer_to_rank(uint32_t layer) const {
    if (!activated_ || !(copies_beside_ || from_drive_)) {
        return -1;
    }
    const int32_t next = layers_[layer].next_streamed;
    return next < 0 ? -1 : layers_[size_t(next)].next_streamed;
}

int32_t DeviceTier::streamed_block(int32_t block) const {
    const auto it = streamed_of_block_.find(block);
    return it == streamed_of_block_.end() ? -1 : it->second;
}

bool DeviceTier::group_resident(const DenseGroup & g) const {
    return g.on_device && streamed_block(g.block) < 0;
}

bool DeviceTier::layer_resident(uint32_t layer) const {
    return layer < layers_.size() && layers_[layer].resident;
}

bool DeviceTier::has_slot(uint32_t layer, uint32_t expert) const {
    return layer < layers_.size() && !layers_[layer].slot_of.empty() && layers_[layer].slot_of[expert] >= 0;
}

uint32_t DeviceTier::groups_held() const {
    size_t n = 0;
    for (const StreamedBlock & b : streamed_blocks_) {
        n = std::max(n, b.groups.size());
    }
    return uint32_t(DevicePlan::kStages * n);
}

// ---- memory --------------------------------------------------------------------------------------------------------

void DeviceTier::choose(Weights & weights, const DevicePlan & plan) {
    plan_ = plan;
    layers_.resize(weights.moe_layers.size());
    const std::vector<Block> blocks = device_blocks(weights);
    streamed_blocks_.clear();
    streamed_of_block_.clear();
    for (size_t b = 0; b < blocks.size(); ++b) {
        if (!plan.pinned[b]) {
            streamed_of_block_[blocks[b].id] = int32_t(streamed_blocks_.size());
            streamed_blocks_.push_back({blocks[b].members, blocks[b].groups});
        }
    }
    for (size_t i = 0; i < layers_.size(); ++i) {
        layers_[i].resident = plan.n_slots[i] > 0 && plan.n_slots[i] >= weights.moe_layers[i].n_experts;
    }
}

ggml_backend_buffer_t DeviceTier::new_buffer(uint64_t n_bytes) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(buffer_type_, std::max<uint64_t>(n_bytes, alignment_));
    if (!buffer) {
        throw Error(LS_ERR_MEMORY, format("%s refused %s of device memory; lower device_budget", description().c_str(),
            human_bytes(n_bytes).c_str())).sizes(n_bytes, 0);
    }
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    buffers_.push_back(buffer);
    ggml_backend_buffer_clear(buffer, 0); // kernels read past the end of rows: what is there must be finite
    return buffer;
}

namespace {

void place(ggml_tensor * t, ggml_backend_buffer_t buffer, uint64_t offset) {
    t->buffer = nullptr;
    t->data   = nullptr;
    if (ggml_backend_tensor_alloc(buffer, t, (uint8_t *) ggml_backend_buffer_get_base(buffer) + offset) != GGML_STATUS_SUCCESS) {
        throw Error(LS_ERR_MEMORY, "the device refused a tensor");
    }
}

} // namespace

// Tensors side by side in as few buffers as the backend allows.
void DeviceTier::place_all(const std::vector<ggml_tensor *> & tensors) {
    const uint64_t limit = std::min<uint64_t>(kBufferBytes, ggml_backend_buft_get_max_size(buffer_type_));
    for (size_t first = 0; first < tensors.size();) {
        uint64_t n_bytes = 0;
        size_t last = first;
        while (last < tensors.size() && (last == first || n_bytes + room_for(tensors[last]) <= limit)) {
            n_bytes += room_for(tensors[last++]);
        }
        ggml_backend_buffer_t buffer = new_buffer(n_bytes);
        for (uint64_t at = 0; first < last; ++first) {
            place(tensors[first], buffer, at);
            at += room_for(tensors[first]);
        }
    }
}

void DeviceTier::make_resident(Weights & weights) {
    std::vector<ggml_tensor *> tensors;
    for (const Weight & w : weights.all()) {
        const bool stays = w.on_device && (w.use == Use::resident || (w.use == Use::dense && group_resident(weights.groups[size_t(w.group)])) ||
            (w.use == Use::expert && layers_[size_t(w.layer)].resident));
        if (stays && twin(w)) {
            tensors.push_back(twin(w));
        }
    }
    for (size_t i = 0; i < layers_.size(); ++i) {
        Layer & l = layers_[i];
        const uint32_t n_slots = plan_.n_slots[i];
        for (const Weight * w : weights.moe_layers[i].parts) {
            l.stacked.push_back(n_slots ? twin(*w) : nullptr);
            if (n_slots == 0 || l.resident) {
                continue;
            }
            ggml_tensor * t = slots(*w);
            t->ne[2] = n_slots;
            t->nb[3] = t->nb[2] * n_slots;
            l.slots.push_back(t);
            tensors.push_back(t);
        }
        if (n_slots && !l.resident) {
            ids(uint32_t(i), n_expert_used_, 1);
            tensors.push_back(l.ids.back()); // the largest; the others lie in the same place
            if (inexact()) {
                tensors.push_back(l.masks.back());
            }
            l.slot_of.assign(weights.moe_layers[i].n_experts, -1);
            l.expert_of.assign(n_slots, -1);
            l.used_in.assign(n_slots, 0);
        }
    }
    place_all(tensors);
    for (Layer & l : layers_) {
        for (std::vector<ggml_tensor *> * alike : {&l.ids, &l.masks}) {
            for (size_t t = 0; !l.expert_of.empty() && t + 1 < alike->size(); ++t) {
                (*alike)[t]->buffer = alike->back()->buffer;
                (*alike)[t]->data   = alike->back()->data;
            }
        }
    }
}

void DeviceTier::make_stages() {
    block_stages_.resize(plan_.n_block_stages);
    expert_stages_.resize(plan_.n_expert_stages);
    for (Stage & s : block_stages_) {
        s.buffer = new_buffer(plan_.block_stage_bytes);
    }
    for (Stage & s : expert_stages_) {
        s.buffer = new_buffer(plan_.expert_stage_bytes);
    }
    for (std::vector<Stage> * stages : {&block_stages_, &expert_stages_}) {
        for (Stage & s : *stages) {
            s.filled = copies_beside_ ? ggml_backend_event_new(placement_.device) : nullptr;
        }
    }
    for (size_t b = 0; b < streamed_blocks_.size(); ++b) {
        uint64_t at = 0;
        for (const Weight * w : streamed_blocks_[b].members) {
            place(twin(*w), block_stages_[b % block_stages_.size()].buffer, at);
            at += room_for(twin(*w));
        }
    }
    int32_t n = 0;
    Layer * before = nullptr;
    for (size_t i = 0; i < layers_.size(); ++i) {
        Layer & l = layers_[i];
        if (l.expert_of.empty()) {
            continue;
        }
        l.order = uint32_t(n);
        l.stage = n++ % int32_t(expert_stages_.size());
        uint64_t at = 0;
        for (ggml_tensor * t : l.stacked) {
            place(t, expert_stages_[size_t(l.stage)].buffer, at);
            at += room_for(t);
        }
        if (before) {
            before->next_streamed = int32_t(i);
        }
        before = &l;
    }
}

// Remapped ids go to the device and rankings come back; memory that is not page-locked would make each copy wait.
void DeviceTier::make_pinned() {
    size_t n_experts = 0, n_layers = 0;
    for (const Layer & l : layers_) {
        n_layers += !l.expert_of.empty();
        n_experts = std::max(n_experts, l.slot_of.size());
    }
    static_assert(sizeof(float) == sizeof(int32_t), "masks lie beside ids");
    const size_t n_ids = size_t(kSlotTokens) * n_expert_used_, n_ranks = size_t(kSlotTokens) * n_experts;
    const size_t n = n_layers * n_ids * (1 + inexact()) + std::size(rankings_) * n_ranks;
    ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(placement_.device);
    pinned_ = type && n ? ggml_backend_buft_alloc_buffer(type, n * sizeof(int32_t)) : nullptr;
    unpinned_.resize(pinned_ ? 0 : n);
    int32_t * at = pinned_ ? (int32_t *) ggml_backend_buffer_get_base(pinned_) : unpinned_.data();
    for (Layer & l : layers_) {
        if (!l.expert_of.empty()) {
            l.ids_host = at;
            at += n_ids;
            l.mask_host = inexact() ? (float *) at : nullptr;
            at += inexact() ? n_ids : 0;
        }
    }
    for (Ranking & r : rankings_) {
        r.experts = at;
        at += n_ranks;
    }
    for (Ahead & a : ahead_) {
        a.copied = copies_beside_ && n ? ggml_backend_event_new(placement_.device) : nullptr;
    }
}

void DeviceTier::allocate(Weights & weights) {
    make_resident(weights);
    make_stages();
    make_pinned();
    set_policy(policy_name_, policy_params_);
    if (copies_beside_ && plan_.streams()) {
        copy_backend_ = ggml_backend_dev_init(placement_.device, nullptr);
        copies_beside_ = copy_backend_ != nullptr;
    }
    activated_ = true;
}

// A rearranged file holds an expert's parts side by side; others hold each part of all experts.
void DeviceTier::add_expert_loads(const MoeLayer & moe, Layer & l, std::vector<Load> & out) {
    const std::vector<ggml_tensor *> & twins = l.resident ? l.stacked : l.slots;
    const uint64_t n = l.resident ? moe.n_experts : l.expert_of.size();
    for (uint32_t e = 0; moe.bundle && e < n; ++e) {
        out.push_back({moe.bundle->shard, moe.record_offset(e), moe.record_bytes(), moe.checksums ? moe.first_unit + e : Load::kUnchecked, {}});
        for (uint32_t p = 0; p < twins.size(); ++p) {
            out.back().parts.push_back({twins[p], moe.parts[p]->entry->part_offset, e * twins[p]->nb[2], twins[p]->nb[2]});
        }
    }
    for (uint32_t p = 0; !moe.bundle && p < twins.size(); ++p) {
        const IndexEntry & entry = *moe.parts[p]->entry;
        out.push_back({entry.shard, entry.offset, n * twins[p]->nb[2], Load::kUnchecked, {{twins[p], 0, 0, n * twins[p]->nb[2]}}});
    }
    for (int32_t s = 0; !l.resident && s < int32_t(n); ++s) { // something to begin with
        l.expert_of[size_t(s)] = l.slot_of[size_t(s)] = s;
        l.policy->insert(uint32_t(s));
    }
}

std::vector<DeviceTier::Load> DeviceTier::loads(const Weights & weights) {
    std::vector<Load> out;
    for (const Weight & w : weights.all()) {
        const bool here = w.on_device && w.use != Use::expert && twin(w);
        if (here && (w.use != Use::dense || group_resident(weights.groups[size_t(w.group)]))) {
            out.push_back({w.entry->shard, w.entry->offset, w.entry->n_bytes, Load::kUnchecked, {{twin(w), 0, 0, w.entry->n_bytes}}});
        }
    }
    for (size_t i = 0; i < layers_.size(); ++i) {
        if (plan_.n_slots[i] > 0) {
            add_expert_loads(weights.moe_layers[i], layers_[i], out);
        }
    }
    return out;
}

void DeviceTier::set_policy(const std::string & name, const PolicyParams & params) {
    policy_name_   = name;
    policy_params_ = params;
    for (Layer & l : layers_) {
        if (l.expert_of.empty()) {
            continue;
        }
        l.policy = make_policy(name, params, uint32_t(l.slot_of.size()), uint32_t(l.expert_of.size()));
        for (int32_t e : l.expert_of) {
            if (e >= 0) {
                l.policy->insert(uint32_t(e));
            }
        }
    }
}

void DeviceTier::set_host_cost(const Engine & engine, int n_threads) {
    const auto streams = std::find_if(layers_.begin(), layers_.end(), [](const Layer & l) { return !l.expert_of.empty(); });
    if (!inexact() || placement_.host_cost > 0 || streams == layers_.end()) {
        return;
    }
    const uint32_t layer = uint32_t(streams - layers_.begin());
    HostExperts host = {engine.weights.moe_layers[layer], {}, [&](uint32_t p, uint32_t e) { return engine.expert_memory(layer, p, e); }};
    for (uint32_t e = 0; e < host.layer.n_experts; ++e) {
        if (engine.expert_ready(layer, e)) {
            host.experts.push_back(e);
        }
    }
    ggml_backend_t backend = copy_backend_ ? copy_backend_ : ggml_backend_dev_init(placement_.device, nullptr);
    if (!backend) {
        throw Error(LS_ERR_MEMORY, format("%s refused a queue for copies", description().c_str()));
    }
    placement_.host_cost = measure_host_cost(host, streams->stacked, backend, n_threads);
    if (backend != copy_backend_) {
        ggml_backend_free(backend);
    }
}

void DeviceTier::lock_pages(uint8_t * from, size_t n_bytes) {
    if (lock_pages_ && unlock_pages_ && n_bytes && lock_pages_(from, n_bytes)) {
        locked_pages_.push_back(from);
    }
}

void DeviceTier::unlock_all_pages() {
    for (uint8_t * p : locked_pages_) {
        unlock_pages_(p);
    }
    locked_pages_.clear();
}

} // namespace ls
