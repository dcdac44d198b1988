// Kernels for AVX-512 (F, BW, VL, DQ); compiled with flags of its own, so nothing here may run before the processor was asked.
#include "neuron_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#include <immintrin.h>

namespace ls {
namespace {

struct Simd {
    struct F { __m512 a, b; };
    using B = __m256i;

    static F zero() { return { _mm512_setzero_ps(), _mm512_setzero_ps() }; }
    static F load(const float * p) { return { _mm512_loadu_ps(p), _mm512_loadu_ps(p + 16) }; }
    static void store(float * p, F f) {
        _mm512_storeu_ps(p, f.a);
        _mm512_storeu_ps(p + 16, f.b);
    }
    static F fma(F x, F y, F z) { return { _mm512_fmadd_ps(x.a, y.a, z.a), _mm512_fmadd_ps(x.b, y.b, z.b) }; }
    static F fma(float x, F y, F z) {
        const __m512 v = _mm512_set1_ps(x);
        return fma(F{ v, v }, y, z);
    }
    static F mul(F x, F y) { return { _mm512_mul_ps(x.a, y.a), _mm512_mul_ps(x.b, y.b) }; }
    static F widen(B v) {
        return { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(v))),
                 _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(v, 1))) };
    }
    static B bytes(const uint8_t * p) { return _mm256_loadu_si256((const __m256i *) p); }
    static B nibbles(const uint8_t * p) {
        const __m128i v = _mm_loadu_si128((const __m128i *) p);
        return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(v, 4), v), _mm256_set1_epi8(15));
    }
    static B bits(const uint8_t * p) {
        unsigned v;
        __builtin_memcpy(&v, p, 4);
        return _mm256_maskz_set1_epi8(v, 16);
    }
    static B crumbs(const uint8_t * p, bool second) {
        __m128i v = _mm_loadu_si128((const __m128i *) p);
        v = second ? _mm_srli_epi16(v, 4) : v;
        const __m256i both = _mm256_set_m128i(_mm_srli_epi16(v, 2), v);
        return _mm256_slli_epi16(_mm256_and_si256(both, _mm256_set1_epi8(3)), 4);
    }
    static B add(B x, B y) { return _mm256_add_epi8(x, y); }
    static B sub(B x, int y) { return _mm256_sub_epi8(x, _mm256_set1_epi8(char(y))); }
    static F f16(const uint8_t * p) {
        return { _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)), _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) (p + 32))) };
    }
    static __m512 bf16x16(const uint8_t * p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *) p)), 16));
    }
    static F bf16(const uint8_t * p) { return { bf16x16(p), bf16x16(p + 32) }; }
};

} // namespace
} // namespace ls

#include "neuron_kernels_impl.h"

ls::AccumulateFn ls::accumulate_avx512(ggml_type type) { return accumulate_for(type); }

#else

ls::AccumulateFn ls::accumulate_avx512(ggml_type) { return nullptr; }

#endif
