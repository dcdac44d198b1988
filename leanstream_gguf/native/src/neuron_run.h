// A layer whose neurons are stored in clusters, and one product with it.
#pragma once

#include "fidelity.h"
#include "neuron_kernels.h"

#include <atomic>
#include <cstdint>
#include <vector>

namespace ls {

struct NeuronLayer {
    const NeuronShape * shape = nullptr;
    ColumnMatrix matrix = {};
    AccumulateFn accumulate = nullptr;
    // ggml rounds the input of a quantised product to 8 bits, block by block; so do we, or sums would differ by more than their order
    ggml_type rounding_type = GGML_TYPE_COUNT; // COUNT = none
    uint32_t  rounding_block = 1;              // neurons, by original index
    uint32_t first_unit = 0;             // unit of cluster 0
    uint32_t pool = 0;
    uint32_t index = 0;                  // of this layer in the store
    uint32_t first_cold = 0;             // positions before it are summed on a device
    const int32_t  * perm = nullptr;     // [n_ff] original index of a position
    const uint32_t * checksums = nullptr; // [n_clusters]
    const uint8_t  * sketch = nullptr;   // layout faithful
    std::vector<uint32_t> position_of;   // [n_ff] position of an original index

    uint32_t first_cluster() const { return first_cold / shape->cluster_size; } // with neurons that the host sums
    uint32_t n_wanted() const { return shape->n_clusters - first_cluster(); }   // clusters
};

// The neurons that one product of one micro-batch needs, group by group. They are taken in waves: as many groups as there is
// room for; with a cache of ordinary size that is one wave. Waves do not show in the result: every output is one sum in
// original order.
struct NeuronRun {
    struct Group { uint32_t group, first, n; }; // entries first .. first + n

    const NeuronLayer * layer = nullptr;
    std::vector<Group>    groups;
    std::vector<uint32_t> positions;          // [entry] ascending original index
    std::vector<const uint8_t *> records;     // [entry] valid for the wave at hand
    std::vector<uint8_t>  computed;           // [entry] its row was multiplied; written by the thread that has the entry
    std::vector<uint64_t> bitmap;             // scratch: [n_ff / 64] by original index

    // written by one thread before the wave is announced
    uint32_t wave_begin = 0, wave_end = 0;    // groups
    std::vector<uint32_t> pinned;             // units

    bool active = false;                      // guarded by the store's lock
    std::vector<uint32_t> early;              // units pinned while the layer was deciding; likewise
    int32_t id = -1;                          // bit in the store's wait masks while active
    std::atomic<int32_t>  n_pending{0};       // clusters of the wave that are not there yet
    std::atomic<uint32_t> wave{0};            // number of the wave at hand, from 1
    std::atomic<bool>     failed{false};      // a read of this wave failed
    std::atomic<int32_t>  threads_left{0};    // that have not finished the wave
    std::atomic<int32_t>  threads_in_rows{0}; // that have not finished the rows of the wave
};

} // namespace ls
