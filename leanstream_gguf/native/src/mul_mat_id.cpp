// Products with streamed experts. The same kernels as ggml's MUL_MAT_ID, chosen in the same way, so the same bits; only the
// order in which experts are visited and the place of their weights differ.
#include "ops.h"

#include "awaited_experts.h"
#include "engine.h"
#include "expert_rows.h"

#include "ggml-cpu-impl.h"
#include "tiled/tiled.h"

#include <algorithm>
#include <cstring>

namespace ls {

namespace {

struct Product {
    ggml_tensor * dst;
    const OpParams & params;
    Session & session;
    Engine & engine;
    MoeRun & run;
    uint32_t part;
    int ith, nth;
};

float * output_row(const Product & op, const MoeRun::Row & row) {
    return (float *) ((char *) op.dst->data + row.slot * op.dst->nb[1] + row.token * op.dst->nb[2]);
}

// The K-quant kernel that ggml prefers from eight rows on; it splits the expert's rows among threads itself.
bool tiled_expert(const Product & op, uint32_t k, const uint8_t * weights) {
    const int32_t e = op.run.experts[k];
    const uint32_t first = op.run.first_row[size_t(e)];
    const int64_t n_rows = op.run.first_row[size_t(e) + 1] - first;
    ggml_tensor expert = *op.dst->src[0];
    expert.data = const_cast<uint8_t *>(weights);
    ggml_tensor product = *op.dst;
    product.src[0] = &expert;
    ggml_compute_params params = {};
    params.ith   = op.ith;
    params.nth   = op.nth;
    params.wdata = op.dst->src[4] ? op.dst->src[4]->data : op.dst->src[1]->data;
    params.wsize = SIZE_MAX;
    char * scratch = (char *) ((uintptr_t(op.session.tiled_scratch.data()) + 63) & ~uintptr_t(63));
    return op.session.tiled_bytes_per_thread && ggml_compute_forward_mul_mat_id_tiled(&params, &product, 0, n_rows,
        (const int32_t *) &op.run.rows[first], scratch);
}

// rows r0 .. r1 of the expert's matrix times each of its input rows
void vec_dot_rows(const Product & op, uint32_t k, const uint8_t * weights, int64_t r0, int64_t r1) {
    const ggml_tensor * w   = op.dst->src[0];
    const ggml_tensor * in  = op.dst->src[1];
    const char * quantized = op.dst->src[4] ? (const char *) op.dst->src[4]->data : nullptr;
    const size_t in_bytes = ggml_row_size(ggml_get_type_traits_cpu(w->type)->vec_dot_type, w->ne[0]);
    const int32_t e = op.run.experts[k];
    for (uint32_t i = op.run.first_row[size_t(e)]; i < op.run.first_row[size_t(e) + 1]; ++i) {
        const MoeRun::Row & row = op.run.rows[i];
        const int64_t i11 = row.slot % in->ne[1];
        const char * x = quantized ? quantized + (i11 + row.token * in->ne[1]) * in_bytes
                                   : (const char *) in->data + i11 * in->nb[1] + row.token * in->nb[2];
        dot_rows(*w, weights, x, output_row(op, row), r0, r1);
    }
}

void compute_expert(const Product & op, uint32_t k) {
    const uint8_t * weights = op.engine.part_data(op.session, op.run, op.part, k);
    if (!weights) {
        return; // its read failed: the session has failed, the outputs are thrown away
    }
    if (!tiled_expert(op, k, weights)) {
        share_rows(*op.dst->src[0], op.ith, op.nth, op.run.next_chunk[op.part * op.run.experts.size() + k],
            [&](int64_t r0, int64_t r1) { vec_dot_rows(op, k, weights, r0, r1); });
    }
}

// Rows that the device computes, or that come later.
void clear_other_rows(const Product & op, uint32_t n_experts) {
    const size_t n_used = size_t(op.dst->ne[1]), n_rows = n_used * size_t(op.dst->ne[2]);
    if (op.run.rows.size() == n_rows && n_experts == op.run.experts.size()) {
        return;
    }
    std::vector<bool> ours(n_rows, false);
    for (uint32_t k = 0; k < n_experts; ++k) {
        const uint32_t * first = &op.run.first_row[size_t(op.run.experts[k])];
        for (uint32_t i = first[0]; i < first[1]; ++i) {
            ours[size_t(op.run.rows[i].token) * n_used + size_t(op.run.rows[i].slot)] = true;
        }
    }
    for (size_t i = 0; i < n_rows; ++i) {
        if (!ours[i]) {
            memset(output_row(op, {int32_t(i % n_used), int32_t(i / n_used)}), 0, size_t(op.dst->ne[0]) * sizeof(float));
        }
    }
}

// Every thread visits every expert once: ready ones at once, the others as they arrive.
void compute_all(const Product & op, const AwaitedProduct * awaiting) {
    if (op.run.wave) {
        op.engine.wave_enter(op.run, op.part);
    }
    std::vector<uint32_t> pending(op.run.n_here);
    for (uint32_t k = 0; k < pending.size(); ++k) {
        pending[k] = k;
    }
    while (!pending.empty() && !op.session.failed.load(std::memory_order_relaxed)) {
        const size_t before = pending.size();
        const auto settled = [&](uint32_t k) {
            if (!op.engine.part_settled(op.run, op.part, k)) {
                return false;
            }
            compute_expert(op, k);
            if (op.run.wave) {
                op.engine.wave_computed(op.run, op.part, k);
            }
            if (awaiting) {
                note_summed(*awaiting, k);
            }
            return true;
        };
        pending.erase(std::remove_if(pending.begin(), pending.end(), settled), pending.end());
        if (pending.size() == before) {
            op.engine.wait_part(op.session, op.run, int32_t(op.part), pending, op.ith == 0);
        }
    }
}

} // namespace

void op_mul_mat_id(ggml_tensor * dst, int ith, int nth, void *) {
    const OpParams p = op_params(dst);
    const Product op = { dst, p, *p.session, *p.session->engine, p.session->runs[p.run], uint32_t(p.part), ith, nth };
    if (!op.session.failed.load()) {
        const AwaitedProduct awaited = { dst, op.session, op.engine, op.run, ith, nth };
        const bool awaiting = p.last && op.run.awaits(); // here, not in a later product
        if (ith == 0) {
            clear_other_rows(op, awaiting ? uint32_t(op.run.experts.size()) : op.run.n_here);
        }
        compute_all(op, awaiting ? &awaited : nullptr);
        if (awaiting) {
            compute_awaited(awaited);
        }
    }
    if (op.run.threads_in_part[op.part].fetch_sub(1) != 1) {
        return;
    }
    // the last thread: whatever this product has not computed must still be finite, for it reaches the KV cache
    if (op.session.failed.load()) {
        memset(dst->data, 0, ggml_nbytes(dst));
    }
    if (p.last) {
        op.engine.moe_end(op.run);
    }
}

size_t tiled_bytes_per_thread(ggml_tensor * mul_mat_id) {
    const size_t two = ggml_tiled_wdata_size(2, mul_mat_id), one = ggml_tiled_wdata_size(1, mul_mat_id);
    return two - one;
}

} // namespace ls
