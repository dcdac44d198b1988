// A random down projection in the lean layout, made from ggml's own blocks by docs/lean_format.md, and its dequantised values.
#pragma once

#include "neuron_kernels.h"

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "ggml-cpu.h"
#include "ggml.h"

#include <cstring>
#include <random>
#include <vector>

namespace lean {

struct Down {
    ggml_type type;
    uint32_t  n_rows;
    std::vector<std::vector<uint8_t>> columns; // [neuron]
    std::vector<uint8_t> planes;
    std::vector<float> values; // [n_rows][n_neurons]
};

// quants of one column by packing: low 8 or 4 bits, then the high bits
struct Quant { uint8_t low; uint8_t high; };

inline uint32_t nibble_of(const uint8_t * qs, uint32_t i, uint32_t half) { return i < half ? qs[i] & 15 : qs[i - half] >> 4; }

inline void get_scale_min_k4(uint32_t j, const uint8_t * q, uint8_t & d, uint8_t & m) {
    if (j < 4) {
        d = q[j] & 63;
        m = q[j + 4] & 63;
    } else {
        d = uint8_t((q[j + 4] & 15) | (q[j - 4] >> 6) << 4);
        m = uint8_t((q[j + 4] >> 4) | (q[j] >> 6) << 4);
    }
}

class Builder {
public:
    Builder(Down & w, uint32_t n_neurons, const uint8_t * blocks) : w_(w), n_(n_neurons), e_(ls::padded_rows(w.n_rows)), blocks_(blocks) {
        const ls::ColumnFormat & f = *ls::column_format(w.type);
        w.columns.assign(n_, std::vector<uint8_t>(ls::column_bytes(f, w.n_rows)));
        w.planes.assign(ls::plane_bytes(f, n_, w.n_rows), 0);
    }

    void build() {
        for (uint32_t r = 0; r < w_.n_rows; ++r) {
            for (uint32_t j = 0; j < n_; ++j) {
                element(r, j);
            }
        }
    }

private:
    template <typename Block> const Block & block(uint32_t r, uint32_t j, uint32_t size) const {
        return ((const Block *) blocks_)[size_t(r) * (n_ / size) + j / size];
    }
    void plane(size_t at, uint32_t r, const void * value, size_t size) { memcpy(&w_.planes[at * e_ + size * r], value, size); }
    void nib(uint32_t r, uint32_t j, uint32_t q) { w_.columns[j][r / 32 * 16 + r % 16] |= uint8_t(q << (r % 32 / 16 * 4)); }
    void bit(uint32_t r, uint32_t j, uint32_t q) { w_.columns[j][e_ / 2 + r / 8] |= uint8_t(q << (r % 8)); }
    void crumb(uint32_t r, uint32_t j, uint32_t q) { w_.columns[j][e_ / 2 + r / 64 * 16 + r % 16] |= uint8_t(q << (r % 64 / 16 * 2)); }

    void element(uint32_t r, uint32_t j) {
        const uint32_t b = j / 32, i = j % 32, n_blocks = n_ / 32, s = j / 256, n_super = n_ / 256;
        switch (w_.type) {
            case GGML_TYPE_F32:
                memcpy(&w_.columns[j][4 * r], &((const float *) blocks_)[size_t(r) * n_ + j], 4);
                break;
            case GGML_TYPE_F16: case GGML_TYPE_BF16:
                memcpy(&w_.columns[j][2 * r], &((const uint16_t *) blocks_)[size_t(r) * n_ + j], 2);
                break;
            case GGML_TYPE_Q8_0: {
                const auto & k = block<block_q8_0>(r, j, 32);
                w_.columns[j][r] = uint8_t(k.qs[i]);
                plane(2 * b, r, &k, 2);
                break;
            }
            case GGML_TYPE_Q4_0: {
                const auto & k = block<block_q4_0>(r, j, 32);
                nib(r, j, nibble_of(k.qs, i, 16));
                plane(2 * b, r, &k, 2);
                break;
            }
            case GGML_TYPE_Q4_1: {
                const auto & k = block<block_q4_1>(r, j, 32);
                nib(r, j, nibble_of(k.qs, i, 16));
                plane(2 * b, r, &k, 2);
                plane(2 * (n_blocks + b), r, (const uint8_t *) &k + 2, 2);
                break;
            }
            case GGML_TYPE_Q5_0: {
                const auto & k = block<block_q5_0>(r, j, 32);
                nib(r, j, nibble_of(k.qs, i, 16));
                bit(r, j, k.qh[i / 8] >> (i % 8) & 1);
                plane(2 * b, r, &k, 2);
                break;
            }
            case GGML_TYPE_Q5_1: {
                const auto & k = block<block_q5_1>(r, j, 32);
                nib(r, j, nibble_of(k.qs, i, 16));
                bit(r, j, k.qh[i / 8] >> (i % 8) & 1);
                plane(2 * b, r, &k, 2);
                plane(2 * (n_blocks + b), r, (const uint8_t *) &k + 2, 2);
                break;
            }
            case GGML_TYPE_Q4_K: {
                const auto & k = block<block_q4_K>(r, j, 256);
                k_quant(r, j, k.qs, k.scales, &k, (const uint8_t *) &k + 2, s, n_super);
                break;
            }
            case GGML_TYPE_Q5_K: {
                const auto & k = block<block_q5_K>(r, j, 256);
                k_quant(r, j, k.qs, k.scales, &k, (const uint8_t *) &k + 2, s, n_super);
                bit(r, j, k.qh[j % 32] >> (j % 256 / 32) & 1);
                break;
            }
            case GGML_TYPE_Q6_K: {
                const auto & k = block<block_q6_K>(r, j, 256);
                const uint32_t half = j % 256 / 128, in = j % 128, l = in % 32, quarter = in / 32;
                nib(r, j, k.ql[64 * half + l + quarter % 2 * 32] >> (quarter / 2 * 4) & 15);
                crumb(r, j, k.qh[32 * half + l] >> (2 * quarter) & 3);
                plane(2 * s, r, &k.d, 2);
                plane(2 * n_super + j / 16, r, &k.scales[j % 256 / 16], 1);
                break;
            }
            default:
                break;
        }
    }

    void k_quant(uint32_t r, uint32_t j, const uint8_t * qs, const uint8_t * scales, const void * d, const void * dmin, uint32_t s,
                 uint32_t n_super) {
        const uint32_t sub = j % 256 / 32;
        uint8_t scale, min;
        get_scale_min_k4(sub, scales, scale, min);
        nib(r, j, qs[sub / 2 * 32 + j % 32] >> (sub % 2 * 4) & 15);
        plane(2 * s, r, d, 2);
        plane(2 * (n_super + s), r, dmin, 2);
        plane(4 * n_super + j / 32, r, &scale, 1);
        plane(4 * n_super + n_ / 32 + j / 32, r, &min, 1);
    }

    Down & w_;
    uint32_t n_, e_;
    const uint8_t * blocks_;
};

inline Down random_down(ggml_type type, uint32_t n_neurons, uint32_t n_rows, std::mt19937 & rng) {
    Down w;
    w.type = type;
    w.n_rows = n_rows;
    std::normal_distribution<float> value(0.1f, 1.0f);
    std::vector<float> source(size_t(n_neurons) * n_rows);
    for (float & v : source) {
        v = value(rng);
    }
    std::vector<uint8_t> blocks(ggml_row_size(type, n_neurons) * n_rows);
    ggml_quantize_chunk(type, source.data(), blocks.data(), 0, n_rows, n_neurons, nullptr);
    w.values.resize(source.size());
    const ggml_to_float_t to_float = ggml_get_type_traits(type)->to_float;
    if (to_float) {
        to_float(blocks.data(), w.values.data(), int64_t(source.size()));
    } else {
        w.values = source;
    }
    Builder(w, n_neurons, blocks.data()).build();
    return w;
}

} // namespace lean
