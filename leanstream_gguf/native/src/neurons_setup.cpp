// What the store is made of: layers, pools of equal slots, resident parts, capacity.
#include "neurons.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cstring>

namespace ls {

namespace {

constexpr uint64_t kReadBytes = 64 * 1024; // from here on a drive gives its full bandwidth
constexpr uint64_t kUnitBytes = 60;        // bookkeeping of a cluster: slots, pins, policy, states
constexpr uint64_t kNeuronBytes = 4 + 3 * 2; // of a neuron: its position, offsets of guesses
constexpr uint64_t kScoreBuffers = 8;      // scores of all neurons of a layer, guesses and scratch
constexpr double   kHotShare  = 0.5;       // of a layer's share of the cache, at most, is pinned for good

uint64_t slot_bytes_of(const NeuronShape & s) {
    return (s.cluster_bytes() + 63) / 64 * 64;
}

} // namespace

NeuronStore::NeuronStore(const Index & index, std::vector<std::unique_ptr<Device>> & devices, uint64_t tag_bits)
    : index_(index), devices_(devices), tag_bits_(tag_bits), faithful_(index.lean.faithful) {
    Fidelity exact;
    exact.thresholds.assign(index.lean.layers.size(), 0.0f);
    fidelity_ = std::make_shared<const Fidelity>(std::move(exact));
    form_layers();
    form_pools();
    deciders_.resize(layers_.size());
    waste_ = WasteLimit(64e6); // clusters are small
    ahead_.resize(layers_.size());
    uint64_t largest = 0;
    for (const NeuronLayer & l : layers_) {
        largest = std::max(largest, l.shape->stride);
    }
    alignment_ = 512;
    for (const std::unique_ptr<Device> & d : devices_) {
        alignment_ = std::max(alignment_, d->granularity());
    }
    buffer_bytes_ = std::max(kReadBytes, page_ceil(largest)) + 2 * page_size();
}

void NeuronStore::form_layers() {
    for (const NeuronShape & s : index_.lean.layers) {
        NeuronLayer l;
        l.shape = &s;
        l.matrix.format    = column_format(s.down.type);
        l.matrix.n_rows    = s.n_embd;
        l.matrix.n_neurons = s.n_ff;
        l.accumulate = accumulate_kernel(best_kernel_set(), s.down.type);
        const ggml_type input = ggml_get_type_traits_cpu(s.down.type)->vec_dot_type;
        if (input != GGML_TYPE_F32) {
            l.rounding_type  = input == GGML_TYPE_Q8_1 ? GGML_TYPE_Q8_0 : input; // the same rounding, and a way back
            l.rounding_block = uint32_t(ggml_blck_size(input));
        }
        l.index = uint32_t(layers_.size());
        layers_.push_back(std::move(l));
    }
}

// Layers with slots of one size share a pool.
void NeuronStore::form_pools() {
    uint32_t unit = 0;
    for (NeuronLayer & first : layers_) {
        const uint64_t bytes = slot_bytes_of(*first.shape);
        if (std::any_of(pools_.begin(), pools_.end(), [&](const Pool & p) { return p.slot_bytes == bytes; })) {
            continue;
        }
        Pool pool = { bytes, unit, 0, nullptr, nullptr };
        for (size_t i = 0; i < layers_.size(); ++i) {
            if (slot_bytes_of(*layers_[i].shape) == bytes) {
                layers_[i].first_unit = unit;
                layers_[i].pool = uint32_t(pools_.size());
                unit += layers_[i].shape->n_clusters;
                layer_of_unit_.insert(layer_of_unit_.end(), layers_[i].shape->n_clusters, uint32_t(i));
            }
        }
        pool.n_units = unit - pool.first_unit;
        pools_.push_back(std::move(pool));
    }
}

int32_t NeuronStore::layer_of_block(int32_t block) const {
    for (size_t i = 0; i < layers_.size(); ++i) {
        if (layers_[i].shape->block == block) {
            return int32_t(i);
        }
    }
    return -1;
}

uint64_t NeuronStore::resident_bytes() const {
    if (empty()) {
        return 0;
    }
    uint64_t n = layer_of_unit_.size() * kUnitBytes + kBuffers * buffer_bytes_, largest = 0;
    for (const NeuronLayer & l : layers_) {
        const NeuronShape & s = *l.shape;
        for (int32_t id : { s.perm, s.planes, s.checksums, s.sketch }) {
            n += id >= 0 ? page_ceil(index_.tensors[size_t(id)].n_bytes + page_size()) : 0;
        }
        n += s.n_ff * kNeuronBytes;
        largest = std::max(largest, uint64_t(s.n_ff) * sizeof(float));
    }
    n += kScoreBuffers * largest;
    return n;
}

uint32_t NeuronStore::n_wanted(const Pool & pool) const {
    uint32_t n = 0;
    for (const NeuronLayer & l : layers_) {
        n += &pools_[l.pool] == &pool ? l.n_wanted() : 0;
    }
    return n;
}

uint64_t NeuronStore::all_cache_bytes() const {
    uint64_t n = 0;
    for (const Pool & p : pools_) {
        n += page_ceil(p.slot_bytes * n_wanted(p));
    }
    return n;
}

// What a token needs of a pool's layers, as calibration measured it.
double NeuronStore::demand_of(const Pool & pool) const {
    double n = 0;
    for (const NeuronLayer & l : layers_) {
        n += &pools_[l.pool] == &pool ? double(l.shape->density) * double(l.shape->n_ff * l.shape->record_bytes) : 0.0;
    }
    return std::max(n, 1e-3 * double(pool.slot_bytes * pool.n_units)); // a layer that hardly fires wants a cache too
}

// [pool] bytes of a cache of n_bytes: its minimum for each, and the rest by demand, until all of a pool's clusters fit.
std::vector<uint64_t> NeuronStore::shares_of(uint64_t n_bytes) const {
    std::vector<uint64_t> share(pools_.size());
    std::vector<size_t> order(pools_.size()); // those that are full first come first
    double demand = 0;
    uint64_t left = n_bytes;
    const auto all_of = [&](size_t p) { return page_ceil(pools_[p].slot_bytes * n_wanted(pools_[p])); };
    for (size_t p = 0; p < pools_.size(); ++p) {
        order[p] = p;
        demand  += demand_of(pools_[p]);
        share[p] = std::min(left, std::min(all_of(p), min_slots(pools_[p]) * pools_[p].slot_bytes));
        left    -= share[p];
    }
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
        return double(all_of(a) - share[a]) * demand_of(pools_[b]) < double(all_of(b) - share[b]) * demand_of(pools_[a]);
    });
    for (size_t p : order) {
        const uint64_t more = std::min(all_of(p) - share[p], uint64_t(double(left) * std::min(1.0, demand_of(pools_[p]) / demand)));
        share[p] += more;
        left     -= more;
        demand   -= demand_of(pools_[p]);
    }
    return share;
}

// One rounding block of neurons that all lie in different clusters, and a few more.
uint32_t NeuronStore::min_slots(const Pool & pool) const {
    uint32_t n = 0;
    for (const NeuronLayer & l : layers_) {
        if (&pools_[l.pool] == &pool) {
            n = std::max(n, std::min(std::max(kMaxGroup, l.rounding_block), l.shape->n_clusters) + 8);
        }
    }
    return std::min(n, n_wanted(pool));
}

uint64_t NeuronStore::min_cache_bytes() const {
    uint64_t n = 0;
    for (const Pool & p : pools_) {
        n += min_slots(p) * p.slot_bytes;
    }
    return std::min(n, all_cache_bytes());
}

void NeuronStore::set_fidelity(Fidelity fidelity) {
    Lock lock(mutex_);
    fidelity_ = std::make_shared<const Fidelity>(std::move(fidelity));
}

std::shared_ptr<const Fidelity> NeuronStore::fidelity() const {
    Lock lock(mutex_);
    return fidelity_;
}

void NeuronStore::set_thresholds(const int32_t * blocks, const float * values, size_t n_values, double max_kl) {
    Lock lock(mutex_);
    fidelity_ = std::make_shared<const Fidelity>(change_thresholds(index_, *fidelity_, blocks, values, n_values, max_kl));
}

const uint8_t * NeuronStore::load_tensor(int32_t id, AddressSpace & space) {
    const IndexEntry & e = index_.tensors[size_t(id)];
    const uint64_t begin = page_floor(e.offset), n_bytes = page_ceil(e.offset + e.n_bytes - begin);
    space = AddressSpace(n_bytes);
    space.commit(space.base(), n_bytes);
    AddressSpace::prefer_large_pages(space.base(), n_bytes);
    const int64_t n = devices_[e.shard]->read(begin, space.base(), n_bytes);
    if (n < int64_t(e.offset - begin + e.n_bytes)) {
        const std::string & path = devices_[e.shard]->path();
        throw Error(LS_ERR_READ, format("reading '%s' of %s failed: %s; check the disk", e.name.c_str(), path.c_str(),
            n < 0 ? strerror(int(-n)) : "the file ended early")).path(path).offset(begin).sys(n < 0 ? int(-n) : 0);
    }
    return space.base() + (e.offset - begin);
}

void NeuronStore::load() {
    if (empty()) {
        return;
    }
    for (NeuronLayer & l : layers_) {
        const NeuronShape & s = *l.shape;
        const auto tensor = [&](int32_t id) {
            resident_.emplace_back();
            return load_tensor(id, resident_.back());
        };
        l.perm      = (const int32_t *) tensor(s.perm);
        l.checksums = (const uint32_t *) tensor(s.checksums);
        l.matrix.planes = s.planes >= 0 ? tensor(s.planes) : nullptr;
        l.sketch    = s.sketch >= 0 ? tensor(s.sketch) : nullptr;
        l.position_of.assign(s.n_ff, UINT32_MAX);
        for (uint32_t i = 0; i < s.n_ff; ++i) {
            const uint32_t original = uint32_t(l.perm[i]);
            if (original >= s.n_ff || l.position_of[original] != UINT32_MAX) {
                const std::string & path = index_.shards.front().path;
                throw Error(LS_ERR_FORMAT, format("%s: the order of neurons of layer %d is no permutation; the file was changed after it "
                    "was made: repack the model again", path.c_str(), s.block)).path(path);
            }
            l.position_of[original] = i;
        }
        for (NeuronGuess & g : ahead_[l.index].guesses) {
            g.model.reset(s.n_ff);
        }
    }
    const size_t n_units = layer_of_unit_.size();
    state_.reset(new std::atomic<uint8_t>[n_units]());
    verified_.assign(n_units, 0);
    waiting_.assign(n_units, 0);
    stamp_.assign(n_units, 0);
    early_.assign(n_units, 0);
    runs_.assign(kMaxRuns, nullptr);
    buffers_ = AddressSpace(kBuffers * buffer_bytes_);
    buffers_.commit(buffers_.base(), buffers_.size());
    reads_.resize(kBuffers);
    for (uint32_t b = 0; b < kBuffers; ++b) {
        free_buffers_.push_back(b);
    }
    for (Pool & p : pools_) {
        p.cache = std::make_unique<SlotCache>(p.n_units, p.slot_bytes);
        p.ahead = std::make_unique<UnitsAhead>(*p.cache, ahead_counters_, waste_);
    }
}

void NeuronStore::set_all_ready_locked() {
    uint32_t n = 0;
    for (const NeuronLayer & l : layers_) {
        n += l.n_wanted();
    }
    all_ready_.store(n_ready_ == n && capacity_is_all_, std::memory_order_relaxed);
}

void NeuronStore::set_capacity(uint64_t n_bytes, const std::string & policy, const PolicyParams & params) {
    if (empty()) {
        return;
    }
    Lock lock(mutex_);
    for (uint32_t unit : hot_) {
        const Pool & p = pools_[layers_[layer_of_unit_[unit]].pool];
        p.cache->unpin(unit - p.first_unit);
    }
    hot_.clear();
    const std::vector<uint64_t> shares = shares_of(n_bytes);
    for (Pool & p : pools_) {
        std::vector<uint32_t> evicted;
        const uint32_t before = p.cache->n_slots();
        p.cache->set_capacity(shares[size_t(&p - pools_.data())], evicted);
        note_evicted_locked(p, evicted);
        if (before != p.cache->n_slots()) {
            p.cache->set_policy(make_policy(policy, params, p.n_units, p.cache->n_slots()));
        }
    }
    capacity_is_all_ = n_bytes >= all_cache_bytes();
    set_all_ready_locked();
}

void NeuronStore::set_policy(const std::string & policy, const PolicyParams & params) {
    Lock lock(mutex_);
    for (Pool & p : pools_) {
        if (p.cache) {
            p.cache->set_policy(make_policy(policy, params, p.n_units, p.cache->n_slots()));
        }
    }
}

// Leading clusters of every layer, the same share of each; the coldest first, so that the policies keep the hot ones longest.
void NeuronStore::fill() {
    if (empty()) {
        return;
    }
    Lock lock(mutex_);
    std::vector<std::pair<double, uint32_t>> wanted; // rank within its layer, unit
    for (const NeuronLayer & l : layers_) {
        const Pool & p = pools_[l.pool];
        const uint32_t first = l.first_cluster(), n = l.n_wanted();
        const double share = double(p.cache->n_slots()) / std::max(1u, n_wanted(p));
        for (uint32_t c = 0; c < (share >= 1 ? n : uint32_t(share * n)); ++c) {
            if (state_[l.first_unit + first + c] == kAbsent) {
                wanted.push_back({ -double(c) / n, l.first_unit + first + c });
            }
        }
    }
    std::sort(wanted.begin(), wanted.end());
    std::vector<uint32_t> missing;
    for (const auto & [rank, unit] : wanted) {
        Pool & p = pools_[layers_[layer_of_unit_[unit]].pool];
        const uint32_t local = unit - p.first_unit;
        if (p.cache->resident(local) || (p.cache->n_resident() < p.cache->n_slots() && admit_locked(unit, false))) {
            state_[unit] = kLoading;
            p.cache->pin(local);
            missing.push_back(unit);
        }
    }
    error_ = {};
    start_reads_locked(missing, Priority::load);
    changed_.wait(lock, [this] { return n_loading_ == 0; });
    if (error_.status) {
        Error e(ls_status(error_.status), error_.message);
        e.info = error_;
        throw e;
    }
    pin_hot_locked();
}

void NeuronStore::pin_hot_locked() {
    for (const NeuronLayer & l : layers_) {
        Pool & p = pools_[l.pool];
        const double share = kHotShare * std::min(1.0, double(p.cache->n_slots()) / std::max(1u, n_wanted(p)));
        const uint32_t n = std::min(l.shape->n_hot, l.first_cluster() + uint32_t(share * l.n_wanted()));
        for (uint32_t c = l.first_cluster(); c < n && p.cache->n_slots() > min_slots(p) + p.cache->n_pinned(); ++c) {
            const uint32_t unit = l.first_unit + c;
            if (state_[unit] == kReady) {
                p.cache->pin(unit - p.first_unit);
                hot_.push_back(unit);
            }
        }
    }
}

uint64_t NeuronStore::capacity_bytes() const {
    Lock lock(mutex_);
    uint64_t n = 0;
    for (const Pool & p : pools_) {
        n += p.cache ? p.cache->capacity_bytes() : 0;
    }
    return n;
}

} // namespace ls
