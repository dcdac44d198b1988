// Products with weights in CPU_REPACK's form, with the bits of llama.cpp's own kernels.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace ls {

// An input row in blocks of q8_0, and what every row of weights needs of it.
struct RepackedInput {
    const uint8_t * blocks; // [n_blocks] 34 bytes: f16 scale, 32 int8
    const float   * scale;  // [n_blocks]
    const int32_t * offset; // [n_blocks] -4 times the sum of the block's int8
    uint32_t n_blocks;
};

constexpr uint32_t kRepackedRows = 8;                      // rows that lie interleaved
constexpr size_t   kRepackedBlockBytes = 8 * (2 + 16);     // of these rows: 8 f16 scales, then 8 bytes of each row, twice

// Products of the input with 8 rows of Q4_0: rows [n_blocks] interleaved blocks, out [8].
using RepackedFn = void (*)(const RepackedInput & x, const uint8_t * rows, float * out);

RepackedFn repacked_q4_0_avx512(); // nullptr where it is not compiled in; needs AVX-512 F, BW, DQ, VL and VNNI

} // namespace ls
