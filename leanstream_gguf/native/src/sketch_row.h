#pragma once

#include "neuron_kernels.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace ls {

// Input in blocks of 32 bytes, one scale each.
struct SketchRow {
    std::vector<int8_t> q;
    std::vector<float> two, sum;
    SketchInput input;

    explicit SketchRow(uint32_t n_embd) : q(padded_rows(n_embd)), two(q.size() / 32), sum(q.size() / 32),
        input{ q.data(), two.data(), sum.data(), uint32_t(q.size()) } {}

    void set(const float * x, uint32_t n) {
        for (uint32_t b = 0; b < two.size(); ++b) {
            const uint32_t first = 32 * b, last = std::min(n, first + 32);
            float largest = 0;
            for (uint32_t i = first; i < last; ++i) {
                largest = std::max(largest, std::fabs(x[i]));
            }
            const float scale = largest / 127, inverse = scale > 0 ? 1 / scale : 0;
            int32_t total = 0;
            for (uint32_t i = first; i < first + 32; ++i) {
                q[i] = i < last && x[i] == x[i] ? int8_t(std::lrintf(std::max(-127.0f, std::min(127.0f, x[i] * inverse)))) : int8_t(0);
                total += q[i];
            }
            two[b] = 2 * scale;
            sum[b] = -3 * scale * float(total);
        }
    }
};

} // namespace ls
