#include "ops.h"

#include "engine.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cstring>

namespace ls {

void set_op_params(ggml_tensor * node, OpParams params, ggml_custom_op_t fun, int n_tasks, void * userdata) {
    params.custom.fun      = fun;
    params.custom.n_tasks  = n_tasks;
    params.custom.userdata = userdata;
    memset(node->op_params, 0, sizeof(node->op_params));
    memcpy(node->op_params, &params, sizeof(params));
}

void op_acquire(ggml_tensor * dst, int ith, int, void *) {
    const OpParams p = op_params(dst);
    Session & session = *p.session;
    Engine & engine = *session.engine;
    if (!engine.streams_dense() && engine.group_is_pinned_ready(uint32_t(p.index))) {
        return; // every group is pinned: nobody takes a lock
    }
    if (ith != 0) {
        engine.wait_acquired(session, dst, uint32_t(p.index));
        return;
    }
    for (int32_t i = 0; i < p.n_release; ++i) {
        engine.release_group(session, uint32_t(p.release[i]));
    }
    if (!engine.group_is_pinned_ready(uint32_t(p.index))) {
        engine.acquire_group(session, uint32_t(p.index));
    }
    engine.publish_acquired(session, dst);
}

void op_device_acquire(ggml_tensor * dst, int, int, void *) {
    const OpParams p = op_params(dst);
    p.session->engine->device()->acquire(*p.session->engine, *p.session, uint32_t(p.index));
}

void op_device_select(ggml_tensor * dst, int ith, int nth, void * ranked) {
    if (ith != 0) {
        return;
    }
    const OpParams p = op_params(dst);
    MoeRun * host_run = p.run < 0 ? nullptr : &p.session->runs[p.run];
    p.session->engine->device()->select(*p.session->engine, *p.session,
        {uint32_t(p.index), dst->src[0], (const ggml_tensor *) ranked, host_run, nth});
}

void op_device_stage(ggml_tensor * dst, int, int, void *) {
    const OpParams p = op_params(dst);
    p.session->engine->device()->stage(*p.session->engine, *p.session, uint32_t(p.index), dst->src[0]);
}

// counting sort of (expert slot, token) pairs by expert, in the order that ggml visits them
static void group_rows(const ggml_tensor * ids, uint32_t n_experts, const std::vector<uint32_t> * only, MoeRun & run) {
    const int64_t n_used = ids->ne[0], n_tokens = ids->ne[1];
    const auto left_out = [&](int32_t e) { return only && std::find(only->begin(), only->end(), uint32_t(e)) == only->end(); };
    const auto id_of = [&](int64_t slot, int64_t token) {
        return *(const int32_t *) ((const char *) ids->data + token * ids->nb[1] + slot * ids->nb[0]);
    };
    run.first_row.assign(n_experts + 1, 0);
    for (int64_t t = 0; t < n_tokens; ++t) {
        for (int64_t s = 0; s < n_used; ++s) {
            run.first_row[size_t(id_of(s, t)) + 1] += !left_out(id_of(s, t));
        }
    }
    run.experts.clear();
    for (uint32_t e = 0; e < n_experts; ++e) {
        if (run.first_row[e + 1] > 0) {
            run.experts.push_back(int32_t(e));
        }
        run.first_row[e + 1] += run.first_row[e];
    }
    std::vector<uint32_t> next(run.first_row.begin(), run.first_row.end() - 1);
    run.rows.resize(run.first_row.back());
    for (int64_t t = 0; t < n_tokens; ++t) {
        for (int64_t s = 0; s < n_used; ++s) {
            if (!left_out(id_of(s, t))) {
                run.rows[next[size_t(id_of(s, t))]++] = { int32_t(s), int32_t(t) };
            }
        }
    }
}

static bool ids_valid(const ggml_tensor * ids, int32_t n_experts) {
    for (int64_t t = 0; t < ids->ne[1]; ++t) {
        const int32_t * row = (const int32_t *) ((const char *) ids->data + t * ids->nb[1]);
        for (int64_t s = 0; s < ids->ne[0]; ++s) {
            if (row[s] < 0 || row[s] >= n_experts) {
                return false;
            }
        }
    }
    return true;
}

void begin_run(Session & session, MoeRun & run, uint32_t layer, const ggml_tensor * ids, const float * logits, int n_threads,
               const std::vector<uint32_t> * only) {
    Engine & engine = *session.engine;
    const MoeLayer & l = engine.weights.moe_layers[layer];
    run.layer = layer;
    run.wave  = false;
    run.experts.clear();
    run.rows.clear();
    run.n_here = 0;
    run.reserve_counters(0, n_threads);
    if (session.failed.load()) {
        return;
    }
    if (!ids_valid(ids, int32_t(l.n_experts))) {
        engine.fail(session, Error(LS_ERR_INTERNAL, "the router chose an expert that does not exist").info);
        return;
    }
    group_rows(ids, l.n_experts, only, run);
    run.n_here = uint32_t(run.experts.size());
    run.reserve_counters(uint32_t(l.parts.size()), n_threads);
    if (session.tiled_bytes_per_thread) {
        session.tiled_scratch.resize(64 + session.tiled_bytes_per_thread * size_t(n_threads));
    }
    if (!run.experts.empty()) { // the device may have them all
        engine.moe_begin(session, run, logits);
    }
}

void op_select(ggml_tensor * dst, int ith, int nth, void *) {
    if (ith == 0) {
        const OpParams p = op_params(dst);
        p.session->runs[p.run].may_await = p.part != 0;
        begin_run(*p.session, p.session->runs[p.run], uint32_t(p.index), dst->src[0],
            dst->src[1] ? (const float *) dst->src[1]->data : nullptr, nth);
    }
}

void op_quantize(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * src = dst->src[0];
    const ggml_type type = ggml_type(op_params(dst).part);
    const ggml_from_float_t from_float = ggml_get_type_traits_cpu(type)->from_float;
    const int64_t block = ggml_blck_size(type);
    const int64_t n = src->ne[0];
    const size_t row_bytes = ggml_row_size(type, n);
    // as ggml does: every thread takes its share of each row's blocks
    const int64_t b0 = ith * n / block / nth, b1 = (ith + 1) * n / block / nth;
    char * to = (char *) dst->data;
    for (int64_t i2 = 0; i2 < src->ne[2]; ++i2) {
        for (int64_t i1 = 0; i1 < src->ne[1]; ++i1, to += row_bytes) {
            const char * from = (const char *) src->data + i2 * src->nb[2] + i1 * src->nb[1];
            from_float((const float *) (from + b0 * block * src->nb[0]), to + b0 * ggml_type_size(type), (b1 - b0) * block);
        }
    }
}

void op_get_rows(ggml_tensor * dst, int ith, int, void *) {
    if (ith != 0) {
        return;
    }
    const OpParams p = op_params(dst);
    Engine & engine = *p.session->engine;
    const ggml_tensor * table = dst->src[0];
    const ggml_tensor * ids = dst->src[1];
    const size_t n_rows = size_t(ggml_nelements(ids));
    const size_t row_bytes = table->nb[1];
    const Weight * weight = engine.weights.find(table);
    std::vector<int32_t> rows(n_rows);
    memcpy(rows.data(), ids->data, n_rows * sizeof(int32_t));
    const bool valid = std::all_of(rows.begin(), rows.end(), [&](int32_t r) { return r >= 0 && r < table->ne[1]; });
    std::vector<uint8_t> raw(n_rows * row_bytes);
    if (p.session->failed.load() || !valid || !weight || !engine.read_rows(*p.session, *weight, rows.data(), n_rows, raw.data())) {
        memset(dst->data, 0, ggml_nbytes(dst));
        return;
    }
    const ggml_to_float_t to_float = ggml_get_type_traits(table->type)->to_float;
    for (size_t i = 0; i < n_rows; ++i) {
        float * to = (float *) ((char *) dst->data + i * dst->nb[1]);
        if (to_float) {
            to_float(raw.data() + i * row_bytes, to, table->ne[0]);
        } else {
            memcpy(to, raw.data() + i * row_bytes, row_bytes); // float32
        }
    }
}

} // namespace ls
