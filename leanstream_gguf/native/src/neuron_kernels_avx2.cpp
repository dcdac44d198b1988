// Kernels for AVX2 with FMA and F16C; compiled with flags of its own, so nothing here may run before the processor was asked.
#include "neuron_kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

namespace ls {
namespace {

struct Simd {
    struct F { __m256 a, b, c, d; };
    using B = __m256i;

    static F zero() { const __m256 z = _mm256_setzero_ps(); return { z, z, z, z }; }
    static F load(const float * p) {
        return { _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8), _mm256_loadu_ps(p + 16), _mm256_loadu_ps(p + 24) };
    }
    static void store(float * p, F f) {
        _mm256_storeu_ps(p, f.a);
        _mm256_storeu_ps(p + 8, f.b);
        _mm256_storeu_ps(p + 16, f.c);
        _mm256_storeu_ps(p + 24, f.d);
    }
    static F fma(F x, F y, F z) {
        return { _mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b), _mm256_fmadd_ps(x.c, y.c, z.c),
                 _mm256_fmadd_ps(x.d, y.d, z.d) };
    }
    static F fma(float x, F y, F z) {
        const __m256 v = _mm256_set1_ps(x);
        return fma(F{ v, v, v, v }, y, z);
    }
    static F mul(F x, F y) {
        return { _mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b), _mm256_mul_ps(x.c, y.c), _mm256_mul_ps(x.d, y.d) };
    }
    static __m256 widen8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }
    static F widen(B v) {
        const __m128i low = _mm256_castsi256_si128(v), high = _mm256_extracti128_si256(v, 1);
        return { widen8(low), widen8(_mm_srli_si128(low, 8)), widen8(high), widen8(_mm_srli_si128(high, 8)) };
    }
    static B bytes(const uint8_t * p) { return _mm256_loadu_si256((const __m256i *) p); }
    // v in the low half, v shifted right by n bits in the high half
    static B halves(const uint8_t * p, int first, int second, uint8_t mask) {
        const __m128i v = _mm_loadu_si128((const __m128i *) p);
        const __m256i both = _mm256_set_m128i(_mm_srl_epi16(v, _mm_cvtsi32_si128(second)), _mm_srl_epi16(v, _mm_cvtsi32_si128(first)));
        return _mm256_and_si256(both, _mm256_set1_epi8(char(mask)));
    }
    static B nibbles(const uint8_t * p) {
        const __m128i v = _mm_loadu_si128((const __m128i *) p);
        return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(v, 4), v), _mm256_set1_epi8(15));
    }
    static B bits(const uint8_t * p) {
        int v;
        __builtin_memcpy(&v, p, 4);
        const __m256i byte_of = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
                                                 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
        const __m256i bit_of = _mm256_set1_epi64x((long long) 0x8040201008040201ull);
        const __m256i set = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(v), byte_of), bit_of);
        return _mm256_and_si256(_mm256_cmpeq_epi8(set, bit_of), _mm256_set1_epi8(16));
    }
    static B crumbs(const uint8_t * p, bool second) {
        return _mm256_slli_epi16(second ? halves(p, 4, 6, 3) : halves(p, 0, 2, 3), 4);
    }
    static B add(B x, B y) { return _mm256_add_epi8(x, y); }
    static B sub(B x, int y) { return _mm256_sub_epi8(x, _mm256_set1_epi8(char(y))); }
    static __m256 f16x8(const uint8_t * p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)); }
    static F f16(const uint8_t * p) { return { f16x8(p), f16x8(p + 16), f16x8(p + 32), f16x8(p + 48) }; }
    static __m256 bf16x8(const uint8_t * p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) p)), 16));
    }
    static F bf16(const uint8_t * p) { return { bf16x8(p), bf16x8(p + 16), bf16x8(p + 32), bf16x8(p + 48) }; }
};

} // namespace
} // namespace ls

#include "neuron_kernels_impl.h"

namespace ls {
namespace {

__m256i products(__m128i low, __m128i high, const int8_t * x) {
    const __m256i codes = _mm256_and_si256(_mm256_set_m128i(high, low), _mm256_set1_epi8(3));
    return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, _mm256_loadu_si256((const __m256i *) x)), _mm256_set1_epi16(1));
}

float sketch(const SketchInput & x, const uint8_t * row) {
    const uint8_t * scales = row + x.e / 4;
    __m256 sum = _mm256_setzero_ps();
    for (uint32_t g = 0; g < x.e / 64; ++g) {
        const __m128i v = _mm_loadu_si128((const __m128i *) (row + 16 * g));
        const __m256i a = products(v, _mm_srli_epi16(v, 2), x.q + 64 * g);
        const __m256i b = products(_mm_srli_epi16(v, 4), _mm_srli_epi16(v, 6), x.q + 64 * g + 32);
        int pair;
        __builtin_memcpy(&pair, scales + 4 * g, 4);
        const __m128 s = _mm_cvtph_ps(_mm_cvtsi32_si128(pair)); // the scales of both blocks
        const __m128 pair_two = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *) (x.two + 2 * g)));
        const __m128 pair_sum = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *) (x.sum + 2 * g)));
        const __m128 two = _mm_mul_ps(s, pair_two);
        sum = _mm256_fmadd_ps(_mm256_broadcastss_ps(two), _mm256_cvtepi32_ps(a), sum);
        sum = _mm256_fmadd_ps(_mm256_broadcastss_ps(_mm_movehdup_ps(two)), _mm256_cvtepi32_ps(b), sum);
        sum = _mm256_add_ps(sum, _mm256_zextps128_ps256(_mm_mul_ps(s, pair_sum)));
    }
    float lanes[8], total = 0;
    _mm256_storeu_ps(lanes, sum);
    for (float lane : lanes) {
        total += lane;
    }
    return total;
}

} // namespace
} // namespace ls

ls::AccumulateFn ls::accumulate_avx2(ggml_type type) { return accumulate_for(type); }

ls::SketchFn ls::sketch_avx2() { return sketch; }

#else

ls::SketchFn ls::sketch_avx2() { return nullptr; }

ls::AccumulateFn ls::accumulate_avx2(ggml_type) { return nullptr; }

#endif
