// Kernels for NEON, which every 64-bit ARM processor has.
#include "neuron_kernels.h"

#if defined(__aarch64__) && defined(__ARM_NEON)

#include <arm_neon.h>

namespace ls {
namespace {

struct Simd {
    struct F { float32x4_t v[8]; };
    struct B { int8x16_t low, high; };

    static F zero() { F f; for (auto & v : f.v) { v = vdupq_n_f32(0.0f); } return f; }
    static F load(const float * p) { F f; for (int i = 0; i < 8; ++i) { f.v[i] = vld1q_f32(p + 4 * i); } return f; }
    static void store(float * p, const F & f) { for (int i = 0; i < 8; ++i) { vst1q_f32(p + 4 * i, f.v[i]); } }
    static F fma(float x, const F & y, F z) { for (int i = 0; i < 8; ++i) { z.v[i] = vfmaq_n_f32(z.v[i], y.v[i], x); } return z; }
    static F fma(const F & x, const F & y, F z) {
        for (int i = 0; i < 8; ++i) { z.v[i] = vfmaq_f32(z.v[i], x.v[i], y.v[i]); }
        return z;
    }
    static F mul(F x, const F & y) { for (int i = 0; i < 8; ++i) { x.v[i] = vmulq_f32(x.v[i], y.v[i]); } return x; }
    static void widen16(int8x16_t b, float32x4_t * to) {
        const int16x8_t low = vmovl_s8(vget_low_s8(b)), high = vmovl_s8(vget_high_s8(b));
        to[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
        to[1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(low)));
        to[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
        to[3] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)));
    }
    static F widen(B b) { F f; widen16(b.low, f.v); widen16(b.high, f.v + 4); return f; }
    static B bytes(const uint8_t * p) { return { vld1q_s8((const int8_t *) p), vld1q_s8((const int8_t *) p + 16) }; }
    static B nibbles(const uint8_t * p) {
        const uint8x16_t v = vld1q_u8(p);
        return { vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(v, 4)) };
    }
    static int8x16_t bits16(const uint8_t * p) {
        const uint8_t weights[16] = { 1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128 };
        const uint8x16_t v = vcombine_u8(vdup_n_u8(p[0]), vdup_n_u8(p[1]));
        return vreinterpretq_s8_u8(vandq_u8(vtstq_u8(v, vld1q_u8(weights)), vdupq_n_u8(16)));
    }
    static B bits(const uint8_t * p) { return { bits16(p), bits16(p + 2) }; }
    static B crumbs(const uint8_t * p, bool second) {
        uint8x16_t v = vld1q_u8(p);
        v = second ? vshrq_n_u8(v, 4) : v;
        const uint8x16_t three = vdupq_n_u8(3);
        return { vreinterpretq_s8_u8(vshlq_n_u8(vandq_u8(v, three), 4)),
                 vreinterpretq_s8_u8(vshlq_n_u8(vandq_u8(vshrq_n_u8(v, 2), three), 4)) };
    }
    static B add(B x, B y) { return { vaddq_s8(x.low, y.low), vaddq_s8(x.high, y.high) }; }
    static B sub(B x, int y) {
        const int8x16_t v = vdupq_n_s8(int8_t(y));
        return { vsubq_s8(x.low, v), vsubq_s8(x.high, v) };
    }
    static F f16(const uint8_t * p) {
        F f;
        for (int i = 0; i < 8; ++i) { f.v[i] = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))); }
        return f;
    }
    static F bf16(const uint8_t * p) {
        F f;
        for (int i = 0; i < 8; ++i) { f.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p + 8 * i)), 16)); }
        return f;
    }
};

} // namespace
} // namespace ls

#include "neuron_kernels_impl.h"

ls::AccumulateFn ls::accumulate_neon(ggml_type type) { return accumulate_for(type); }

#else

ls::AccumulateFn ls::accumulate_neon(ggml_type) { return nullptr; }

#endif
