/* AVX2, FMA and F16C: 8 lanes. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "offload_core.h"
#include "target.h"

OC_TARGET_BEGIN("avx2,fma,f16c")

#define LANES 8
typedef __m256 v32;
typedef __m256d v64;
typedef __m256i vint;
typedef __m256i vbits;

INLINE v32 v_set(float x) { return _mm256_set1_ps(x); }
INLINE v32 v_load(const float *a) { return _mm256_loadu_ps(a); }
INLINE void v_store(float *a, v32 x) { _mm256_storeu_ps(a, x); }
INLINE void v_stream(float *a, v32 x) { _mm256_stream_ps(a, x); }
INLINE v32 v_add(v32 a, v32 b) { return _mm256_add_ps(a, b); }
INLINE v32 v_sub(v32 a, v32 b) { return _mm256_sub_ps(a, b); }
INLINE v32 v_mul(v32 a, v32 b) { return _mm256_mul_ps(a, b); }
INLINE v32 v_div(v32 a, v32 b) { return _mm256_div_ps(a, b); }
INLINE v32 v_sqrt(v32 a) { return _mm256_sqrt_ps(a); }
INLINE v32 v_fma(v32 a, v32 b, v32 c) { return _mm256_fmadd_ps(a, b, c); }

INLINE v32 v_load_bf16(const uint16_t *a) {
    __m128i halves = _mm_loadu_si128((const __m128i *)a);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
INLINE v32 v_load_f16(const uint16_t *a) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)a)); }

INLINE __m256i v_nearest_bf16(v32 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
}
INLINE __m128i v_to_bf16(v32 x) {
    __m256i rounded = _mm256_srli_epi32(v_nearest_bf16(x), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
INLINE __m128i v_to_f16(v32 x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
INLINE void v_store_bf16(uint16_t *a, v32 x) { _mm_storeu_si128((__m128i *)a, v_to_bf16(x)); }
INLINE void v_stream_bf16(uint16_t *a, v32 x) { _mm_stream_si128((__m128i *)a, v_to_bf16(x)); }
INLINE void v_store_f16(uint16_t *a, v32 x) { _mm_storeu_si128((__m128i *)a, v_to_f16(x)); }
INLINE void v_stream_f16(uint16_t *a, v32 x) { _mm_stream_si128((__m128i *)a, v_to_f16(x)); }
INLINE void v_fence(void) { _mm_sfence(); }

INLINE vbits v_bits_zero(void) { return _mm256_setzero_si256(); }
INLINE vbits v_bits_of(v32 x) { return _mm256_castps_si256(x); }
INLINE vbits v_bits_load(const void *a) { return _mm256_loadu_si256(a); }
INLINE v32 v_low_halves(vbits a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
INLINE v32 v_high_halves(vbits a) {
    return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32((int)0xffff0000)));
}
INLINE vbits v_twice32(vbits a) { return _mm256_add_epi32(a, a); }
INLINE vbits v_twice16(vbits a) { return _mm256_add_epi16(a, a); }
INLINE vbits v_minus32(vbits a) { return _mm256_sub_epi32(_mm256_setzero_si256(), a); }
INLINE vbits v_minus16(vbits a) { return _mm256_sub_epi16(_mm256_setzero_si256(), a); }
INLINE vbits v_max32(vbits a, vbits b) { return _mm256_max_epu32(a, b); }
INLINE vbits v_max16(vbits a, vbits b) { return _mm256_max_epu16(a, b); }
INLINE void v_bits_store(void *a, vbits x) { _mm256_storeu_si256(a, x); }

INLINE v32 v_of_bits(vbits a) { return _mm256_castsi256_ps(a); }
INLINE vbits v_bits_set(uint32_t x) { return _mm256_set1_epi32((int)x); }
INLINE vbits v_bits_add(vbits a, vbits b) { return _mm256_add_epi32(a, b); }
INLINE vbits v_bits_sub(vbits a, vbits b) { return _mm256_sub_epi32(a, b); }
INLINE vbits v_bits_mul(vbits a, vbits b) { return _mm256_mullo_epi32(a, b); }
INLINE vbits v_bits_and(vbits a, vbits b) { return _mm256_and_si256(a, b); }
INLINE vbits v_bits_or(vbits a, vbits b) { return _mm256_or_si256(a, b); }
INLINE vbits v_bits_xor(vbits a, vbits b) { return _mm256_xor_si256(a, b); }
#define v_bits_left(a, n) _mm256_slli_epi32(a, n)
#define v_bits_right(a, n) _mm256_srli_epi32(a, n)
INLINE vbits v_min32(vbits a, vbits b) { return _mm256_min_epu32(a, b); }
INLINE uint32_t v_top(vbits a) {
    __m128i b = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    b = _mm_max_epu32(b, _mm_shuffle_epi32(b, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(b, _mm_shuffle_epi32(b, 0xb1)));
}
INLINE vbits v_load_u8(const uint8_t *a) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)a)); }
INLINE v32 v_load_e4m3(const uint8_t *a) {
    __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)a)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16((short)0xbfff)));
}
INLINE vbits v_load_s16(const uint16_t *a) { return _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)a)); }
INLINE __m256i v_upper(vbits a, vbits b) { /* four parts of a, four of b, and the rest of both */
    return _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
}
INLINE void v_store_upper(uint16_t *array, vbits a, vbits b) {
    _mm256_storeu_si256((__m256i *)array, _mm256_permute4x64_epi64(v_upper(a, b), 0xd8));
}
INLINE void v_stream_upper(uint16_t *array, vbits a, vbits b) {
    __m256i upper = _mm256_permute4x64_epi64(v_upper(a, b), 0xd8);
    _mm_stream_si128((__m128i *)array, _mm256_castsi256_si128(upper));
    _mm_stream_si128((__m128i *)(array + 8), _mm256_extracti128_si256(upper, 1));
}
INLINE __m256i v_codes(__m256i upper, int has_sign) {
    __m256i code = _mm256_srli_epi16(upper, 4), sign = _mm256_set1_epi16(0x80);
    if (has_sign)
        code = _mm256_or_si256(_mm256_and_si256(code, _mm256_set1_epi16(0x7f)),
                               _mm256_and_si256(_mm256_srli_epi16(upper, 8), sign));
    return code;
}
INLINE void v_store_codes(uint8_t *array, vbits a, vbits b, vbits c, vbits d, int has_sign) {
    __m256i packed = _mm256_packus_epi16(v_codes(v_upper(a, b), has_sign), v_codes(v_upper(c, d), has_sign));
    packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)array, packed);
}
INLINE void v_store_lower(uint16_t *array, vbits a, vbits b) {
    v_store_upper(array, _mm256_slli_epi32(a, 16), _mm256_slli_epi32(b, 16));
}
typedef __m256i vmask; /* all bits of a part set, or none */
INLINE vmask v_equal(vbits a, vbits b) { return _mm256_cmpeq_epi32(a, b); }
INLINE vmask v_ordered(v32 a) { return _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_ORD_Q)); }
INLINE vmask v_mask_clear(vmask a, vmask b) { return _mm256_andnot_si256(b, a); }
INLINE vbits v_pick(vmask where, vbits a, vbits b) { return _mm256_blendv_epi8(b, a, where); }
INLINE vmask v_mask_load(const uint8_t *bytes, int64_t i) {
    const vbits each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return v_equal(v_bits_and(v_bits_set(bytes[i / 8]), each), each);
}
INLINE void v_mask_store(uint8_t *bytes, int64_t i, vmask mask) {
    bytes[i / 8] = (uint8_t)_mm256_movemask_ps(_mm256_castsi256_ps(mask));
}

INLINE v64 w_load(const float *a) { return _mm256_cvtps_pd(_mm_loadu_ps(a)); }
INLINE v64 w_set(double x) { return _mm256_set1_pd(x); }
INLINE v64 w_add(v64 a, v64 b) { return _mm256_add_pd(a, b); }
INLINE v64 w_sub(v64 a, v64 b) { return _mm256_sub_pd(a, b); }
INLINE v64 w_fma(v64 a, v64 b, v64 c) { return _mm256_fmadd_pd(a, b, c); }
INLINE vint w_int_zero(void) { return _mm256_setzero_si256(); }
INLINE vint w_bits_add(vint sum, v64 a) { return _mm256_add_epi64(sum, _mm256_castpd_si256(a)); }
INLINE uint64_t w_int_sum(vint a) {
    uint64_t each[4];
    _mm256_storeu_si256((__m256i *)each, a);
    return each[0] + each[1] + each[2] + each[3];
}

#include "kernels_simd.h"

OC_TARGET_END

const oc_kernels oc_avx2_kernels = {OC_AVX2, update, sum_squares, accumulate, reduce, cast};
#endif
