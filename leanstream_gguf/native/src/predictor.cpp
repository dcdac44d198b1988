#include "predictor.h"

#include "ggml-cpu.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

namespace ls {

namespace {

bool is_weight(const ggml_tensor * t) {
    return t && t->op == GGML_OP_NONE && t->buffer;
}

bool is_vector(const ggml_tensor * t) {
    return is_weight(t) && t->type == GGML_TYPE_F32 && ggml_nelements(t) == t->ne[0];
}

const ggml_tensor * behind_views(const ggml_tensor * t) {
    while (t && (t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE)) {
        t = t->src[0];
    }
    return t;
}

// x * w behind an RMS norm: the residual is the norm's input
void find_norm(const ggml_tensor * input, Router & out) {
    const ggml_tensor * norm = input->op == GGML_OP_MUL ? input->src[0] : nullptr;
    if (norm && norm->op == GGML_OP_RMS_NORM && is_vector(input->src[1])) {
        out.norm = input->src[1];
        memcpy(&out.norm_eps, norm->op_params, sizeof(float));
    }
}

} // namespace

Router find_router(const ggml_tensor * ids, const ggml_tensor *& logits) {
    Router r;
    logits = nullptr;
    const ggml_tensor * sorted = behind_views(ids);
    if (!sorted || (sorted->op != GGML_OP_ARGSORT && sorted->op != GGML_OP_TOP_K)) {
        return {};
    }
    r.n_used = uint32_t(ids->ne[0]);
    const ggml_tensor * t = behind_views(sorted->src[0]);
    bool gated = false;
    while (t && t->op != GGML_OP_MUL_MAT) {
        if (t->op == GGML_OP_SOFT_MAX && !gated && !r.choice_bias) {
            gated = true;
        } else if (t->op == GGML_OP_UNARY && ggml_get_unary_op(t) == GGML_UNARY_OP_SIGMOID && !gated) {
            gated = true;
            r.gate = Router::Gate::sigmoid;
        } else if (t->op == GGML_OP_ADD && is_vector(t->src[1]) && !(gated ? r.bias : r.choice_bias)) {
            // before any gate was met it is added to the gate's output, or to bare logits, where it is the same
            (gated ? r.bias : r.choice_bias) = t->src[1];
        } else {
            return {};
        }
        t = behind_views(t->src[0]);
    }
    if (!t || !is_weight(t->src[0]) || ggml_n_dims(t->src[0]) != 2 || t->type != GGML_TYPE_F32) {
        return {};
    }
    const ggml_type vec_dot = ggml_get_type_traits_cpu(t->src[0]->type)->vec_dot_type;
    if (vec_dot != GGML_TYPE_F32 && !ggml_get_type_traits_cpu(vec_dot)->from_float) {
        return {};
    }
    r.matrix = t->src[0];
    logits = t;
    find_norm(t->src[1], r);
    return r;
}

size_t Router::scratch_bytes() const {
    const ggml_type vec_dot = ggml_get_type_traits_cpu(matrix->type)->vec_dot_type;
    return size_t(matrix->ne[0]) * sizeof(float) + ggml_row_size(vec_dot, matrix->ne[0]);
}

void Router::scores(const float * residual, uint8_t * scratch, float * out, int64_t r0, int64_t r1) const {
    const int64_t n = matrix->ne[0];
    float * x = (float *) scratch;
    if (norm) {
        float sum = 0.0f;
        for (int64_t i = 0; i < n; ++i) {
            sum += residual[i] * residual[i];
        }
        const float scale = 1.0f / std::sqrt(sum / float(n) + norm_eps);
        const float * weights = (const float *) norm->data;
        for (int64_t i = 0; i < n; ++i) {
            x[i] = residual[i] * scale * weights[i];
        }
    } else {
        memcpy(x, residual, size_t(n) * sizeof(float));
    }
    const ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(matrix->type);
    const void * row = x;
    if (traits->vec_dot_type != GGML_TYPE_F32) {
        uint8_t * quantized = scratch + size_t(n) * sizeof(float);
        ggml_get_type_traits_cpu(traits->vec_dot_type)->from_float(x, quantized, n);
        row = quantized;
    }
    for (int64_t i = r0; i < r1; ++i) {
        traits->vec_dot(int(n), out + i, 0, (const char *) matrix->data + size_t(i) * matrix->nb[1], 0, row, 0, 1);
    }
    finish(out, out, r0, r1);
}

void Router::finish(const float * logits, float * out, int64_t r0, int64_t r1) const {
    for (int64_t i = r0; i < r1; ++i) {
        float v = logits[i] + (bias ? ((const float *) bias->data)[i] : 0.0f);
        v = gate == Gate::sigmoid && choice_bias ? 1.0f / (1.0f + std::exp(-v)) : v; // alone, sigmoid keeps the order
        out[i] = v + (choice_bias ? ((const float *) choice_bias->data)[i] : 0.0f);
    }
}

void margins(const float * scores, uint32_t n, uint32_t k, std::vector<float> & out) {
    out.assign(scores, scores + n);
    if (k == 0 || k >= n) {
        std::fill(out.begin(), out.end(), 0.0f);
        return;
    }
    std::nth_element(out.begin(), out.begin() + k, out.end(), std::greater<float>());
    const float next = out[k], last = *std::min_element(out.begin(), out.begin() + k);
    const float border = 0.5f * (next + last);
    for (uint32_t i = 0; i < n; ++i) {
        out[i] = scores[i] - border;
    }
}

void Calibration::probabilities(const std::vector<float> & margin, std::vector<float> & p) const {
    p.resize(margin.size());
    for (size_t i = 0; i < margin.size(); ++i) {
        p[i] = 1.0f / (1.0f + std::exp(-(scale_ * margin[i] + offset_[i])));
    }
}

void Calibration::learn(const std::vector<float> & margin, const std::vector<float> & p, const std::vector<uint8_t> & used) {
    constexpr float kScaleRate = 0.02f, kOffsetRate = 0.05f;
    float slope = 0.0f;
    for (size_t i = 0; i < margin.size(); ++i) {
        const float error = float(used[i]) - p[i];
        offset_[i] += kOffsetRate * error;
        slope += error * margin[i];
    }
    scale_ = std::max(0.05f, scale_ + kScaleRate * slope / float(std::max<size_t>(1, margin.size())));
}

} // namespace ls
