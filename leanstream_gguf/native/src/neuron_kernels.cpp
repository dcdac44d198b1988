// Formats, choice of instruction set, and the portable kernels.
#include "neuron_kernels.h"

#include "ggml-cpu.h"

#include <cstring>
#include <initializer_list>

namespace ls {
namespace {

struct Simd {
    struct F { float v[32]; };
    struct B { int8_t v[32]; };

    template <typename Fn> static F each(Fn fn) { F f; for (int i = 0; i < 32; ++i) { f.v[i] = fn(i); } return f; }
    template <typename Fn> static B each_byte(Fn fn) { B b; for (int i = 0; i < 32; ++i) { b.v[i] = int8_t(fn(i)); } return b; }

    static F zero() { return {}; }
    static F load(const float * p) { F f; memcpy(f.v, p, sizeof(f.v)); return f; }
    static void store(float * p, const F & f) { memcpy(p, f.v, sizeof(f.v)); }
    static F fma(float a, const F & b, const F & c) { return each([&](int i) { return a * b.v[i] + c.v[i]; }); }
    static F fma(const F & a, const F & b, const F & c) { return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
    static F mul(const F & a, const F & b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
    static F widen(const B & b) { return each([&](int i) { return float(b.v[i]); }); }
    static B bytes(const uint8_t * p) { B b; memcpy(b.v, p, 32); return b; }
    static B nibbles(const uint8_t * p) { return each_byte([&](int i) { return i < 16 ? p[i] & 15 : p[i - 16] >> 4; }); }
    static B bits(const uint8_t * p) { return each_byte([&](int i) { return (p[i / 8] >> (i % 8) & 1) << 4; }); }
    static B crumbs(const uint8_t * p, bool second) {
        return each_byte([&](int i) { return (p[i % 16] >> (second * 4 + i / 16 * 2) & 3) << 4; });
    }
    static B add(const B & a, const B & b) { return each_byte([&](int i) { return a.v[i] + b.v[i]; }); }
    static B sub(const B & a, int b) { return each_byte([&](int i) { return a.v[i] - b; }); }
    static F f16(const uint8_t * p) {
        return each([&](int i) { ggml_fp16_t h; memcpy(&h, p + 2 * i, 2); return ggml_fp16_to_fp32(h); });
    }
    static F bf16(const uint8_t * p) {
        return each([&](int i) { ggml_bf16_t h; memcpy(&h, p + 2 * i, 2); return ggml_bf16_to_fp32(h); });
    }
};

constexpr ColumnFormat kFormats[] = {
    { GGML_TYPE_F32,  32, 128 }, { GGML_TYPE_F16,  32, 64 }, { GGML_TYPE_BF16, 32, 64 },
    { GGML_TYPE_Q4_0, 32, 16 },  { GGML_TYPE_Q4_1, 32, 16 }, { GGML_TYPE_Q5_0, 32, 20 }, { GGML_TYPE_Q5_1, 32, 20 },
    { GGML_TYPE_Q8_0, 32, 32 },  { GGML_TYPE_Q4_K, 32, 16 }, { GGML_TYPE_Q5_K, 32, 20 }, { GGML_TYPE_Q6_K, 16, 24 },
};

} // namespace
} // namespace ls

#include "neuron_kernels_impl.h"

namespace ls {

const ColumnFormat * column_format(ggml_type type) {
    for (const ColumnFormat & f : kFormats) {
        if (f.type == type) {
            return &f;
        }
    }
    return nullptr;
}

size_t column_bytes(const ColumnFormat & f, uint32_t n_rows) {
    return size_t(f.chunk_bytes) * (padded_rows(n_rows) / 32);
}

size_t plane_bytes(const ColumnFormat & f, uint32_t n_neurons, uint32_t n_rows) {
    const size_t blocks = n_neurons / 32, super = n_neurons / 256, e = padded_rows(n_rows);
    switch (f.type) {
        case GGML_TYPE_Q4_0: case GGML_TYPE_Q5_0: case GGML_TYPE_Q8_0: return 2 * blocks * e;
        case GGML_TYPE_Q4_1: case GGML_TYPE_Q5_1: return 4 * blocks * e;
        case GGML_TYPE_Q4_K: case GGML_TYPE_Q5_K: return (4 * super + 2 * blocks) * e;
        case GGML_TYPE_Q6_K: return (2 * super + 2 * blocks) * e;
        default: return 0;
    }
}

bool kernel_set_usable(KernelSet set) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (set == KernelSet::avx2) {
        return accumulate_avx2(GGML_TYPE_F32) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
            __builtin_cpu_supports("f16c");
    }
    if (set == KernelSet::avx512) {
        return accumulate_avx512(GGML_TYPE_F32) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    }
#endif
    return set == KernelSet::portable || (set == KernelSet::neon && accumulate_neon(GGML_TYPE_F32));
}

KernelSet best_kernel_set() {
    for (KernelSet set : { KernelSet::avx512, KernelSet::avx2, KernelSet::neon }) {
        if (kernel_set_usable(set)) {
            return set;
        }
    }
    return KernelSet::portable;
}

AccumulateFn accumulate_kernel(KernelSet set, ggml_type type) {
    switch (set) {
        case KernelSet::portable: return accumulate_portable(type);
        case KernelSet::avx2:     return accumulate_avx2(type);
        case KernelSet::avx512:   return accumulate_avx512(type);
        case KernelSet::neon:     return accumulate_neon(type);
    }
    return nullptr;
}

SketchFn sketch_kernel() {
    return kernel_set_usable(KernelSet::avx2) ? sketch_avx2() : sketch_portable;
}

float sketch_portable(const SketchInput & x, const uint8_t * row) {
    const uint8_t * scales = row + x.e / 4;
    float total = 0;
    for (uint32_t b = 0; b < x.e / 32; ++b) {
        const uint8_t * codes = row + b / 2 * 16;
        int32_t sum = 0;
        for (uint32_t i = 0; i < 32; ++i) {
            sum += (codes[i % 16] >> (b % 2 * 4 + i / 16 * 2) & 3) * x.q[32 * b + i];
        }
        ggml_fp16_t scale;
        memcpy(&scale, scales + 2 * b, 2);
        total += ggml_fp16_to_fp32(scale) * (x.two[b] * float(sum) + x.sum[b]);
    }
    return total;
}

AccumulateFn accumulate_portable(ggml_type type) {
    return accumulate_for(type);
}

} // namespace ls
