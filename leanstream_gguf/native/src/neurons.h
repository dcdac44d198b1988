// Neurons of rearranged layers (docs/lean_format.md): which of their clusters are in memory, and reading those that are not.
// A cluster is the unit of reading and of retention; its memory holds whole records, one for each neuron.
#pragma once

#include "cache.h"
#include "device.h"
#include "fidelity.h"
#include "index.h"
#include "memory.h"
#include "neuron_ahead.h"
#include "neuron_run.h"
#include "scheduler.h"
#include "status.h"
#include "trace.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ls {

struct NeuronCounters {
    uint64_t n_fired = 0;       // firing neurons, summed over layers and micro-batches
    uint64_t fired_bytes = 0;   // of their records
    uint64_t hits = 0, misses = 0, evictions = 0; // clusters
    uint64_t needed_bytes = 0;  // of the clusters that were missing
    uint64_t n_waves = 0;       // beyond the first
    uint64_t stall_ns = 0;
};

class Json;

class NeuronStore {
public:

    // tag_bits: of all reads of this store; the 8 low bits of a tag are theirs
    NeuronStore(const Index & index, std::vector<std::unique_ptr<Device>> & devices, uint64_t tag_bits);

    bool empty() const { return layers_.empty(); }
    const NeuronLayer * layer(uint32_t i) const { return &layers_[i]; }
    int32_t layer_of_block(int32_t block) const;
    bool faithful() const { return faithful_; }

    // The layer's leading neurons, those that the file holds for a device, are summed there. Before activation.
    void leave_to_device(uint32_t layer) { layers_[layer].first_cold = layers_[layer].shape->n_device; }

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

    // ---- while a layer decides for one token, any thread (neurons_early.cpp): values first .. last of its n_ff are there, and those
    // above `bound` will be needed. Reads of their clusters begin; begin() follows.
    void expect(NeuronRun & run, const NeuronLayer & layer, const float * values, uint32_t first, uint32_t last, float bound);
    // begin() does not follow: nothing was needed after all
    void forget_expected(NeuronRun & run);

    // ---- runs; entries are set. One thread: take the first wave. session: if the layer has just decided, for how many tokens;
    // nullptr: the candidates of layout faithful are being used, and the layer had its turn with them
    void begin(NeuronRun & run, int n_threads, const Session * session, int64_t n_tokens);
    // any thread: sleep until wave number `wave` is taken, so that what is in memory can be used; false: failed
    bool wait_taken(NeuronRun & run, uint32_t wave);
    // is an entry of the wave at hand in memory? lock-free
    bool arrived(const NeuronRun & run, uint32_t entry) const {
        const uint32_t unit = run.layer->first_unit + run.positions[entry] / run.layer->shape->cluster_size;
        return state_[unit].load(std::memory_order_acquire) == kReady;
    }
    // any thread: sleep until all of wave number `wave` is in memory; false: failed
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

    // ---- reading ahead of a layer's decision (neurons_ahead.cpp)
    // once for each layer, while graphs are built
    void note_decider(uint32_t layer, const Decider & decider);
    const Decider & decider(uint32_t layer) const { return deciders_[layer]; }
    void next_round(); // a token begins
    // is there anything that reading ahead could help? lock-free
    bool wants_guesses() const { return !empty() && !all_ready_.load(std::memory_order_relaxed); }
    // score: [n_ff] of the layer, from one token's residual
    void guessed(const Session & session, uint32_t layer, uint8_t lead, const float * score);
    void forget_guesses(const Session & session);
    void list_trace_layers(std::vector<TraceLayer> & out) const;
    // nullptr: record no more. first_layer: of those in the trace
    void set_trace(std::shared_ptr<TraceWriter> trace, uint32_t first_layer);
    AheadCounters ahead_counters() const;
    float least_p() const;
    // [{lead, at_k, at_2k, n, layers:[{layer, at_k, at_2k, n}]}]
    void write_recall(Json & j) const;

    void on_read(const ReadRequest & request, int error);

    uint64_t capacity_bytes() const;
    NeuronCounters counters() const;
    void reset_counters();

private:
    enum State : uint8_t { kAbsent, kLoading, kReady };

    struct Pool {
        uint64_t slot_bytes;
        uint32_t first_unit, n_units;
        std::unique_ptr<SlotCache> cache;   // of its units, counted from the first
        std::unique_ptr<UnitsAhead> ahead;  // likewise
    };
    // One read: neighbouring clusters, through a buffer, because in memory they lie elsewhere and closer.
    struct Read {
        uint32_t layer, first, n; // clusters; those in `units` are wanted
        Priority priority;
        std::vector<uint32_t> units;
        bool ahead() const { return priority == Priority::refined || priority == Priority::speculative; }
    };
    using Lock = std::unique_lock<std::mutex>;

    static constexpr uint32_t kMaxRuns = 8;  // bits of a wait mask
    static constexpr uint32_t kBuffers = 48; // reads in flight or about to be
    static constexpr uint32_t kAheadBuffers = 12; // of those, ahead of a decision: demand always finds one

    void form_layers();
    void form_pools();
    double demand_of(const Pool & pool) const;
    std::vector<uint64_t> shares_of(uint64_t n_bytes) const;
    uint32_t min_slots(const Pool & pool) const;
    uint32_t n_wanted(const Pool & pool) const; // units that may be needed
    static uint32_t block_of(const NeuronRun & run, uint32_t group);
    uint8_t * memory(uint32_t unit) const;
    bool take_wave_locked(NeuronRun & run, std::vector<uint32_t> & missing);
    bool pin_locked(NeuronRun & run, const NeuronLayer & layer, uint32_t unit, std::vector<uint32_t> & missing);
    bool admit_locked(uint32_t unit, bool cold);
    void unpin_locked(NeuronRun & run);
    bool expect_locked(NeuronRun & run, Pool & pool, uint32_t unit, std::vector<uint32_t> & missing);
    void release_early_locked(NeuronRun & run);
    void start_reads_locked(std::vector<uint32_t> & missing, Priority priority);
    void queue_locked(Read read);
    void start_next_locked();
    void release_buffer_locked(uint32_t buffer);
    void note_evicted_locked(Pool & pool, const std::vector<uint32_t> & evicted);

    void begin_turn_locked(const Session & session, const NeuronRun & run, int64_t n_tokens);
    void end_turn_locked(uint32_t layer);
    void learn_locked(const Session & session, const NeuronRun & run);
    void trace_guess_locked(uint32_t layer, uint8_t lead, const std::vector<float> & p);
    void trace_need_locked(const NeuronRun & run, int64_t n_tokens);
    void read_ahead_locked(uint32_t layer, uint8_t lead, const std::vector<float> & p);
    void rerank_locked(uint32_t layer, const std::vector<uint8_t> & unlikely, Priority priority);
    void forget_read_locked(const Read & read);
    void promote_locked(uint32_t unit);
    void hint_locked(uint32_t unit, float p);
    uint64_t tag_of(uint32_t buffer) const { return tag_bits_ | uint64_t(buffer) << 8; }
    void set_all_ready_locked();
    void begin_wave(NeuronRun & run, int n_threads);
    template <typename Condition> bool wait_for(NeuronRun & run, Condition condition);
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
    std::unique_ptr<std::atomic<uint8_t>[]> state_; // by unit; written under the lock
    std::vector<uint8_t>  verified_;         // by unit: its checksum was right
    std::vector<uint8_t>  waiting_;          // by unit: runs that wait for it
    std::vector<uint32_t> stamp_;            // by unit: the last wave that pinned it
    std::vector<uint8_t>  early_;            // by unit: its read began while its layer was deciding; counted as a miss
    uint32_t              stamp_now_ = 0;
    std::vector<uint32_t> hot_;              // units pinned because they are hot
    std::vector<NeuronRun *> runs_;          // [id]
    uint64_t n_ready_ = 0;
    bool capacity_is_all_ = false;
    std::atomic<bool> all_ready_{false};     // every cluster is there and none can go: runs need no lock

    AddressSpace         buffers_;
    std::vector<Read>    reads_;             // [buffer]
    std::vector<uint32_t> free_buffers_;
    std::deque<Read>     queued_;            // for want of a buffer, in order of priority
    uint32_t             n_ahead_buffers_ = 0;
    uint32_t             n_blocked_ = 0;     // runs that found no room
    uint32_t             n_loading_ = 0;     // clusters
    ls_error             error_ = {};
    NeuronCounters       counters_;

    std::vector<Decider>      deciders_;     // [layer]
    std::vector<NeuronsAhead> ahead_;        // [layer]
    AheadCounters             ahead_counters_;
    WasteLimit                waste_;
    std::vector<float>        p_, ranks_;    // scratch
    std::vector<uint8_t>      marks_;        // scratch
    std::vector<std::vector<float>> score_buffers_; // not in use
    std::shared_ptr<TraceWriter> trace_;
    uint32_t                  trace_first_layer_ = 0;
};

} // namespace ls
