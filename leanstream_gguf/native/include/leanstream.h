// leanstream.h - the one public C header of the streaming runtime.
//
// What it does: gives a llama.cpp model a buffer type whose tensors are read from the GGUF file by this library
// (never by llama.cpp's loader), rewrites each compute graph so that streamed weights are waited for just before their
// first use, and keeps what is resident under a budget in bytes.
//
// Life of a model:
//   1. ls_install()                      once a process, registers the hooks in the patched libllama
//   2. ls_model_open(path)               index of all shards, devices opened; nothing of the weights is read
//   3. ls_load_begin(model) ... llama_model_load_from_file(path) ... ls_load_end()   on one thread
//   4. llama_init_from_model(...)        graphs are reserved, weights get classified; repeat for more contexts
//   5. ls_model_activate(model, bytes)   plan, allocate, read what is pinned; decode works from here on
//   6. ls_model_set_budget / set_policy / pin / stats at any time, from any thread
//   7. llama_free(ctx), llama_model_free(...), ls_model_close(model)   in this order
//
// Rules: every function returns an ls_status and never throws, aborts or exits. On anything but LS_OK the details are
// in ls_last_error() of the calling thread. Strings returned through char ** are freed with ls_string_free().
// Sizes end in _bytes, times in _ns; n_ is a count; 0 means "none" unless the comment says otherwise.
// All functions are thread-safe, except that a model must not be closed while another call uses it.
//
// This header is parsed by _cffi_build.py: plain C declarations only, no macros in types.
#ifndef LEANSTREAM_H
#define LEANSTREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef LS_API
#  if defined(_WIN32)
#    ifdef LS_BUILD
#      define LS_API __declspec(dllexport)
#    else
#      define LS_API __declspec(dllimport)
#    endif
#  else
#    define LS_API __attribute__((visibility("default")))
#  endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ls_status {
    LS_OK              = 0,
    LS_ERR_ARGUMENT    = 1,   // a bad value in this call
    LS_ERR_NOT_FOUND   = 2,   // the file does not exist
    LS_ERR_UNREADABLE  = 3,   // the file exists but cannot be opened or read (permissions, directory)
    LS_ERR_FORMAT      = 4,   // not a GGUF file, or a corrupt one
    LS_ERR_TRUNCATED   = 5,   // shorter than its tensor table says (half-downloaded, .part, zero length)
    LS_ERR_ENDIAN      = 6,   // a big-endian GGUF
    LS_ERR_SHARD       = 7,   // a shard of a split set is missing or is not the first one
    LS_ERR_JOINED      = 8,   // shards joined with cat instead of gguf-split --merge
    LS_ERR_UNSUPPORTED = 9,   // an architecture or a use that is refused by name
    LS_ERR_BUDGET      = 10,  // the budget is below the minimum: asked in `used_bytes`, minimum in `limit_bytes`
    LS_ERR_READ        = 11,  // a read failed while the model was in use
    LS_ERR_CHANGED     = 12,  // the file changed or shrank while the model was in use
    LS_ERR_MEMORY      = 13,  // the system refused memory or address space
    LS_ERR_STATE       = 14,  // the call does not fit the model's state (not loaded, not activated, in use)
    LS_ERR_INTERNAL    = 15   // a bug in this library
} ls_status;

// Details of the last failure on the calling thread. Unused fields are 0 or "".
typedef struct ls_error {
    int32_t  status;         // ls_status
    int32_t  sys_errno;      // errno of the failing system call
    uint64_t offset_bytes;   // file offset of a failed read
    uint64_t used_bytes;     // what was asked for
    uint64_t limit_bytes;    // what would be needed, or the most there is
    char     path[1024];
    char     message[1024];  // one sentence: cause and remedy
} ls_error;

typedef struct ls_model ls_model;

typedef struct ls_options {
    uint32_t n_io_threads;      // readers; 0 = chosen (4)
    uint32_t io_depth;          // reads in flight for io_uring; 0 = chosen (16)
    uint32_t io_backend;        // 0 = best available, 1 = pread pool, 2 = io_uring
    uint32_t direct_io;         // 1 = bypass the page cache where the file system allows it (default), 0 = buffered
    uint64_t chunk_bytes;       // largest single read; 0 = 1 MiB
    uint32_t n_ring_slots;      // ring slots for streamed dense weights; 0 = chosen (3, and 2 at the minimum budget)
    uint32_t fidelity;          // 0 = exact, 1 = faithful (a sketch names candidates), 2 = threshold (small activations count as 0)
    uint32_t repack;            // 1 = matrices in llama.cpp's repacked form, all of them resident; 0 = in the file's (default)
    uint32_t device_inexact;    // 1 = experts that the device misses may be computed on the host, with other rounding; 0 = never (default)
    double   max_kl;            // threshold: the measured setting to use is the largest up to this; 0 = the smallest there is
    double   host_cost;         // device_inexact: time to compute an expert on the host, in times to copy it to the device; 0 = measured at activation
} ls_options;

// Bytes by purpose, all of this model. "fixed" is what llama.cpp itself holds: KV cache, compute and output buffers.
typedef struct ls_memory {
    uint64_t baseline_bytes;       // the process as it was before its first model; 0 for further models
    uint64_t metadata_bytes;       // vocabulary, hyperparameters, graphs
    uint64_t kv_bytes;
    uint64_t compute_bytes;        // compute, work and output buffers
    uint64_t resident_bytes;       // weights always resident: norms, output matrix, routers, biases
    uint64_t pinned_bytes;         // dense weights that could be streamed and are pinned
    uint64_t ring_bytes;           // ring slots for streamed dense weights
    uint64_t cache_bytes;          // capacity of the expert cache
    uint64_t margin_bytes;         // kept free for page tables, stacks, staging
} ls_memory;

// Counters since activation or ls_model_reset_stats().
typedef struct ls_stats {
    uint64_t n_tokens;             // tokens decoded, prompt included
    uint64_t n_graphs;             // compute graphs run
    uint64_t read_bytes;           // bytes asked of the device, alignment included
    uint64_t needed_bytes;         // bytes of the parts that were missing
    uint64_t n_reads;
    uint64_t read_busy_ns;         // time with at least one read in flight
    uint64_t hits;                 // expert uses that found the expert resident
    uint64_t misses;               // expert uses that had to wait for a read
    uint64_t n_evictions;
    uint64_t dense_hits;           // dense groups found ready when the graph asked
    uint64_t dense_waits;          // dense groups that had to be waited for
    uint64_t stall_ns;             // time that compute waited for data
    uint64_t compute_ns;           // wall time inside graphs, stalls included
    uint64_t load_bytes;           // read by activation, not counted in read_bytes
    uint64_t load_ns;
    uint64_t resident_now_bytes;   // bytes of weights in memory now, all purposes
    uint64_t budget_bytes;
    uint64_t cached_experts;       // experts resident now
    uint64_t cache_capacity_bytes;
    uint64_t used_buffered_io;     // 1 if the page cache could not be bypassed
    uint64_t n_waves;              // micro-batches of a layer that did not fit the expert cache
    uint64_t neurons_fired;        // neurons read from clusters, summed over layers and micro-batches
    uint64_t neurons_fired_bytes;  // of their records
    uint64_t cluster_hits;         // clusters found in memory
    uint64_t cluster_misses;       // clusters that had to be waited for
    uint64_t cluster_capacity_bytes; // of the cache of clusters
    uint64_t n_ahead;              // experts and clusters of neurons read ahead of their layer's choice
    uint64_t n_ahead_used;         // of those, used before they were given up
    uint64_t n_ahead_late;         // of the used ones, still on their way when they were needed
    uint64_t n_ahead_wasted;       // given up unused
    uint64_t n_ahead_cancelled;    // dropped before they were read
    uint64_t ahead_bytes;          // bytes of n_ahead, and so on
    uint64_t ahead_used_bytes;
    uint64_t ahead_wasted_bytes;
    uint64_t ahead_cancelled_bytes;
    uint64_t device_budget_bytes;  // device memory that may be used; 0 = no device
    uint64_t device_used_bytes;    // of it, allocated or kept free for the driver
    uint64_t device_copied_bytes;  // from host to device memory
    uint64_t device_hits;          // expert uses, and passes of a dense block, that found the weights on the device; neurons summed there
    uint64_t device_misses;        // those that had to wait for a copy; firing neurons of the device's blocks that the host summed
    uint64_t device_syncs;         // times the host waited for the device because of streaming
    uint64_t device_host_experts;  // of the misses, computed on the host instead (device_inexact)
} ls_stats;

// ---- process -------------------------------------------------------------------------------------------------------

// Register the hooks with the patched libllama. Idempotent.
// LS_ERR_STATE if other hooks are registered; LS_ERR_UNSUPPORTED if the hook ABI version differs.
LS_API ls_status ls_install(void);

// Details of the last failure on this thread. Never fails; out->status is LS_OK if there was none.
LS_API void ls_last_error(ls_error * out);
LS_API void ls_string_free(char * string);

// llama.cpp commit these libraries were built from, 40 hex digits. Static storage.
LS_API const char * ls_llama_commit(void);
// sizeof() of the structs above as the library sees them, in the order error, options, memory, stats.
LS_API void ls_struct_sizes(uint64_t out[4]);

// ---- model ---------------------------------------------------------------------------------------------------------

// Index the file (all shards) and open its devices. options may be NULL.
LS_API ls_status ls_model_open(const char * path, const ls_options * options, ls_model ** out);
// Stops the readers, frees everything. Call after llama_free and llama_model_free. NULL is allowed.
LS_API void      ls_model_close(ls_model * model);

// JSON: {arch, n_layer, n_expert, n_expert_used, n_vocab, n_embd, n_ff, n_ctx_train, file_bytes, shards:[{path,bytes}],
//        tensors:[{name,type,shape:[ne0..],offset,bytes,shard}], metadata:{key:value} without arrays}.
LS_API ls_status ls_model_index_json(ls_model * model, char ** out);

// The llama_model_load_from_file calls of this thread between begin and end get this model's buffer type for every
// tensor, load mode "none", no repacking. no_alloc = 1 measures instead of loading (for ls_model_plan_json).
LS_API ls_status ls_load_begin(ls_model * model, int32_t no_alloc);
// Contexts made before ls_load_end() reserve logit rows for at most this many outputs of one micro-batch instead of n_batch
// (with a vocabulary of 150,000 that saves 300 MiB). 0 = llama.cpp's choice. Embedding contexts are not limited.
LS_API ls_status ls_load_limit_outputs(ls_model * model, uint32_t n_outputs_max);
LS_API void      ls_load_end(void);

// After the first context exists: charge what llama.cpp holds (read from the context and from /proc), choose what is
// pinned, streamed and cached, allocate it, read the pinned part. budget_bytes bounds the whole process, baseline
// included; 0 = no bound (everything resident). cache_bytes != 0 fixes the expert cache alone.
// baseline_bytes: resident bytes of the process before its first model was built (0 for a further model).
// LS_ERR_BUDGET with the minimum in limit_bytes if the budget is too small.
LS_API ls_status ls_model_activate(ls_model * model, uint64_t budget_bytes, uint64_t cache_bytes, uint64_t baseline_bytes);

// Change the budget. Takes effect at the next token boundary; returns when it has (at once if nothing decodes).
// Below the minimum: LS_ERR_BUDGET and nothing changes.
LS_API ls_status ls_model_set_budget(ls_model * model, uint64_t budget_bytes, uint64_t cache_bytes);

// Before activation: device memory that this model may use, the driver's own included; 0 = what is free then, less a headroom.
// Which blocks run on the device is llama.cpp's n_gpu_layers; without a device this changes nothing.
LS_API ls_status ls_model_set_device_budget(ls_model * model, uint64_t device_budget_bytes);

// name: "lean", "lfu", "lru", "slru", "hotcold". params_json: "" or e.g. {"protected_share":0.8} for slru, {"half_life":4096} for
// lfu and lean, {"hot_share":0.5} for hotcold.
LS_API ls_status ls_model_set_policy(ls_model * model, const char * name, const char * params_json);

// Reading ahead of a layer's choice of experts or neurons: how many layers to look ahead (0 = off, at most 2) and in how many stages a guess is
// made (1 = once and for all; 2 = corrected as the layer comes near; more = and up to stages - 2 times while the layer before waits for
// experts, on the outputs of those that are computed). UINT32_MAX = found while running. From the next token on;
// never changes the output. LS_ERR_ARGUMENT for other numbers.
LS_API ls_status ls_model_set_speculation(ls_model * model, uint32_t depth, uint32_t stages);

// JSON: {depth, stages (null = found while running), lead (the farthest one read on now: 0 off, 1 one attention block, 2 one layer,
//   3 two layers ahead), settled, token_ns:[by lead], least_p, recall:[{lead, at_k, at_2k, n}]} of turns of one token:
// share of the experts used that were among the k and 2k likeliest guesses, where k were used; lead 4: within the FFN of the layer
// before. For files with clusters of neurons also
// neurons_least_p and neurons_recall:[{lead, at_k, at_2k, n, layers:[{layer, at_k, at_2k, n}]}], of a sample of such turns.
LS_API ls_status ls_model_speculation_json(ls_model * model, char ** out);

// Which neurons count as zero (as ls_options.fidelity and max_kl), in graphs that begin from now on; a file with layout exact has
// exact and threshold, one with layout faithful only faithful. What the KV cache holds was computed as it was before.
// LS_ERR_UNSUPPORTED: the file does not hold what that needs.
LS_API ls_status ls_model_set_fidelity(ls_model * model, uint32_t fidelity, double max_kl);

// Fidelity threshold, in graphs that begin from now on: absolute activations below values[i] count as zero in layer blocks[i], the
// other layers keep theirs. blocks NULL and n_values 1: values[0] in every layer. max_kl > 0: none of them above what was measured for
// that KL divergence; without values, those that were measured for it.
// LS_ERR_STATE: another fidelity is in force. LS_ERR_UNSUPPORTED: the file holds no measured thresholds, or none up to max_kl.
// LS_ERR_ARGUMENT: no such layer, no number, or one that max_kl does not allow.
LS_API ls_status ls_model_set_thresholds(ls_model * model, const int32_t * blocks, const float * values, size_t n_values, double max_kl);

// JSON: {name, max_kl, kl (null: not measured), thresholds:{block: value} of fidelity threshold}.
LS_API ls_status ls_model_fidelity_json(ls_model * model, char ** out);

// Keep these experts of a layer resident (ids of the file), replacing earlier pins of that layer; n_ids = 0 unpins.
// LS_ERR_BUDGET if the pinned experts would leave less than one token's demand of one layer.
LS_API ls_status ls_model_pin(ls_model * model, int32_t layer, const int32_t * ids, size_t n_ids);

// JSON: {minimum_budget_bytes, full_budget_bytes, budget_bytes, mode:"resident"|"layers"|"experts"|"layers+experts",
//   memory:{as ls_memory}, dense:{n_groups,n_pinned,group_bytes,streamed_bytes,pinned_bytes,total_bytes,n_ring_slots,
//   n_layers_streamed}, experts:{n_layers,n_experts,n_used,total_bytes,expert_bytes,capacity_bytes,capacity_experts,
//   token_demand_bytes, token_demand_experts}, warnings:[...]}; of a rearranged file also neurons:{total_bytes, capacity_bytes,
//   resident_bytes, device_bytes, n_device_layers}: device_bytes are of the matrices for a device; with a device also device:{name, minimum_budget_bytes,
//   full_budget_bytes, budget_bytes, used_bytes, driver_bytes, kv_bytes, compute_bytes, margin_bytes, resident_bytes, pinned_bytes,
//   stage_bytes, slots_bytes, n_blocks, n_blocks_pinned, n_moe_layers, n_moe_layers_resident, n_slots,
//   host_cost (device_inexact: as in ls_options, 0 before activation and where everything is exact)}.
// budget_bytes 0 = the budget in force. Works before activation too, also after a no_alloc load.
// LS_ERR_BUDGET if budget_bytes is below the minimum.
LS_API ls_status ls_model_plan_json(ls_model * model, uint64_t budget_bytes, uint64_t cache_bytes, uint64_t baseline_bytes, char ** out);

LS_API ls_status ls_model_get_memory(ls_model * model, ls_memory * out);
LS_API ls_status ls_model_get_stats(ls_model * model, ls_stats * out);
LS_API void      ls_model_reset_stats(ls_model * model);

// The sticky error of the last decode on a context (llama_context *), cleared by this call: LS_OK if there is none.
// After an error the failing micro-batch has been removed from the KV cache and the next decode starts clean.
LS_API ls_status ls_context_take_error(ls_model * model, const void * llama_ctx);

// A ggml_abort_callback for llama_set_abort_callback(ctx, ls_flag_is_set, flag): true while the byte at `flag` is not 0.
// Another thread can so end a decode within one graph node, and no compute thread waits for an interpreter's lock.
LS_API bool ls_flag_is_set(void * flag);

// ---- traces --------------------------------------------------------------------------------------------------------

// Record what each token needs, what was predicted and what had arrived, to a new file (layout in trace.h), from the next graph
// on until ls_model_trace_end(). LS_ERR_STATE: not activated, neither experts nor clusters of neurons, or recording already. note_json: members for the file's
// header such as "\"text\":\"a.txt\"", or NULL.
LS_API ls_status ls_model_trace_begin(ls_model * model, const char * path, const char * note_json);
// LS_ERR_READ if the disk did not take all of it. Nothing happens if none is recorded.
LS_API ls_status ls_model_trace_end(ls_model * model);

// A retention policy, or "belady" (the optimum, which knows the future), over a trace with room for n_capacity units.
// JSON: {n_tokens, n_uses, n_misses, missed_bytes, n_oversized, ns_per_use}; the first n_warmup_tokens are not counted.
LS_API ls_status ls_trace_replay_json(const char * path, const char * policy, const char * params_json, uint32_t n_capacity,
                                      uint64_t n_warmup_tokens, char ** out);
// JSON: what the trace holds and how well it was predicted (replay.h).
LS_API ls_status ls_trace_summary_json(const char * path, char ** out);

// ---- measuring -----------------------------------------------------------------------------------------------------

// Random (sequential = 0) or sequential aligned reads of block_bytes with `depth` in flight for about duration_ms.
LS_API ls_status ls_probe_reads(const char * path, uint64_t block_bytes, uint32_t depth, uint32_t sequential, uint32_t duration_ms,
                                uint32_t io_backend, double * bytes_per_second, double * reads_per_second, uint32_t * used_direct);

// 1 if this build can use io_uring and the running kernel allows it.
LS_API int32_t ls_have_io_uring(void);

// JSON: [{name, description, backend, integrated, memory_bytes, free_bytes}] of the GPUs that llama.cpp can use, in main_gpu's order.
LS_API ls_status ls_devices_json(char ** out);

// CRC-32C of each of n_rows consecutive rows of row_bytes: the checksums of lean files (docs/lean_format.md).
LS_API ls_status ls_crc32c_rows(const void * data, uint64_t n_rows, uint64_t row_bytes, uint32_t * out);

#ifdef __cplusplus
}
#endif

#endif // LEANSTREAM_H
