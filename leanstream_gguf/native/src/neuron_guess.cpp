#include "neuron_guess.h"

#include "engine.h"
#include "ops.h"
#include "sketch_row.h"

#include "ggml-cpu.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

namespace ls {

namespace {

bool is_vector(const ggml_tensor * t) {
    return t && t->op == GGML_OP_NONE && t->buffer && t->type == GGML_TYPE_F32 && ggml_nelements(t) == t->ne[0];
}

// behind the activation: the product that decides, with its bias
const ggml_tensor * product_of(const ggml_tensor * a, Decider & out) {
    const ggml_tensor * t = a;
    for (; t && t->op != GGML_OP_MUL_MAT; t = t->src[0]) {
        if (t->op == GGML_OP_UNARY) {
            out.activation = ggml_get_unary_op(t);
        } else if (t->op == GGML_OP_GLU) {
            const ggml_glu_op op = ggml_get_glu_op(t);
            out.activation = op == GGML_GLU_OP_REGLU ? GGML_UNARY_OP_RELU : op == GGML_GLU_OP_SWIGLU ? GGML_UNARY_OP_SILU : GGML_UNARY_OP_GELU;
        } else if (t->op == GGML_OP_ADD && is_vector(t->src[1])) {
            out.bias = t->src[1];
        } else if (t->op != GGML_OP_SQR) {
            return nullptr;
        }
    }
    out.zeros = out.activation == GGML_UNARY_OP_RELU;
    return t;
}

// x = norm(residual) * weights + bias
bool find_norm(const ggml_tensor * x, Decider & out) {
    if (x->op == GGML_OP_ADD && is_vector(x->src[1])) {
        out.norm_bias = x->src[1];
        x = x->src[0];
    }
    const ggml_tensor * norm = x->op == GGML_OP_MUL && is_vector(x->src[1]) ? x->src[0] : nullptr;
    if (!norm || (norm->op != GGML_OP_RMS_NORM && norm->op != GGML_OP_NORM)) {
        return false;
    }
    out.norm = x->src[1];
    out.centred = norm->op == GGML_OP_NORM;
    memcpy(&out.eps, norm->op_params, sizeof(float));
    out.residual = norm->src[0];
    return true;
}

Decider find_decider(Engine & engine, const NeuronMatch & m) {
    Decider d;
    const ggml_tensor * product = product_of(m.a, d);
    if (!product || !find_norm(product->src[1], d)) {
        return d;
    }
    if (!m.deciding) {
        const Weight * w = engine.weights.find(product->src[0]);
        const ggml_type input = ggml_get_type_traits_cpu(product->src[0]->type)->vec_dot_type;
        if (!w || (w->use != Use::dense && w->use != Use::resident) || (input != GGML_TYPE_F32 && !ggml_get_type_traits_cpu(input)->from_float)) {
            return d;
        }
        d.matrix = product->src[0];
        d.group  = w->use == Use::dense ? w->group : -1;
    }
    d.known = d.zeros || d.activation == GGML_UNARY_OP_SILU || d.activation == GGML_UNARY_OP_GELU;
    return d;
}

void normalize(const Decider & d, const float * residual, uint32_t n, float * x) {
    float mean = 0, sum = 0;
    for (uint32_t i = 0; i < n && d.centred; ++i) {
        mean += residual[i];
    }
    mean /= float(n);
    for (uint32_t i = 0; i < n; ++i) {
        x[i] = residual[i] - mean;
        sum += x[i] * x[i];
    }
    const float scale = 1.0f / std::sqrt(sum / float(n) + d.eps);
    const float * weights = (const float *) d.norm->data, * bias = d.norm_bias ? (const float *) d.norm_bias->data : nullptr;
    for (uint32_t i = 0; i < n; ++i) {
        x[i] = x[i] * scale * weights[i] + (bias ? bias[i] : 0.0f);
    }
}

// about |act(v)|: ranks, decides nothing
float size_of(ggml_unary_op activation, float v) {
    const float slope = activation == GGML_UNARY_OP_GELU ? 1.702f : 1.0f;
    return std::fabs(v / (1.0f + std::exp(-slope * v)));
}

// 1 / (1 + exp(-v)) to three digits, in a form that compilers vectorize
inline float logistic(float v) {
    const float known = v == v ? v : 0.0f;
    const float e = std::min(std::max(-1.44269504f * known, -30.0f), 30.0f) + 64.0f; // positive: conversion rounds down
    const int32_t whole = int32_t(e);
    const float f = e - float(whole);
    const int32_t bits = (whole - 64 + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof(power));
    return 1.0f / (1.0f + power * (1.0f + f * (0.6565f + f * 0.3435f)));
}

} // namespace

void Decider::scores(const NeuronLayer & layer, const float * residual, float threshold, float * scratch, float * out, uint32_t r0,
                     uint32_t r1) const {
    const uint32_t n = layer.shape->n_embd;
    float * x = scratch;
    normalize(*this, residual, n, x);
    if (matrix) {
        const ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(matrix->type);
        const void * row = x;
        if (traits->vec_dot_type != GGML_TYPE_F32) {
            row = scratch + n;
            ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float(x, scratch + n, n);
        }
        for (uint32_t i = r0; i < r1; ++i) {
            traits->vec_dot(int(n), out + i, 0, (const char *) matrix->data + i * matrix->nb[1], 0, row, 0, 1);
        }
    } else {
        const SketchFn sketch = sketch_kernel();
        const size_t row_bytes = sketch_row_bytes(n);
        thread_local std::vector<SketchRow> inputs; // one; n_embd is that of the model
        if (inputs.empty() || inputs.front().input.e != padded_rows(n)) {
            inputs.clear();
            inputs.emplace_back(n);
        }
        inputs.front().set(x, n);
        for (uint32_t i = r0; i < r1; ++i) {
            out[i] = sketch(inputs.front().input, layer.sketch + i * row_bytes) + layer.shape->sketch_margin;
        }
        return;
    }
    for (uint32_t i = r0; i < r1; ++i) {
        const float v = out[i] + (bias ? ((const float *) bias->data)[i] : 0.0f);
        out[i] = zeros ? v : size_of(activation, v) - threshold;
    }
}

void FiringModel::note_size(const float * score) {
    double sum = 0;
    for (size_t i = 0; i < offset_.size(); ++i) {
        sum += double(std::fabs(score[i]));
    }
    const float mean = float(sum / double(std::max<size_t>(1, offset_.size())));
    size_ = size_ > 0 ? size_ + 0.1f * (mean - size_) : mean;
}

void FiringModel::probabilities(const float * score, std::vector<float> & p) const {
    p.resize(offset_.size());
    const float scale = size_ > 0 ? scale_ / size_ : 0.0f;
    for (size_t i = 0; i < p.size(); ++i) {
        p[i] = logistic(scale * score[i] + kStep * float(offset_[i]));
    }
}

void FiringModel::learn(const float * score, const std::vector<uint8_t> & fired) {
    constexpr float kScaleRate = 0.05f, kOffsetRate = 0.2f / kStep, kLargest = 32000.0f;
    const float scale = size_ > 0 ? scale_ / size_ : 0.0f;
    float slope = 0.0f, weight = 1.0f;
    for (size_t i = 0; i < offset_.size(); ++i) {
        const float p = logistic(scale * score[i] + kStep * float(offset_[i]));
        const float error = float(fired[i]) - p;
        slope  += error * score[i];
        weight += p;
        offset_[i] = int16_t(std::min(std::max(float(offset_[i]) + kOffsetRate * error, -kLargest), kLargest));
    }
    scale_ = std::max(0.1f, scale_ + (size_ > 0 ? kScaleRate * slope / (weight * size_) : 0.0f));
}

const ggml_tensor * plain_deciding_product(const NeuronMatch & m) {
    Decider d;
    const ggml_tensor * product = m.deciding ? nullptr : product_of(m.a, d);
    const ggml_type type = product ? product->src[0]->type : GGML_TYPE_F32;
    const ggml_type input = ggml_get_type_traits_cpu(type)->vec_dot_type;
    const bool plain = product && d.zeros && !d.bias && product->type == GGML_TYPE_F32 && product->src[1]->type == GGML_TYPE_F32 &&
        ggml_is_contiguous(product) && ggml_is_contiguous(product->src[1]) && ggml_get_type_traits_cpu(type)->vec_dot &&
        (input == GGML_TYPE_F32 || ggml_get_type_traits_cpu(input)->from_float);
    return plain ? product : nullptr;
}

NeuronGuessPoints find_neuron_guess_points(Engine & engine, const std::vector<NeuronMatch> & matches, const ggml_cgraph * graph) {
    NeuronGuessPoints points;
    std::unordered_map<std::string, const ggml_tensor *> by_name;
    for (int i = 0; i < graph->n_nodes && !matches.empty(); ++i) {
        by_name.emplace(graph->nodes[i]->name, graph->nodes[i]);
    }
    const auto add = [&](const ggml_tensor * residual, const Decider & of, int32_t layer, uint8_t lead) {
        if (of.known && residual && residual->type == GGML_TYPE_F32 && ggml_nrows(residual) == 1 && ggml_is_contiguous(residual)) {
            points[residual].push_back({layer, lead});
        }
    };
    std::unordered_map<int32_t, const ggml_tensor *> before_ffn; // [block]
    for (const NeuronMatch & m : matches) {
        const Decider d = find_decider(engine, m);
        const int32_t block = engine.neurons->layer(uint32_t(m.layer))->shape->block;
        engine.neurons->note_decider(uint32_t(m.layer), d);
        before_ffn[block] = d.residual;
        const auto input = by_name.find("l_out-" + std::to_string(block - 1));
        add(input == by_name.end() ? nullptr : input->second, d, m.layer, kLeadBlock);
        for (int32_t back = 1; back <= 2; ++back) {
            const auto earlier = before_ffn.find(block - back);
            add(earlier == before_ffn.end() ? nullptr : earlier->second, d, m.layer, uint8_t(kLeadBlock + back));
        }
    }
    return points;
}

void op_guess_neurons(ggml_tensor * dst, int ith, int nth, void *) {
    const OpParams p = op_params(dst);
    Session & session = *p.session;
    Engine & engine = *session.engine;
    NeuronStore & store = *engine.neurons;
    const uint32_t index = uint32_t(p.index);
    const Decider & d = store.decider(index);
    const NeuronLayer & layer = *store.layer(index);
    const float threshold = session.fidelity->thresholds[index];
    const bool ready = d.group < 0 || engine.group_is_pinned_ready(uint32_t(d.group)); // one that streams is not waited for
    if (session.failed.load(std::memory_order_relaxed) || !d.known || !ready || (d.matrix && !d.zeros && threshold <= 0)) {
        return;
    }
    thread_local std::vector<float> scratch;
    scratch.resize(std::max(scratch.size(), d.scratch_floats(layer.shape->n_embd)));
    const uint64_t n = layer.shape->n_ff;
    d.scores(layer, (const float *) dst->src[0]->data, threshold, scratch.data(), (float *) dst->data, uint32_t(n * uint64_t(ith) / uint64_t(nth)),
             uint32_t(n * uint64_t(ith + 1) / uint64_t(nth)));
    if (session.guessing.fetch_add(1, std::memory_order_acq_rel) == nth - 1) {
        session.guessing.store(0, std::memory_order_relaxed); // the next node starts behind a barrier
        store.guessed(session, index, uint8_t(p.part), (const float *) dst->data);
    }
}

} // namespace ls
