// The device (GPU) tier of a model: twins of its weights in device memory, slots for experts, stages for what passes through.
// Weights keep their place in our buffer type; the graph pass puts a twin in their stead where their block runs on the device.
#pragma once

#include "device_plan.h"
#include "memory.h"
#include "policy.h"
#include "weights.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ls {

class Engine;
struct MoeRun;
struct Session;

// Which blocks run on the device, in llama.cpp's terms: n_gpu_layers counts backwards from the output, which is the first to go there.
struct DevicePlacement {
    ggml_backend_dev_t device = nullptr;
    int32_t first_block = 0; // this and later blocks
    bool inexact = false;    // missing experts may be computed on the host
    double host_cost = 0;    // of that, in copies of an expert; 0 = measured
};

struct DeviceCounters {
    std::atomic<uint64_t> copied_bytes{0}; // host to device, while the model is used
    std::atomic<uint64_t> hits{0}, misses{0};
    std::atomic<uint64_t> syncs{0};        // times the host waits for the device: by llama.cpp's scheduler for our nodes, and by us
    std::atomic<uint64_t> on_host{0};      // of the misses, computed there
    void reset() { copied_bytes = hits = misses = syncs = on_host = 0; }
};

class DeviceTier {
public:
    // Batches of at most this many tokens are computed from slots. On every backend the kernel for so few tokens treats each row
    // alone, so that neither the number of slots nor their order can change a bit; larger batches need the stacked tensor whole,
    // as a stage, because some kernels split their sums by the number of experts.
    static constexpr int64_t kSlotTokens = 4;

    DeviceTier(const DevicePlacement & placement, uint32_t n_tensors, uint32_t n_expert_used);
    ~DeviceTier();

    // ---- which weights (while graphs are learned)
    // true: this weight is used on the device by this node
    bool places(const Weight & w, const ggml_tensor * node, int source) const;
    bool has_block(int32_t block) const { return block >= placement_.first_block; }

    // ---- plan
    DevicePlanInput plan_input(Weights & weights, uint64_t fixed_bytes, uint64_t budget_bytes);
    const DevicePlan & plan() const { return plan_; }
    bool activated() const { return activated_; }
    // device memory now, as the driver says
    void memory(uint64_t & free_bytes, uint64_t & total_bytes) const;
    uint64_t driver_bytes() const { return driver_bytes_; } // in use when the model was opened: the driver's context
    uint64_t margin_bytes() const;   // for what backends allocate while they run
    uint64_t headroom_bytes() const; // that an automatic budget leaves to others
    std::string description() const;
    ggml_backend_dev_t device() const { return placement_.device; }
    ggml_backend_buffer_type_t buffer_type() const { return buffer_type_; }

    // What the plan makes of each block and layer; decides what the host need not hold. Then allocate() makes twins, slots and
    // stages. Throws Error(LS_ERR_MEMORY).
    void choose(Weights & weights, const DevicePlan & plan);
    void allocate(Weights & weights);
    // what to read at activation: resident twins, and for partial layers the experts 0 .. n_slots
    struct Load {
        static constexpr uint32_t kUnchecked = UINT32_MAX;
        struct Part { ggml_tensor * twin; uint64_t from, at, n_bytes; }; // from: in what is read, at: in the twin
        uint32_t shard;
        uint64_t offset, n_bytes; // in the file
        uint32_t unit;            // the expert whose whole record this is: it has a checksum
        std::vector<Part> parts;
    };
    std::vector<Load> loads(const Weights & weights);
    bool group_resident(const DenseGroup & g) const; // its matrices stay on the device: needs no host memory
    bool layer_resident(uint32_t layer) const;       // all its experts stay on the device
    bool has_slot(uint32_t layer, uint32_t expert) const;

    // ---- graph pass
    ggml_tensor * twin(const Weight & w); // nullptr after activation for a weight that no earlier graph used
    ggml_tensor * slots(const Weight & w);
    ggml_tensor * ids(uint32_t layer, int64_t n_used, int64_t n_tokens);
    // float32 [1, n_used, n_tokens]: 1 for the rows of ids() that the device computes, 0 for those that the host does
    ggml_tensor * mask(uint32_t layer, int64_t n_tokens) { return layers_.at(layer).masks.at(size_t(n_tokens - 1)); }
    bool inexact() const { return placement_.inexact; }
    bool uses_slots(uint32_t layer, int64_t n_used, int64_t n_tokens) const; // else a stage
    bool streams_layer(uint32_t layer) const;  // its experts pass through slots and stages (before activation: assume so)
    int32_t layer_to_rank(uint32_t layer) const; // whose experts to rank at this layer; -1 = none
    int32_t streamed_block(int32_t block) const; // index among the blocks that pass through stages, or -1
    uint32_t n_streamed_blocks() const { return uint32_t(streamed_blocks_.size()); }
    uint32_t groups_held() const; // dense groups that a graph holds at once for copying

    // ---- while graphs run; on the thread that runs the scheduler, one context at a time (device_run.cpp)
    struct Choice {
        uint32_t layer;
        const ggml_tensor * ids;
        const ggml_tensor * ranked; // int32 [n_experts, n_tokens] on the device, experts of layer_to_rank(layer), or nullptr
        MoeRun * host_run;          // where the host computes some of them: what it has to, begun; otherwise nullptr
        int n_threads;
    };
    void select(Engine & engine, Session & session, const Choice & choice); // few tokens
    void stage (Engine & engine, Session & session, uint32_t layer, const ggml_tensor * ids); // many tokens
    void acquire(Engine & engine, Session & session, uint32_t streamed_block);
    void end(Engine & engine, Session & session); // waits for the device if it still copies

    // ---- host memory that the device reads
    void lock_pages(uint8_t * from, size_t n_bytes); // page-aligned; a hint
    void unlock_all_pages();

    void set_policy(const std::string & name, const PolicyParams & params);
    // before the first graph, when host memory is filled: measured if it is not given and anything streams
    void set_host_cost(const Engine & engine, int n_threads);
    // the host's memory does not hold all experts that the device lacks
    void set_from_drive(bool value) { from_drive_ = value; }
    double host_cost() const { return activated_ && inexact() ? placement_.host_cost : 0; }
    DeviceCounters counters;

private:
    struct Layer { // of experts
        std::vector<ggml_tensor *> stacked; // [part] as in the file: resident, or the layer's stage
        std::vector<ggml_tensor *> slots;   // [part] [n, m, n_slots]
        std::vector<ggml_tensor *> ids;     // [n_tokens - 1] remapped, all at one place
        std::vector<ggml_tensor *> masks;   // [n_tokens - 1] likewise, if inexact
        int32_t * ids_host = nullptr;       // in pinned_, as ids
        float * mask_host = nullptr;
        std::vector<int32_t> slot_of;       // [expert] or -1
        std::vector<int32_t> expert_of;     // [slot] or -1
        std::vector<uint64_t> used_in;      // [slot] number of the run that last used it
        std::unique_ptr<Policy> policy;     // over experts that have a slot
        int32_t next_streamed = -1;
        int32_t stage = 0;
        uint32_t order = 0;                 // among the layers that stream
        bool resident = false;
    };
    struct Stage {
        ggml_backend_buffer_t buffer = nullptr;
        ggml_backend_event_t  filled = nullptr;
        int32_t owner = -1;            // layer or streamed block whose data it holds or receives
        std::vector<uint8_t> have;     // [expert]
        std::vector<uint32_t> units;   // experts in host memory that are being copied
        std::vector<uint32_t> groups;  // dense groups, likewise
    };
    // Experts that are copied to slots ahead of their layer.
    struct Ahead {
        ggml_backend_event_t copied = nullptr;
        int32_t layer = -1;
        bool    waited = false;             // the device waits for it before the layer: done at the next layer
        std::vector<uint32_t> units;
    };
    struct Ranking { int32_t layer = -1; int64_t n_tokens = 0; int32_t * experts = nullptr; }; // on its way to the host, or there; until the layer chose
    struct StreamedBlock { std::vector<Weight *> members; std::vector<uint32_t> groups; };

    ggml_tensor * new_tensor(const Weight & w, int64_t n_stacked);
    void add_expert_loads(const MoeLayer & moe, Layer & l, std::vector<Load> & out);
    void make_resident(Weights & weights);
    void make_stages();
    void place_all(const std::vector<ggml_tensor *> & tensors);
    ggml_backend_buffer_t new_buffer(uint64_t n_bytes);
    uint64_t room_for(ggml_tensor * t) const;
    ggml_backend_t copier(Session & session) const;
    void copy_in(ggml_backend_t via, ggml_tensor * dst, uint64_t offset, const uint8_t * src, uint64_t n_bytes);
    void put_expert(Engine & engine, ggml_backend_t via, uint32_t layer, uint32_t expert, const std::vector<ggml_tensor *> & to, uint32_t at);
    bool fill_stage(Engine & engine, Session & session, uint32_t layer, const std::vector<uint8_t> & wanted, bool wait);
    void bring_to_slots(Engine & engine, Session & session, uint32_t layer, std::vector<uint32_t> & missing, size_t started);
    void stage_from_slot(ggml_backend_t via, Layer & l, uint32_t expert);
    void zero_gaps(ggml_backend_t via, Layer & l, const Stage & s);
    void recycle_stage(Engine & engine, Session & session, Stage & s, int32_t owner);
    bool copy_block(Engine & engine, Session & session, uint32_t streamed_block, bool wait);
    int32_t free_slot(Layer & l);
    void make_pinned();
    // device_ahead.cpp
    void settle_ahead(Engine & engine, Session & session, uint32_t layer);
    void copy_ahead(Engine & engine, uint32_t layer);
    void take_ranking(Session & session, uint32_t layer, const ggml_tensor * ranked);
    Ranking * ranking_of(uint32_t layer);
    void learn_ranking(uint32_t layer, const ggml_tensor * ids);
    void read_ahead(Engine & engine, Session & session, uint32_t layer);
    bool give_slot(Layer & l, uint32_t expert, bool used);
    std::vector<uint32_t> leave_to_host(Engine & engine, uint32_t layer, std::vector<uint32_t> & missing);
    void send_ids(Session & session, const Choice & choice, const std::vector<uint32_t> & on_host);

    std::mutex mutex_; // slots, stages and policies
    DevicePlacement placement_;
    ggml_backend_buffer_type_t buffer_type_ = nullptr;
    uint64_t alignment_ = 0;
    uint32_t n_expert_used_ = 0;
    uint64_t driver_bytes_ = 0;
    bool activated_ = false;
    bool copies_beside_ = false; // the backend can copy while it computes, in order through events
    DevicePlan plan_;

    ggml_context * ctx_ = nullptr;
    ggml_backend_t copy_backend_ = nullptr;
    ggml_backend_buffer_t unallocated_ = nullptr; // of twins before activation: names the buffer type, holds nothing
    std::vector<ggml_backend_buffer_t> buffers_;
    std::unordered_map<const Weight *, ggml_tensor *> twins_;
    std::unordered_map<const Weight *, ggml_tensor *> slot_twins_;
    std::vector<Layer> layers_;         // [moe layer]
    std::vector<StreamedBlock> streamed_blocks_;
    std::unordered_map<int32_t, int32_t> streamed_of_block_;
    std::vector<Stage> block_stages_, expert_stages_;
    std::vector<uint32_t> slot_units_;  // experts in host memory that are being copied into slots
    ggml_backend_buffer_t pinned_ = nullptr; // small host memory that the device reads and writes
    std::vector<int32_t> unpinned_;          // the same, where the backend has none
    Ahead ahead_[2];
    Ranking rankings_[2];
    std::vector<float> rank_p_; // [place in a ranking] how probable a use is
    std::vector<float> p_;      // of the layer at hand
    std::atomic<bool> from_drive_{false};
    std::string policy_name_ = "lfu";
    PolicyParams policy_params_;
    uint64_t n_runs_ = 0;
    std::vector<uint8_t *> locked_pages_;
    bool (*lock_pages_)(void *, size_t) = nullptr;
    void (*unlock_pages_)(void *) = nullptr;
};

} // namespace ls
