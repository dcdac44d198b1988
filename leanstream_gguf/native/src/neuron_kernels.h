// Sums of transposed down columns: out[r] += sum over firing neurons j of h_j * W[r, j], with the block scales of W taken from
// resident planes. Layouts of columns and planes: docs/lean_format.md.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace ls {

// Neurons are summed group by group: those of one group share a row of every plane, which is applied once to their sum.
// Within a group and over groups the order is that of the original index, so a sum does not depend on where its columns lie.
struct ColumnFormat {
    ggml_type type;
    uint32_t  group;       // neurons that share a row of the finest plane
    uint32_t  chunk_bytes; // bytes of 32 rows of a column, all packings together
};

constexpr uint32_t kMaxGroup = 32;

// outputs of a column and of a row of a plane, padding included
static inline uint32_t padded_rows(uint32_t n_rows) { return (n_rows + 63) / 64 * 64; }

// one row of the 2-bit sketch: codes, then scales
static inline size_t sketch_row_bytes(uint32_t n_embd) { return size_t(padded_rows(n_embd)) / 4 + padded_rows(n_embd) / 16; }

// nullptr: no kernel for this type
const ColumnFormat * column_format(ggml_type type);
size_t column_bytes(const ColumnFormat & format, uint32_t n_rows);
size_t plane_bytes(const ColumnFormat & format, uint32_t n_neurons, uint32_t n_rows); // 0 for float types

struct ColumnMatrix {
    const ColumnFormat * format;
    uint32_t n_rows;         // outputs, n_embd
    uint32_t n_neurons;      // n_ff
    const uint8_t * planes;  // all of them
};

// The neurons of one group that fire for at least one token.
struct ColumnGroup {
    uint32_t group;                  // original index / format.group
    uint32_t n_columns;              // at most kMaxGroup
    const uint8_t * const * columns; // [n_columns] ascending original index
    const uint32_t * positions;      // [n_columns] where h of a column lies within a token's row
    uint32_t n_tokens;
    const float * h;                 // [n_tokens] rows, h_stride floats apart; 0 = does not fire for this token
    size_t h_stride;
};

// Rows r0 .. r1 of out: float32 [n_rows, n_tokens], out_stride floats between tokens. r0 is a multiple of 32, r1 one too or
// n_rows.
using AccumulateFn = void (*)(const ColumnMatrix & matrix, const ColumnGroup & group, uint32_t r0, uint32_t r1, float * out,
                              size_t out_stride);

// A 2-bit image of a row against an input in 8-bit blocks of 32; see docs/lean_format.md, 3.4.
struct SketchInput {
    const int8_t * q;   // [e] e = padded_rows(n_embd)
    const float  * two; // [e / 32] twice the block's scale
    const float  * sum; // [e / 32] -3 times the scale times the sum of the block's q
    uint32_t e;
};

using SketchFn = float (*)(const SketchInput & x, const uint8_t * row); // about the product of row and input

SketchFn sketch_kernel(); // the best for this processor
float sketch_portable(const SketchInput & x, const uint8_t * row);
SketchFn sketch_avx2();   // nullptr where it is not compiled in

enum class KernelSet : uint8_t { portable, avx2, avx512, neon };

bool kernel_set_usable(KernelSet set);        // compiled in, and this processor has it
KernelSet best_kernel_set();
AccumulateFn accumulate_kernel(KernelSet set, ggml_type type); // nullptr if there is none

// one for each set, in its own file because of its compiler flags; nullptr where it is not compiled in
AccumulateFn accumulate_portable(ggml_type type);
AccumulateFn accumulate_avx2(ggml_type type);
AccumulateFn accumulate_avx512(ggml_type type);
AccumulateFn accumulate_neon(ggml_type type);

} // namespace ls
