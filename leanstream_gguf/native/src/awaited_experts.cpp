#include "awaited_experts.h"

#include "engine.h"
#include "expert_rows.h"
#include "ops.h"

#include "ggml-cpu-impl.h"

#include <algorithm>
#include <thread>

extern "C" void ggml_compute_forward_glu(const ggml_compute_params * params, ggml_tensor * dst); // ggml-cpu/ops.h, a file name of ours too

namespace ls {

namespace {

enum Progress : uint8_t { kComing, kActivated, kSummed };

size_t aligned(size_t n) {
    return (n + 63) & ~size_t(63);
}

ggml_type input_type(const ggml_tensor & weights) {
    return ggml_get_type_traits_cpu(weights.type)->vec_dot_type;
}

// One expert's part of the scratch: float32 [n_ff] of the gate, then of the activation; float32 [n_ff] of up; the down product's input.
struct Scratch {
    float * gate, * up;
    char *  quantized;
};

Scratch scratch_of(const AwaitedProduct & op, uint32_t k) {
    const MoeLayer & l = op.engine.weights.moe_layers[op.run.layer];
    const size_t n_bytes = aligned(size_t(op.down->src[0]->ne[0]) * sizeof(float));
    uint8_t * base = op.session.awaited_scratch.data() + (k - op.run.n_here) * awaited_bytes(l);
    return { (float *) base, (float *) (base + n_bytes), (char *) base + 2 * n_bytes };
}

uint32_t part_of(const ggml_tensor * product) {
    return uint32_t(op_params(product).part);
}

// This thread's share of one product of an expert; false: its read failed, and the session with it.
bool multiply(const AwaitedProduct & op, const ggml_tensor * product, uint32_t k, const char * x, float * out) {
    const ggml_tensor & w = *product->src[0];
    const uint8_t * weights = op.engine.part_data(op.session, op.run, part_of(product), k);
    if (!weights) {
        return false;
    }
    share_rows(w, op.ith, op.nth, op.run.next_chunk[part_of(product) * op.run.experts.size() + k],
        [&](int64_t r0, int64_t r1) { dot_rows(w, weights, x, out, r0, r1); });
    return true;
}

bool last_thread(const AwaitedProduct & op, const ggml_tensor * product, uint32_t k) {
    return op.run.threads_left[part_of(product) * op.run.experts.size() + k].fetch_sub(1, std::memory_order_acq_rel) == 1;
}

// One row of a tensor, elsewhere.
ggml_tensor row_at(const ggml_tensor & like, float * data) {
    ggml_tensor t = like;
    for (int d = 1; d < GGML_MAX_DIMS; ++d) {
        t.ne[d] = 1;
        t.nb[d] = size_t(t.ne[0]) * sizeof(float);
    }
    t.data     = data;
    t.view_src = nullptr;
    return t;
}

// By llama.cpp's own function, in place, and into the type that the down product takes.
void activate(const AwaitedProduct & op, const Scratch & s) {
    const ggml_tensor & glu = *op.down->src[1];
    ggml_tensor gate = row_at(*glu.src[0], s.gate), up = row_at(*glu.src[1], s.up), out = row_at(glu, s.gate);
    out.src[0] = &gate;
    out.src[1] = &up;
    ggml_compute_params alone = {};
    alone.nth = 1;
    ggml_compute_forward_glu(&alone, &out);
    const ggml_type type = input_type(*op.down->src[0]);
    if (type != GGML_TYPE_F32) {
        ggml_get_type_traits_cpu(type)->from_float(s.gate, s.quantized, glu.ne[0]);
    }
}

void compute_hidden(const AwaitedProduct & op, uint32_t k) {
    const Scratch s = scratch_of(op, k);
    const ggml_tensor * glu = op.down->src[1], * gate = glu->src[0], * up = glu->src[1];
    const char * x = (const char *) op.down->src[kAwaitedInput]->data;
    if (!multiply(op, gate, k, x, s.gate) || !multiply(op, up, k, x, s.up)) {
        return;
    }
    if (last_thread(op, up, k)) {
        activate(op, s);
        op.run.progress[k].store(kActivated, std::memory_order_release);
    }
}

int64_t slot_of(const MoeRun & run, uint32_t k) {
    return run.rows[run.first_row[size_t(run.experts[k])]].slot;
}

float * output_of(const AwaitedProduct & op, uint32_t k) {
    return (float *) ((char *) op.down->data + size_t(slot_of(op.run, k)) * op.down->nb[1]);
}

void compute_output(const AwaitedProduct & op, uint32_t k) {
    const Scratch s = scratch_of(op, k);
    const char * x = input_type(*op.down->src[0]) == GGML_TYPE_F32 ? (const char *) s.gate : s.quantized;
    if (multiply(op, op.down, k, x, output_of(op, k))) {
        note_summed(op, k);
    }
}

// The residual with what is complete of this layer's output.
void partial_residual(const AwaitedProduct & op, std::vector<float> & x) {
    const ggml_tensor * residual = op.down->src[kAwaitedResidual], * weights = op.down->src[kAwaitedWeights];
    x.assign((const float *) residual->data, (const float *) residual->data + residual->ne[0]);
    for (uint32_t k = 0; k < op.run.experts.size(); ++k) {
        if (op.run.progress[k].load(std::memory_order_acquire) != kSummed) {
            continue;
        }
        const float w = *(const float *) ((const char *) weights->data + size_t(slot_of(op.run, k)) * weights->nb[1]);
        const float * y = output_of(op, k);
        for (size_t i = 0; i < x.size(); ++i) {
            x[i] += w * y[i];
        }
    }
}

bool awaits_reads(const AwaitedProduct & op) {
    for (uint32_t k = op.run.n_here; k < op.run.experts.size(); ++k) {
        if (!op.engine.expert_settled(op.run, k)) {
            return true;
        }
    }
    return false;
}

// A stage is complete, and others wait for reads: time for a better guess about the next layer.
void guess_next(const AwaitedProduct & op) {
    const uint32_t next = op.run.layer + 1;
    if (!op.down->src[kAwaitedResidual] || op.run.n_guesses.load() >= op.session.part_guesses || !awaits_reads(op) ||
        op.run.guessing.exchange(true)) {
        return;
    }
    const Router & router = op.engine.router(next);
    thread_local std::vector<float> x, scores;
    thread_local std::vector<uint8_t> scratch;
    partial_residual(op, x);
    scores.resize(op.engine.weights.moe_layers[next].n_experts);
    scratch.resize(std::max(scratch.size(), router.scratch_bytes()));
    router.scores(x.data(), scratch.data(), scores.data(), 0, int64_t(scores.size()));
    op.engine.guessed(op.session, next, kLeadParts, scores.data());
    op.run.n_guesses++;
    op.run.guessing.store(false);
}

} // namespace

size_t awaited_bytes(const MoeLayer & layer) {
    const ggml_tensor & down = *layer.parts.back()->tensor;
    return 2 * aligned(size_t(down.ne[0]) * sizeof(float)) + aligned(ggml_row_size(input_type(down), down.ne[0]));
}

bool can_await(const ggml_tensor * down) {
    const ggml_tensor * glu = down->src[1];
    if (down->src[2]->ne[1] != 1 || glu->op != GGML_OP_GLU || glu->type != GGML_TYPE_F32 || !glu->src[1]) {
        return false;
    }
    const auto is_product = [&](const ggml_tensor * t) {
        return t->op == GGML_OP_CUSTOM && op_params(t).custom.fun == op_mul_mat_id && t->src[2] == down->src[2] &&
            t->type == GGML_TYPE_F32 && t->src[1] == glu->src[0]->src[1] && t->src[4] == glu->src[0]->src[4] && t->src[1]->ne[1] == 1;
    };
    return is_product(glu->src[0]) && is_product(glu->src[1]);
}

void note_summed(const AwaitedProduct & op, uint32_t k) {
    if (!last_thread(op, op.down, k)) {
        return;
    }
    op.run.progress[k].store(kSummed, std::memory_order_release);
    if (op.run.n_summed.fetch_add(1) + 1 >= op.run.n_here) {
        guess_next(op);
    }
}

void compute_awaited(const AwaitedProduct & op) {
    std::vector<uint32_t> coming, hidden; // not computed by this thread; its hidden layer is
    for (uint32_t k = op.run.n_here; k < op.run.experts.size(); ++k) {
        coming.push_back(k);
    }
    const auto take = [](std::vector<uint32_t> & from, auto && ready, auto && compute) {
        const auto taken = std::stable_partition(from.begin(), from.end(), [&](uint32_t k) { return !ready(k); });
        const std::vector<uint32_t> now(taken, from.end());
        from.erase(taken, from.end());
        std::for_each(now.begin(), now.end(), compute);
        return !now.empty();
    };
    while (!(coming.empty() && hidden.empty()) && !op.session.failed.load(std::memory_order_relaxed)) {
        const bool took_output = take(hidden, [&](uint32_t k) { return op.run.progress[k].load(std::memory_order_acquire) >= kActivated; },
            [&](uint32_t k) { compute_output(op, k); });
        const bool took_hidden = take(coming, [&](uint32_t k) { return op.engine.expert_settled(op.run, k); },
            [&](uint32_t k) { compute_hidden(op, k); hidden.push_back(k); });
        if (took_output || took_hidden) {
            continue;
        }
        if (hidden.empty()) {
            op.engine.wait_part(op.session, op.run, -1, coming, op.ith == 0);
        } else {
            std::this_thread::yield(); // another thread is at its share
        }
    }
}

} // namespace ls
