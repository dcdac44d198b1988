// AVX-512 with VNNI; compiled with flags of its own, so nothing here may run before the processor was asked.
#include "repacked_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)

#include <immintrin.h>

namespace ls {
namespace {

__m512i eight_of_all_rows(const int8_t * x) {
    long long v;
    __builtin_memcpy(&v, x, 8);
    return _mm512_set1_epi64(v);
}

// Quants are stored as q ^ 8, the weight is d * (q - 8): what is multiplied here is q, and `offset` makes up for the 8. One fused
// multiply-add of float for each block and row, as in llama.cpp's kernel for AVX2: the integers before it are exact.
void q4_0(const RepackedInput & x, const uint8_t * rows, float * out) {
    const __m512i low = _mm512_set1_epi8(15), flip = _mm512_set1_epi8(8);
    const auto quants = [&](__m512i v) { return _mm512_ternarylogic_epi32(v, low, flip, 0x6a); }; // (v & low) ^ flip
    __m256 sum = _mm256_setzero_ps();
    for (uint32_t b = 0; b < x.n_blocks; ++b, rows += kRepackedBlockBytes) {
        const int8_t * q8 = (const int8_t *) x.blocks + 34 * b + 2;
        const __m512i first = _mm512_loadu_si512(rows + 16), second = _mm512_loadu_si512(rows + 80);
        __m512i dots = _mm512_set1_epi32(x.offset[b]), more = _mm512_setzero_si512(); // two lanes a row
        dots = _mm512_dpbusd_epi32(dots, quants(first), eight_of_all_rows(q8));
        more = _mm512_dpbusd_epi32(more, quants(second), eight_of_all_rows(q8 + 8));
        dots = _mm512_dpbusd_epi32(dots, quants(_mm512_srli_epi16(first, 4)), eight_of_all_rows(q8 + 16));
        more = _mm512_dpbusd_epi32(more, quants(_mm512_srli_epi16(second, 4)), eight_of_all_rows(q8 + 24));
        dots = _mm512_add_epi32(dots, more);
        const __m256i dot = _mm512_cvtepi64_epi32(_mm512_add_epi32(dots, _mm512_srli_epi64(dots, 32)));
        const __m256 scale = _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) rows)), _mm256_set1_ps(x.scale[b]));
        sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, sum);
    }
    _mm256_storeu_ps(out, sum);
}

} // namespace
} // namespace ls

ls::RepackedFn ls::repacked_q4_0_avx512() { return q4_0; }

#else

ls::RepackedFn ls::repacked_q4_0_avx512() { return nullptr; }

#endif
