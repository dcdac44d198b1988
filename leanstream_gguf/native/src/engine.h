// Residency: loads weights, keeps them while they are used, and holds the whole to the plan. One lock guards it all;
// reads complete on readers' threads, compute threads wait on one condition variable.
#pragma once

#include "cache.h"
#include "device_neurons.h"
#include "device_tier.h"
#include "index.h"
#include "leanstream.h"
#include "neurons.h"
#include "plan.h"
#include "repacked.h"
#include "scheduler.h"
#include "session.h"
#include "speculation.h"
#include "trace.h"
#include "weights.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ls {

enum class Load : uint8_t { absent, loading, ready, failed };

struct EngineOptions {
    IoOptions io;
    bool      direct_io = true;
    uint64_t  chunk_bytes = 1u << 20;
    uint32_t  n_ring_slots = 0; // 0 = chosen by the plan
    bool      repack = false;   // matrices in llama.cpp's repacked form; they all stay in memory then
};

// Bytes that are not weights; see ls_memory.
struct FixedMemory {
    uint64_t baseline = 0, metadata = 0, kv = 0, compute = 0, margin = 0; // in host memory
    uint64_t device_driver = 0, device_kv = 0, device_compute = 0, device_margin = 0;
    uint64_t sum() const { return baseline + metadata + kv + compute + margin; }
    uint64_t device_sum() const { return device_driver + device_kv + device_compute + device_margin; }
};

class Engine final : public ReadSink {
public:
    Engine(const Index & index, const EngineOptions & options);
    ~Engine() override;

    Weights weights;
    std::unique_ptr<NeuronStore> neurons; // empty for files that are not rearranged
    std::unique_ptr<Repacked> repacked;   // nullptr: weights keep the file's layout

    // ---- plan and budget
    PlanInput plan_input(const FixedMemory & fixed, uint64_t budget_bytes, uint64_t cache_bytes) const;
    // Freeze what is known of the weights, apply the plan, read what is pinned; returns when it is in memory. Throws.
    void activate(const FixedMemory & fixed, uint64_t budget_bytes, uint64_t cache_bytes);
    // Takes effect when no context is inside a graph; waits for that. Throws Error(LS_ERR_BUDGET) and changes nothing.
    void set_budget(uint64_t budget_bytes, uint64_t cache_bytes);
    void set_policy(const std::string & name, const PolicyParams & params);
    void pin_experts(int32_t block, const int32_t * ids, size_t n_ids);
    bool activated() const;
    // The memory of the weights is about to go: returns when no read can land there any more.
    void abandon_reads() { scheduler_->cancel(); }

    // ---- contexts
    void add_session(Session & session);
    // a graph of this context was built: its number of tokens, the work buffer it will need, the dense groups it holds at one time
    void note_graph(Session & session, const ggml_cgraph * graph, int64_t n_tokens, uint64_t work_bytes, uint32_t n_held_at_once);
    // Around each graph. begin() throws on a changed file, a model that is not activated, or a context beyond the budget.
    void begin(Session & session, const ggml_cgraph * graph);
    void end(Session & session);
    void forget(Session & session); // the context is freed
    void fail(Session & session, const ls_error & error);

    // ---- dense groups (engine_dense.cpp); called by one thread of a graph
    void acquire_group(Session & session, uint32_t group);
    void release_group(Session & session, uint32_t group);
    // false: every group is pinned; does not change inside a graph; lock-free
    bool streams_dense() const { return streams_dense_.load(std::memory_order_relaxed); }
    // true: pinned and in memory, nothing to wait for; lock-free
    bool group_is_pinned_ready(uint32_t group) const { return pinned_ready_[group].load(std::memory_order_acquire); }
    // thread 0 is through the acquire node
    void publish_acquired(Session & session, const ggml_tensor * node);
    // other threads of the graph sleep here until then, or until the group is pinned and in memory: thread 0 may have seen that
    // and gone on without a word
    void wait_acquired(Session & session, const ggml_tensor * node, uint32_t group);
    // rows of a weight that is read row by row: bytes of each row to dest[i] (row_bytes each). False: failed.
    // bytes of a file, at once, on the calling thread; false on error. For llama.cpp's rare looks at a weight.
    bool read_now(uint32_t shard, uint64_t offset, uint64_t n_bytes, uint8_t * dest);
    bool read_rows(Session & session, const Weight & weight, const int32_t * rows, size_t n_rows, uint8_t * dest);

    // ---- experts (engine_moe.cpp)
    // One thread: pin what the run needs, or choose waves; start the reads.
    // logits: [n_experts] of the router for a single token, or nullptr
    void moe_begin(Session & session, MoeRun & run, const float * logits);
    void moe_end(MoeRun & run);
    // any thread
    void wave_enter(MoeRun & run, uint32_t part);
    void wave_computed(MoeRun & run, uint32_t part, uint32_t k);
    // experts[k]'s part can be computed now (or has failed, or the session has)
    bool part_settled(const MoeRun & run, uint32_t part, uint32_t k) const;
    bool expert_settled(const MoeRun & run, uint32_t k) const; // all of its parts
    // sleep until a part, or all parts (-1), of one of the pending experts are settled
    void wait_part(Session & session, MoeRun & run, int32_t part, const std::vector<uint32_t> & pending, bool count_stall);
    // first byte of the part in memory, or nullptr if its read failed (the session then has the error)
    const uint8_t * part_data(Session & session, const MoeRun & run, uint32_t part, uint32_t k);

    // ---- reading ahead of a layer's choice (speculation.cpp)
    void note_router(uint32_t layer, const Router & router);
    void set_speculation(uint32_t depth, uint32_t stages);
    void trace_begin(const std::string & path, const std::string & note);
    void trace_end();
    const Router & router(uint32_t layer) const { return spec_.routers[layer]; }
    // scores: [n_experts] of the layer, from one token's residual
    void guessed(Session & session, uint32_t layer, uint8_t lead, const float * scores);
    std::string speculation_json() const; // as ls_model_speculation_json()
    // ---- the device (engine_device.cpp)
    void use_device(std::unique_ptr<DeviceTier> tier); // before the first graph
    DeviceTier * device() const { return device_.get(); } // nullptr: everything runs on the host
    void set_device_budget(uint64_t n_bytes) { device_budget_bytes_ = n_bytes; } // before activation; 0 = what is free
    uint64_t device_budget_in_force(const FixedMemory & fixed, bool allocated) const;
    // allocated: llama.cpp holds its context on the device already
    DevicePlan plan_device(const FixedMemory & fixed, bool allocated);
    // Pins experts[first ..] in host memory, as many as there is room for, and starts their reads; returns the first one that
    // found none. cold: for one pass.
    size_t fetch_experts(uint32_t layer, const std::vector<uint32_t> & experts, size_t first, bool cold);
    // p: [n_experts] how probable the use of each is at the layer's next turn; 0 for those in its slots. Reads what is likely enough.
    void ranked(Session & session, uint32_t layer, uint32_t n_used, const std::vector<float> & p);
    void pass_ahead(uint32_t layer); // the layer has chosen, and what it uses is fetched
    bool expert_ready(uint32_t layer, uint32_t expert) const; // in host memory; lock-free
    bool has_room(uint32_t n) const; // n experts can be pinned in host memory beside what is
    bool wait_expert(Session & session, uint32_t layer, uint32_t expert); // false: its read failed, the session has the error
    const uint8_t * expert_memory(uint32_t layer, uint32_t part, uint32_t expert) const;
    uint32_t unit_of(uint32_t layer, uint32_t expert) const;
    void release_experts(const std::vector<uint32_t> & units);
    void wait_for_room(); // until a pin or a read is done
    bool group_ready(uint32_t group) const { return Load(group_state_[group].load(std::memory_order_acquire)) == Load::ready; }

    // ---- numbers
    void get_stats(ls_stats & out) const;
    void reset_stats();
    void get_memory(ls_memory & out) const;
    Plan current_plan() const;
    FixedMemory fixed() const;
    uint64_t budget_bytes() const;
    const std::vector<std::string> & warnings() const { return warnings_; }

    void on_read(const ReadRequest & request, int error) override;

private:
    struct alignas(8) RowBatch { uint32_t n_pending = 0; int error = 0; };
    struct Ring {
        struct Slot { int32_t group = -1; bool consumed = true; };
        AddressSpace space;
        std::vector<Slot> slots;
    };
    using Lock = std::unique_lock<std::mutex>;

    enum Kind : uint64_t { kResident = 0, kGroup = 1, kPart = 2, kRows = 3, kNeurons = 4, kRecord = 5 };
    static uint64_t tag(Kind kind, uint64_t id) { return id << 3 | kind; }

    PlanInput plan_input_locked(const FixedMemory & fixed, uint64_t budget_bytes, uint64_t cache_bytes) const;
    void apply_locked(Lock & lock, const Plan & plan);
    // loads: the reads of newly pinned groups, for the caller to submit
    void apply_dense_locked(const Plan & plan, std::vector<std::vector<ReadRequest>> & loads);
    void load_resident(Lock & lock);
    void load_expert_checksums();
    void load_device(Lock & lock);
    void lock_host_pages_locked();
    void measure_host_cost_locked();
    void check_device_locked(const FixedMemory & fixed) const;
    bool device_streams() const { return device_ && device_->activated() && device_->plan().streams(); }
    std::vector<ReadRequest> start_all_experts_locked();
    void prefer_large_pages_locked(const Plan & plan);
    void rebuild_cache_policy_locked();
    void wait_idle_locked(Lock & lock);
    void record_read_error(const ReadRequest & request, int error);
    void release_all_locked(Session & session);
    void charge_locked(Lock & lock, Session & session);
    void wait_reconfigured_locked(Lock & lock);
    void reconfigure_locked(Lock & lock, const Plan & plan);
    void check_kept_locked(const std::vector<bool> & kept, const Plan & plan) const;

    void use_zeros_locked(Session & session, uint32_t g);
    bool zeros_in_use_locked(uint32_t g) const { return group_zeroed_[g] && group_pins_[g] > 0; } // by a context that failed
    void hold_group_locked(Session & session, uint32_t g);
    uint8_t * member_memory(uint32_t g, int32_t slot, size_t i) const;
    void place_group(uint32_t g, int32_t slot);
    std::vector<ReadRequest> start_group_locked(uint32_t g, Priority priority); // the caller submits
    void submit_group_locked(uint32_t g, Priority priority);
    int32_t slot_for_locked(uint32_t g, uint32_t from, bool demand) const;
    void give_slot_locked(uint32_t g, int32_t slot);
    void readahead_locked(uint32_t from);
    uint32_t distance(uint32_t from, uint32_t to) const;

    bool pin_run_locked(MoeRun & run);
    void unpin_run_locked(MoeRun & run);
    // adds the reads of a part to out, if it needs any; the caller submits
    // rearranged file: the whole record, unless a part of it is there or `alone` is wanted
    void start_part_locked(uint32_t layer, uint32_t expert, uint32_t part, Priority priority, std::vector<ReadRequest> & out,
                           bool alone = false);
    bool start_record_locked(uint32_t layer, uint32_t expert, Priority priority, std::vector<ReadRequest> & out);
    Error corrupt_expert(uint32_t unit) const;
    bool record_read(const ReadRequest & request, int error); // true: the record is done
    bool admit_locked(uint32_t unit, bool cold);
    void drop_parts_locked(uint32_t unit);
    void pump_wave_locked(MoeRun & run);
    void read_ahead_batch_locked(const MoeRun & run);
    void update_all_ready_locked();
    bool whole_unit_locked(uint32_t unit, uint32_t n_parts) const;
    std::atomic<uint8_t> & part_state(uint32_t unit, uint32_t part) const { return part_state_[unit * MoeLayer::kMaxParts + part]; }
    void wait_locked(Lock & lock, bool count_stall);

    void prepare_speculation_locked();
    void begin_speculation_locked(Session & session, const ggml_cgraph * graph);
    void end_speculation_locked(Session & session);
    void add_speculation_locked(ls_stats & out) const;
    void read_ahead_guessed_locked(uint32_t layer, uint32_t n_used, Priority priority, const std::vector<float> & p);
    void pass_ahead_locked(uint32_t layer);
    bool admit_ahead_locked(uint32_t unit);
    bool cancel_ahead_locked(uint32_t layer, uint32_t expert);
    void promote_unit_locked(uint32_t layer, uint32_t expert, Priority priority);
    void note_withdrawn_locked(uint32_t unit, uint64_t n_bytes);
    void note_evicted_locked(const std::vector<uint32_t> & evicted);
    uint64_t unit_part_bytes(uint32_t unit) const;
    Arrival arrival_locked(uint32_t unit, uint32_t n_parts) const;
    void chosen_locked(Session & session, const MoeRun & run, const float * logits, bool pass);
    void settle_use_locked(uint32_t unit, Arrival arrival);
    void learn_guesses_locked(Session & session, uint32_t layer, const std::vector<uint32_t> & used);

    const Index & index_;
    EngineOptions options_;
    std::vector<std::unique_ptr<Device>> devices_; // [shard]
    std::vector<std::string> warnings_;

    mutable std::mutex mutex_;
    std::condition_variable changed_;   // a read finished, a pin was released, a graph ended
    bool activated_ = false;
    bool reconfiguring_ = false;
    uint32_t n_active_ = 0;             // contexts inside a graph
    uint32_t held_at_once_ = 0;         // dense groups they may hold together
    std::vector<Session *> sessions_;

    FixedMemory fixed_;
    Plan        plan_;
    uint64_t    budget_bytes_ = 0;
    uint64_t    cache_bytes_ = 0;

    // dense
    std::unique_ptr<std::atomic<uint8_t>[]> group_state_;
    std::unique_ptr<std::atomic<bool>[]>    pinned_ready_;
    std::atomic<bool>     streams_dense_{false};
    std::vector<uint32_t> group_pending_;
    std::vector<int32_t>  group_slot_;     // [group] ring slot, or -1
    std::vector<uint32_t> group_pins_;
    std::vector<bool>     group_pinned_;
    std::vector<uint32_t> next_streamed_;  // [group] next one in graph order that is not pinned
    Ring ring_;
    AddressSpace zeros_;                   // as large as the largest group, never written
    std::vector<bool>     group_zeroed_;   // its tensors point at zeros_
    uint32_t resident_pending_ = 0;

    // experts
    std::unique_ptr<SlotCache> cache_;
    std::string  policy_name_ = "lfu"; // fewest misses on measured routing (scripts/bench/LOG.md)
    PolicyParams policy_params_;
    std::unique_ptr<std::atomic<uint8_t>[]> part_state_;
    std::vector<uint32_t> part_pending_;
    std::vector<uint32_t> record_pending_; // [unit] reads of its whole record
    std::vector<bool>     record_verified_; // [unit] its checksum was right
    std::vector<uint32_t> expert_checksums_; // [unit]
    std::vector<uint32_t> layer_of_unit_;
    std::vector<bool>     kept_;           // [unit] pinned by the user
    uint64_t n_parts_missing_ = 0;         // parts of all units that are not ready
    std::atomic<bool>     experts_ready_{false};  // every expert is in memory and none can be given up
    std::atomic<uint64_t> ready_hits_{0};

    Speculation spec_;
    std::vector<float> scores_, margin_;   // of the layer at hand
    std::unique_ptr<DeviceTier> device_;
    std::unique_ptr<DeviceNeuronTensors> device_neurons_;
    uint64_t device_budget_bytes_ = 0;
    uint64_t device_fixed_bytes_ = 0; // that the device's plan was made with

    ls_error read_error_ = {};
    ls_stats stats_ = {};
    IoCounters io_base_;
    uint64_t epoch_ = 0;

    std::unique_ptr<Scheduler> scheduler_; // last: its threads use everything above
};

} // namespace ls
