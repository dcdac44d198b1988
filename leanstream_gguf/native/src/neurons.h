// Neurons of rearranged layers (docs/lean_format.md): which of their clusters are in memory, and reading those that are not.
// A cluster is the unit of reading and of retention; its memory holds whole records, one for each neuron.
#pragma once

#include "cache.h"
#include "device.h"
#include "fidelity.h"
#include "index.h"
#include "memory.h"
#include "neuron_kernels.h"
#include "scheduler.h"
#include "status.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
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
    const int32_t  * perm = nullptr;     // [n_ff] original index of a position
    const uint32_t * checksums = nullptr; // [n_clusters]
    const uint8_t  * sketch = nullptr;   // layout faithful
    std::vector<uint32_t> position_of;   // [n_ff] position of an original index
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
    std::vector<uint64_t> bitmap;             // scratch: [n_ff / 64] by original index

    // written by one thread before the wave is announced
    uint32_t wave_begin = 0, wave_end = 0;    // groups
    std::vector<uint32_t> pinned;             // units

    bool active = false;                      // guarded by the store's lock
    int32_t id = -1;                          // bit in the store's wait masks while active
    std::atomic<int32_t>  n_pending{0};       // clusters of the wave that are not there yet
    std::atomic<uint32_t> wave{0};            // number of the wave at hand, from 1
    std::atomic<bool>     failed{false};      // a read of this wave failed
    std::atomic<int32_t>  threads_left{0};    // that have not finished the wave
    std::atomic<int32_t>  threads_in_rows{0}; // that have not finished the rows of the wave
};

struct NeuronCounters {
    uint64_t n_fired = 0;       // firing neurons, summed over layers and micro-batches
    uint64_t fired_bytes = 0;   // of their records
    uint64_t hits = 0, misses = 0, evictions = 0; // clusters
    uint64_t needed_bytes = 0;  // of the clusters that were missing
    uint64_t n_waves = 0;       // beyond the first
    uint64_t stall_ns = 0;
};

class NeuronStore {
public:

    // tag_bits: of all reads of this store; the 8 low bits of a tag are theirs
    NeuronStore(const Index & index, std::vector<std::unique_ptr<Device>> & devices, uint64_t tag_bits);

    bool empty() const { return layers_.empty(); }
    const NeuronLayer * layer(uint32_t i) const { return &layers_[i]; }
    int32_t layer_of_block(int32_t block) const;
    bool faithful() const { return faithful_; }

    // What it takes: always, at least for clusters, and for all clusters.
    uint64_t resident_bytes() const;
    uint64_t min_cache_bytes() const;
    uint64_t all_cache_bytes() const;

    // Which neurons count as zero in graphs that begin from now on. Any thread.
    void set_fidelity(Fidelity fidelity);
    std::shared_ptr<const Fidelity> fidelity() const;
    // its thresholds, as change_thresholds() changes them
    void set_thresholds(const int32_t * blocks, const float * values, size_t n_values, double max_kl);

    // ---- only while no graph runs
    void load(); // the resident parts; throws
    void set_scheduler(Scheduler * scheduler) { scheduler_ = scheduler; }
    void set_capacity(uint64_t n_bytes, const std::string & policy, const PolicyParams & params);
    void set_policy(const std::string & policy, const PolicyParams & params);
    // fill what is free with the hottest clusters; waits for the reads; throws
    void fill();

    // ---- runs; entries are set. One thread: take the first wave.
    void begin(NeuronRun & run, int n_threads);
    // any thread: sleep until wave number `wave` is in memory; false: failed
    bool wait_wave(NeuronRun & run, uint32_t wave);
    // any thread, when it has finished its rows of the wave: until all have
    bool wait_rows(NeuronRun & run);
    // the last thread of a wave: let go of it, take the next one if there is one
    void next_wave(NeuronRun & run, int n_threads);
    void release(NeuronRun & run); // whatever it holds; also after a failure
    ls_error error() const;
    // first group of the wave that belongs to no earlier rounding block than `group` does; one past the block of `group`
    static uint32_t block_start(const NeuronRun & run, uint32_t group);
    static uint32_t block_end(const NeuronRun & run, uint32_t group);

    void on_read(const ReadRequest & request, int error);

    uint64_t capacity_bytes() const;
    NeuronCounters counters() const;
    void reset_counters();

private:
    enum State : uint8_t { kAbsent, kLoading, kReady };

    struct Pool {
        uint64_t slot_bytes;
        uint32_t first_unit, n_units;
        std::unique_ptr<SlotCache> cache;
    };
    // One read: neighbouring clusters, through a buffer, because in memory they lie elsewhere and closer.
    struct Read {
        uint32_t layer, first, n; // clusters; those in `units` are wanted
        std::vector<uint32_t> units;
    };
    using Lock = std::unique_lock<std::mutex>;

    static constexpr uint32_t kMaxRuns = 8;  // bits of a wait mask
    static constexpr uint32_t kBuffers = 48; // reads in flight or about to be

    void form_layers();
    void form_pools();
    uint64_t share_of(const Pool & pool, uint64_t n_bytes) const;
    uint32_t min_slots(const Pool & pool) const;
    static uint32_t block_of(const NeuronRun & run, uint32_t group);
    uint8_t * memory(uint32_t unit) const;
    bool take_wave_locked(NeuronRun & run, std::vector<uint32_t> & missing);
    bool pin_locked(NeuronRun & run, const NeuronLayer & layer, uint32_t unit, std::vector<uint32_t> & missing);
    bool admit_locked(uint32_t unit, bool cold);
    void unpin_locked(NeuronRun & run);
    void start_reads_locked(std::vector<uint32_t> & missing, Priority priority);
    void start_next_locked();
    void set_all_ready_locked();
    void begin_wave(NeuronRun & run, int n_threads);
    void point_at_records(NeuronRun & run) const;
    void pin_hot_locked();
    const uint8_t * load_tensor(int32_t id, AddressSpace & space);

    const Index & index_;
    std::vector<std::unique_ptr<Device>> & devices_;
    uint64_t tag_bits_;
    bool faithful_ = false;
    std::shared_ptr<const Fidelity> fidelity_; // guarded by mutex_, never null
    Scheduler * scheduler_ = nullptr;

    std::vector<NeuronLayer>  layers_;
    std::vector<AddressSpace> resident_;     // planes, permutations, checksums, sketches
    uint64_t                  alignment_ = 4096; // of reads
    uint64_t                  buffer_bytes_ = 0;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Pool>     pools_;
    std::vector<uint32_t> layer_of_unit_;    // by unit
    std::vector<uint8_t>  state_;            // by unit
    std::vector<uint8_t>  verified_;         // by unit: its checksum was right
    std::vector<uint8_t>  waiting_;          // by unit: runs that wait for it
    std::vector<uint32_t> stamp_;            // by unit: the last wave that pinned it
    uint32_t              stamp_now_ = 0;
    std::vector<uint32_t> hot_;              // units pinned because they are hot
    std::vector<NeuronRun *> runs_;          // [id]
    uint64_t n_ready_ = 0;
    bool capacity_is_all_ = false;
    std::atomic<bool> all_ready_{false};     // every cluster is there and none can go: runs need no lock

    AddressSpace         buffers_;
    std::vector<Read>    reads_;             // [buffer]
    std::vector<uint32_t> free_buffers_;
    std::deque<std::pair<Read, Priority>> queued_; // for want of a buffer
    uint32_t             n_loading_ = 0;     // clusters
    ls_error             error_ = {};
    NeuronCounters       counters_;
};

} // namespace ls
