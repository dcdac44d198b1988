// The graph nodes of this library, run by llama.cpp's CPU backend in its own threads. All their state hangs on the
// node's op_params; a node of a failed session writes zeros and returns at once.
#pragma once

#include "session.h"

#include "ggml.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace ls {

// What a node carries in op_params, behind ggml's own part.
struct OpParams {
    static constexpr int kMaxRelease = 4;

    ggml_custom_op_params custom;
    Session * session;
    int32_t   index;     // acquire: dense group; select, product and guess: MoE layer
    int16_t   part;      // product: part of the layer; select: 1 = experts may be awaited; guess: its lead; neurons: 1 = of a block on a device
    int8_t    run;       // select and product: which of the session's runs
    int8_t    last;      // product: 1 = the run ends here
    int32_t   n_release;
    int32_t   release[kMaxRelease]; // acquire: groups that no later node uses
};

// a copy: ggml aligns op_params to 4 bytes only
inline OpParams op_params(const ggml_tensor * node) {
    static_assert(sizeof(OpParams) <= GGML_MAX_OP_PARAMS, "op_params too small");
    OpParams p;
    memcpy(&p, node->op_params, sizeof(p));
    return p;
}

void set_op_params(ggml_tensor * node, OpParams params, ggml_custom_op_t fun, int n_tasks = GGML_N_TASKS_MAX, void * userdata = nullptr);

// dst: int32 [1]. Waits until a dense group is in memory and its weights' data pointers are set.
void op_acquire(ggml_tensor * dst, int ith, int nth, void * userdata);
// Starts a run over these ids, or over those of the experts in `only`, and its reads. logits: [n_experts] of the router for a
// single token, or nullptr. A failed session's run is empty.
void begin_run(Session & session, MoeRun & run, uint32_t layer, const ggml_tensor * ids, const float * logits, int n_threads,
               const std::vector<uint32_t> * only = nullptr);

// src0 ids: int32 [n_used, n_tokens], src1 the router's logits or none; dst: int32 [1]. Groups rows by expert and starts the reads.
void op_select(ggml_tensor * dst, int ith, int nth, void * userdata);
// src0 residual: float32 [n_embd, 1]; dst: float32 [n_experts] scores of a layer that comes later. Nothing depends on it.
void op_guess(ggml_tensor * dst, int ith, int nth, void * userdata);
// src0: float32 [n, n_rows]; dst: int8 [bytes], the rows in the weight's vec_dot type. op_params.part holds the type.
void op_quantize(ggml_tensor * dst, int ith, int nth, void * userdata);
// src0 experts [n, m, n_experts], src1 [n, n_used or 1, n_tokens], src2 ids, src3 select node, src4 quantized src1 or none;
// dst: float32 [m, n_used, n_tokens]. As ggml's MUL_MAT_ID, expert by expert as they arrive; rows that are not in the run become zeros.
void op_mul_mat_id(ggml_tensor * dst, int ith, int nth, void * userdata);
// src0 [n, m], repacked in memory, src1 float32 [n, n_tokens], src2 the same in q8_0; dst: float32 [m, n_tokens]. As ggml's MUL_MAT.
// op_params.part holds which of the session's chunk counters it uses: the other one than the node of this kind (or op_decide_rows)
// before it; index: the layer of neurons for which it decides, or -1.
void op_repacked_product(ggml_tensor * dst, int ith, int nth, void * userdata);
// src0 [n, n_rows], src1 ids: int32; dst float32 [n, n_ids]. As ggml's GET_ROWS, rows read from the file.
void op_get_rows(ggml_tensor * dst, int ith, int nth, void * userdata);

// Done by one thread; dst: int32 [1], written by nobody. The nodes that fill device memory (device_tier.h).
// src0 ids: int32 [n_used, n_tokens]: experts into slots, or into the layer's stage. op_params.index holds the layer; userdata of
// select, if any, the tensor that ranks the experts of the layer after the next (device_pass.h). op_params.run of select: the run
// of what the host computes, or -1.
void op_device_select(ggml_tensor * dst, int ith, int nth, void * userdata);
void op_device_stage(ggml_tensor * dst, int ith, int nth, void * userdata);
// a dense block's matrices into its stage. op_params.index holds the streamed block.
void op_device_acquire(ggml_tensor * dst, int ith, int nth, void * userdata);

// What a thread takes at a time of a matrix's rows, whoever is free: calls fn(first, last). unit_rows: chunks are multiples of it.
template <typename Fn>
void share_chunks(const OpParams & p, uint32_t n_rows, size_t row_bytes, int ith, int nth, Fn && fn, uint32_t unit_rows = 1) {
    constexpr size_t kChunkBytes = 128 * 1024; // of weights
    if (ith == 0) { // the counter of the next such node is set to zero meanwhile
        p.session->next_chunk[!p.part].store(0, std::memory_order_relaxed);
    }
    std::atomic<uint32_t> & next = p.session->next_chunk[p.part];
    const uint32_t n_units = n_rows / unit_rows;
    const uint32_t size = std::max(1u, std::min(uint32_t(kChunkBytes / (unit_rows * row_bytes)), n_units / uint32_t(4 * nth)));
    for (uint32_t u = next.fetch_add(size); u < n_units; u = next.fetch_add(size)) {
        fn(u * unit_rows, std::min(n_units, u + size) * unit_rows);
    }
}

// A layer decides for one token: rows first .. last of its [n_ff] are there (neuron_ops.cpp).
void expect_firing(const OpParams & p, const float * decided, uint32_t first, uint32_t last);

// bytes of one thread's workspace that the tiled K-quant kernel needs for this MUL_MAT_ID node; 0 if it is not used
size_t tiled_bytes_per_thread(ggml_tensor * mul_mat_id);

} // namespace ls
