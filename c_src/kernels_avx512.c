/* AVX-512 F, BW, DQ and VL: 16 lanes. The bf16 conversion instruction of AVX512-BF16 flushes subnormals,
 * so it cannot be used. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "offload_core.h"
#include "target.h"

OC_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

#define LANES 16
typedef __m512 v32;
typedef __m512d v64;
typedef __m512i vint;
typedef __m512i vbits;

INLINE v32 v_set(float x) { return _mm512_set1_ps(x); }
INLINE v32 v_load(const float *a) { return _mm512_loadu_ps(a); }
INLINE void v_store(float *a, v32 x) { _mm512_storeu_ps(a, x); }
INLINE void v_stream(float *a, v32 x) { _mm512_stream_ps(a, x); }
INLINE v32 v_add(v32 a, v32 b) { return _mm512_add_ps(a, b); }
INLINE v32 v_sub(v32 a, v32 b) { return _mm512_sub_ps(a, b); }
INLINE v32 v_mul(v32 a, v32 b) { return _mm512_mul_ps(a, b); }
INLINE v32 v_div(v32 a, v32 b) { return _mm512_div_ps(a, b); }
INLINE v32 v_sqrt(v32 a) { return _mm512_sqrt_ps(a); }
INLINE v32 v_fma(v32 a, v32 b, v32 c) { return _mm512_fmadd_ps(a, b, c); }

INLINE v32 v_load_bf16(const uint16_t *a) {
    __m256i halves = _mm256_loadu_si256((const __m256i *)a);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
INLINE v32 v_load_f16(const uint16_t *a) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)a)); }

INLINE __m512i v_nearest_bf16(v32 x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
}
INLINE __m256i v_to_bf16(v32 x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(v_nearest_bf16(x), 16)); }
INLINE __m256i v_to_f16(v32 x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
INLINE void v_store_bf16(uint16_t *a, v32 x) { _mm256_storeu_si256((__m256i *)a, v_to_bf16(x)); }
INLINE void v_stream_bf16(uint16_t *a, v32 x) { _mm256_stream_si256((__m256i *)a, v_to_bf16(x)); }
INLINE void v_store_f16(uint16_t *a, v32 x) { _mm256_storeu_si256((__m256i *)a, v_to_f16(x)); }
INLINE void v_stream_f16(uint16_t *a, v32 x) { _mm256_stream_si256((__m256i *)a, v_to_f16(x)); }
INLINE void v_fence(void) { _mm_sfence(); }

INLINE vbits v_bits_zero(void) { return _mm512_setzero_si512(); }
INLINE vbits v_bits_of(v32 x) { return _mm512_castps_si512(x); }
INLINE vbits v_bits_load(const void *a) { return _mm512_loadu_si512(a); }
INLINE v32 v_low_halves(vbits a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
INLINE v32 v_high_halves(vbits a) {
    return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32((int)0xffff0000)));
}
INLINE vbits v_twice32(vbits a) { return _mm512_add_epi32(a, a); }
INLINE vbits v_twice16(vbits a) { return _mm512_add_epi16(a, a); }
INLINE vbits v_minus32(vbits a) { return _mm512_sub_epi32(_mm512_setzero_si512(), a); }
INLINE vbits v_minus16(vbits a) { return _mm512_sub_epi16(_mm512_setzero_si512(), a); }
INLINE vbits v_max32(vbits a, vbits b) { return _mm512_max_epu32(a, b); }
INLINE vbits v_max16(vbits a, vbits b) { return _mm512_max_epu16(a, b); }
INLINE void v_bits_store(void *a, vbits x) { _mm512_storeu_si512(a, x); }

INLINE v32 v_of_bits(vbits a) { return _mm512_castsi512_ps(a); }
INLINE vbits v_bits_set(uint32_t x) { return _mm512_set1_epi32((int)x); }
INLINE vbits v_bits_add(vbits a, vbits b) { return _mm512_add_epi32(a, b); }
INLINE vbits v_bits_sub(vbits a, vbits b) { return _mm512_sub_epi32(a, b); }
INLINE vbits v_bits_mul(vbits a, vbits b) { return _mm512_mullo_epi32(a, b); }
INLINE vbits v_bits_and(vbits a, vbits b) { return _mm512_and_si512(a, b); }
INLINE vbits v_bits_or(vbits a, vbits b) { return _mm512_or_si512(a, b); }
INLINE vbits v_bits_xor(vbits a, vbits b) { return _mm512_xor_si512(a, b); }
#define v_bits_left(a, n) _mm512_slli_epi32(a, n)
#define v_bits_right(a, n) _mm512_srli_epi32(a, n)
INLINE vbits v_min32(vbits a, vbits b) { return _mm512_min_epu32(a, b); }
INLINE uint32_t v_top(vbits a) { return _mm512_reduce_max_epu32(a); }
INLINE vbits v_load_u8(const uint8_t *a) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)a)); }
INLINE v32 v_load_e4m3(const uint8_t *a) {
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)a)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xbfff)));
}
INLINE vbits v_load_s16(const uint16_t *a) { return _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)a)); }
static const uint16_t every_other[64] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                         32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62,
                                         1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                         33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
INLINE void v_store_lower(uint16_t *array, vbits a, vbits b) {
    _mm512_storeu_si512(array, _mm512_permutex2var_epi16(a, _mm512_loadu_si512(every_other), b));
}
INLINE __m512i v_upper(vbits a, vbits b) {
    return _mm512_permutex2var_epi16(a, _mm512_loadu_si512(every_other + 32), b);
}
INLINE void v_store_upper(uint16_t *array, vbits a, vbits b) { _mm512_storeu_si512(array, v_upper(a, b)); }
INLINE void v_stream_upper(uint16_t *array, vbits a, vbits b) {
    __m512i upper = v_upper(a, b);
    _mm256_stream_si256((__m256i *)array, _mm512_castsi512_si256(upper));
    _mm256_stream_si256((__m256i *)(array + 16), _mm512_extracti64x4_epi64(upper, 1));
}
INLINE __m512i v_codes(__m512i upper, int has_sign) {
    __m512i code = _mm512_srli_epi16(upper, 4), magnitude = _mm512_set1_epi16(0x7f); /* 0xca: a choice */
    return has_sign ? _mm512_ternarylogic_epi32(magnitude, code, _mm512_srli_epi16(upper, 8), 0xca) : code;
}
INLINE void v_store_codes(uint8_t *array, vbits a, vbits b, vbits c, vbits d, int has_sign) {
    static const uint64_t even_first[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    __m512i packed = _mm512_packus_epi16(v_codes(v_upper(a, b), has_sign), v_codes(v_upper(c, d), has_sign));
    _mm512_storeu_si512(array, _mm512_permutexvar_epi64(_mm512_loadu_si512(even_first), packed));
}
typedef __mmask16 vmask;
INLINE vmask v_equal(vbits a, vbits b) { return _mm512_cmpeq_epi32_mask(a, b); }
INLINE vmask v_ordered(v32 a) { return _mm512_cmp_ps_mask(a, a, _CMP_ORD_Q); }
INLINE vmask v_mask_clear(vmask a, vmask b) { return (vmask)(a & ~b); }
INLINE vbits v_pick(vmask where, vbits a, vbits b) { return _mm512_mask_mov_epi32(b, where, a); }
INLINE vmask v_mask_load(const uint8_t *bytes, int64_t i) {
    vmask mask;
    memcpy(&mask, bytes + i / 8, sizeof mask);
    return mask;
}
INLINE void v_mask_store(uint8_t *bytes, int64_t i, vmask mask) { memcpy(bytes + i / 8, &mask, sizeof mask); }

INLINE v64 w_load(const float *a) { return _mm512_cvtps_pd(_mm256_loadu_ps(a)); }
INLINE v64 w_set(double x) { return _mm512_set1_pd(x); }
INLINE v64 w_add(v64 a, v64 b) { return _mm512_add_pd(a, b); }
INLINE v64 w_sub(v64 a, v64 b) { return _mm512_sub_pd(a, b); }
INLINE v64 w_fma(v64 a, v64 b, v64 c) { return _mm512_fmadd_pd(a, b, c); }
INLINE vint w_int_zero(void) { return _mm512_setzero_si512(); }
INLINE vint w_bits_add(vint sum, v64 a) { return _mm512_add_epi64(sum, _mm512_castpd_si512(a)); }
/* GCC's _mm512_reduce_add_epi64 adds signed numbers, whose overflow is undefined. */
INLINE uint64_t w_int_sum(vint a) {
    uint64_t each[8], sum = 0;
    _mm512_storeu_si512(each, a);
    for (int i = 0; i < 8; i++)
        sum += each[i];
    return sum;
}

#include "kernels_simd.h"

OC_TARGET_END

const oc_kernels oc_avx512_kernels = {OC_AVX512, update, sum_squares, accumulate, reduce, cast};
#endif
