// What one llama_context holds while it decodes: pins, routing of the layer at hand, and its sticky error.
#pragma once

#include "neuron_run.h"
#include "speculation.h"
#include "status.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

struct ggml_cgraph;
struct llama_context;

namespace ls {

class Engine;

// One routing decision of one micro-batch, from the remap to the end of the last product that uses it.
struct MoeRun {
    struct Row {
        int32_t slot;  // which of the token's n_expert_used
        int32_t token;
    };

    uint32_t layer = 0;
    bool     active = false;
    bool     wave = false;            // the experts do not fit at once: they are loaded, used and released one by one
    std::vector<int32_t> experts;     // [n_distinct] in the order of computation: resident ones first
    std::vector<uint32_t> first_row;  // [n_experts + 1] rows of expert e are rows[first_row[e] .. first_row[e + 1])
    std::vector<Row>      rows;       // [n_used * n_tokens]
    uint32_t n_here = 0;              // experts[0 .. n_here) are computed product by product, the others are awaited (awaited_experts.h)
    bool     may_await = false;

    // guarded by the engine's lock
    std::vector<uint8_t> pinned;      // [n_distinct]
    int32_t  wave_part = -1;
    uint32_t wave_next = 0;           // experts[0 .. wave_next) have been given a slot for wave_part
    uint32_t wave_in_hand = 0;        // of those, not yet computed

    // shared between compute threads
    std::unique_ptr<std::atomic<uint8_t>[]>  assigned;  // [n_distinct] wave only
    std::unique_ptr<std::atomic<int32_t>[]>  next_chunk; // [n_parts][n_distinct]
    std::unique_ptr<std::atomic<int32_t>[]>  threads_left; // [n_parts][n_distinct]
    std::unique_ptr<std::atomic<uint8_t>[]>  progress;   // [n_distinct] awaiting only: how far the expert is
    std::atomic<int32_t> threads_in_part[4] = {}; // threads that have not finished the product of a part
    std::atomic<uint32_t> n_summed{0};  // awaiting only: experts whose output is complete
    std::atomic<uint32_t> n_guesses{0}; // awaiting only: made on some experts' outputs about the next layer
    std::atomic<bool> guessing{false};  // one of them is being made
    size_t room = 0;                  // n_parts * n_distinct that fit the arrays above

    bool awaits() const { return n_here < experts.size(); }
    void reserve_counters(uint32_t n_parts, int n_threads);
};

struct Session {
    static constexpr uint32_t kRuns = 4; // routing decisions that may overlap in a graph
    static constexpr uint32_t kNeuronRuns = 2; // layers that may overlap

    Engine * engine = nullptr;
    const llama_context * context = nullptr;
    ggml_backend_t device_backend = nullptr; // llama.cpp's own, of the device that streamed blocks run on

    // the sticky error; written once per decode under the engine's lock
    std::atomic<bool> failed{false};
    ls_error error = {};

    // guarded by the engine's lock
    bool active = false;
    bool charged = false;              // its memory is part of the plan
    uint64_t kv_bytes = 0;
    uint64_t compute_bytes = 0;
    uint64_t device_kv_bytes = 0, device_compute_bytes = 0;
    uint64_t output_bytes = 0;         // logits it may ask for
    uint64_t work_bytes = 0;           // largest work buffer of its graphs
    uint64_t fixed_bytes() const { return compute_bytes + work_bytes + output_bytes; }
    uint32_t n_held_at_once = 1;       // dense groups a graph of this context needs at one time
    std::vector<uint32_t> held_groups;

    std::atomic<const ggml_tensor *> acquired{nullptr}; // the acquire node that is done
    std::shared_ptr<const Fidelity> fidelity; // of the graph being run
    MoeRun runs[kRuns];
    NeuronRun neuron_runs[2 * kNeuronRuns]; // of the sums, and of the decisions of layout faithful

    std::atomic<uint32_t> next_chunk[2] = {}; // of the products with repacked weights, in turn
    size_t tiled_bytes_per_thread = 0;
    std::vector<uint8_t> tiled_scratch;
    size_t awaited_bytes = 0;          // most that awaited_scratch takes
    std::vector<uint8_t> awaited_scratch; // of the experts that the product at hand awaits
    bool observed = false;             // somebody looks at the results of single nodes (llama.h's cb_eval)
    std::vector<std::pair<const ggml_cgraph *, int64_t>> graph_tokens; // of the graphs that may be run again
    std::atomic<int> guessing{0};      // threads through with the guess at hand
    uint8_t  lead = 0;                 // farthest lead whose guesses are read on, in this graph
    SpeculationSettings speculation;   // in this graph
    uint32_t part_guesses = 0;         // most guesses on some experts' outputs, each layer
    bool     measured = false;         // its time tells flow control something
    int64_t  n_tokens = 0;             // of the graph being run
    uint64_t begin_ns = 0;
};

} // namespace ls
