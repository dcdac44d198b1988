// Reads that begin while a layer is still deciding: a part of its deciding projection is complete, and what fires there is known.
// They are demand, only earlier, and hide behind the rest of the projection.
#include "neurons.h"

#include <algorithm>

namespace ls {

// Pins the unit until begin(); one that is not there joins `missing`. False: there is no room for it.
bool NeuronStore::expect_locked(NeuronRun & run, Pool & pool, uint32_t unit, std::vector<uint32_t> & missing) {
    const uint32_t local = unit - pool.first_unit;
    if (!pool.cache->resident(local)) {
        if (!admit_locked(unit, false)) {
            return false;
        }
        early_[unit] = 1;
        counters_.misses++;
        waste_.judge_demand(layers_[layer_of_unit_[unit]].shape->stride);
        state_[unit] = kLoading;
        pool.cache->pin(local); // until the read is done
        missing.push_back(unit);
    }
    pool.cache->pin(local);
    run.early.push_back(unit);
    return true;
}

void NeuronStore::expect(NeuronRun & run, const NeuronLayer & layer, const float * values, uint32_t first, uint32_t last, float bound) {
    if (all_ready_.load(std::memory_order_relaxed)) {
        return;
    }
    const uint32_t k = layer.shape->cluster_size;
    thread_local std::vector<uint32_t> units;
    units.clear();
    for (uint32_t i = std::max(first, layer.first_cold); i < last; ++i) {
        if (!(values[i] <= bound) && (units.empty() || units.back() != layer.first_unit + i / k)) { // NaN is needed too
            units.push_back(layer.first_unit + i / k);
        }
    }
    if (units.empty()) {
        return;
    }
    Lock lock(mutex_);
    Pool & pool = pools_[layer.pool];
    const uint32_t n_slots = pool.cache->n_slots();
    std::vector<uint32_t> missing;
    for (uint32_t unit : units) {
        if (n_slots < 2 * min_slots(pool) || run.early.size() > n_slots / 2) {
            break; // waves need what room there is
        }
        if (!expect_locked(run, pool, unit, missing)) {
            break;
        }
    }
    start_reads_locked(missing, Priority::demand);
}

void NeuronStore::release_early_locked(NeuronRun & run) {
    for (uint32_t unit : run.early) {
        Pool & pool = pools_[layers_[layer_of_unit_[unit]].pool];
        pool.cache->unpin(unit - pool.first_unit);
        early_[unit] = 0;
    }
    if (!run.early.empty() && n_blocked_ > 0) {
        changed_.notify_all();
    }
    run.early.clear();
}

void NeuronStore::forget_expected(NeuronRun & run) {
    Lock lock(mutex_);
    release_early_locked(run);
}

void NeuronStore::next_round() {
    Lock lock(mutex_);
    for (Pool & pool : pools_) {
        pool.cache->next_round();
    }
}

} // namespace ls
