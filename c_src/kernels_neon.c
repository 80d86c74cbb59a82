/* NEON (every AArch64 processor): 4 lanes. */
#if defined(__aarch64__)
#include <arm_neon.h>
#include <string.h>

#include "offload_core.h"
#include "target.h"

#define LANES 4
typedef float32x4_t v32;
typedef float64x2_t v64;
typedef uint64x2_t vint;
typedef uint32x4_t vbits;

INLINE v32 v_set(float x) { return vdupq_n_f32(x); }
INLINE v32 v_load(const float *a) { return vld1q_f32(a); }
INLINE void v_store(float *a, v32 x) { vst1q_f32(a, x); }
INLINE v32 v_add(v32 a, v32 b) { return vaddq_f32(a, b); }
INLINE v32 v_sub(v32 a, v32 b) { return vsubq_f32(a, b); }
INLINE v32 v_mul(v32 a, v32 b) { return vmulq_f32(a, b); }
INLINE v32 v_div(v32 a, v32 b) { return vdivq_f32(a, b); }
INLINE v32 v_sqrt(v32 a) { return vsqrtq_f32(a); }
INLINE v32 v_fma(v32 a, v32 b, v32 c) { return vfmaq_f32(c, a, b); }

INLINE v32 v_load_bf16(const uint16_t *a) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(a), 16)); }
INLINE v32 v_load_f16(const uint16_t *a) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(a))); }
INLINE uint32x4_t v_nearest_bf16(v32 x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000));
}
INLINE void v_store_bf16(uint16_t *a, v32 x) { vst1_u16(a, vshrn_n_u32(v_nearest_bf16(x), 16)); }
INLINE void v_store_f16(uint16_t *a, v32 x) { vst1_u16(a, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

/* No streaming stores: STNP is only a hint, and no gain was measured. */
INLINE void v_stream(float *a, v32 x) { v_store(a, x); }
INLINE void v_stream_bf16(uint16_t *a, v32 x) { v_store_bf16(a, x); }
INLINE void v_stream_f16(uint16_t *a, v32 x) { v_store_f16(a, x); }
INLINE void v_fence(void) {}

INLINE vbits v_bits_zero(void) { return vdupq_n_u32(0); }
INLINE vbits v_bits_of(v32 x) { return vreinterpretq_u32_f32(x); }
INLINE vbits v_bits_load(const void *a) { return vreinterpretq_u32_u8(vld1q_u8(a)); }
INLINE v32 v_low_halves(vbits a) { return vreinterpretq_f32_u32(vshlq_n_u32(a, 16)); }
INLINE v32 v_high_halves(vbits a) { return vreinterpretq_f32_u32(vandq_u32(a, vdupq_n_u32(0xffff0000))); }
INLINE vbits v_twice32(vbits a) { return vaddq_u32(a, a); }
INLINE vbits v_twice16(vbits a) {
    return vreinterpretq_u32_u16(vaddq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(a)));
}
INLINE vbits v_minus32(vbits a) { return vsubq_u32(vdupq_n_u32(0), a); }
INLINE vbits v_minus16(vbits a) { return vreinterpretq_u32_u16(vsubq_u16(vdupq_n_u16(0), vreinterpretq_u16_u32(a))); }
INLINE vbits v_max32(vbits a, vbits b) { return vmaxq_u32(a, b); }
INLINE vbits v_max16(vbits a, vbits b) {
    return vreinterpretq_u32_u16(vmaxq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
}
INLINE void v_bits_store(void *a, vbits x) { vst1q_u8(a, vreinterpretq_u8_u32(x)); }

INLINE v32 v_of_bits(vbits a) { return vreinterpretq_f32_u32(a); }
INLINE vbits v_bits_set(uint32_t x) { return vdupq_n_u32(x); }
INLINE vbits v_bits_add(vbits a, vbits b) { return vaddq_u32(a, b); }
INLINE vbits v_bits_sub(vbits a, vbits b) { return vsubq_u32(a, b); }
INLINE vbits v_bits_mul(vbits a, vbits b) { return vmulq_u32(a, b); }
INLINE vbits v_bits_and(vbits a, vbits b) { return vandq_u32(a, b); }
INLINE vbits v_bits_or(vbits a, vbits b) { return vorrq_u32(a, b); }
INLINE vbits v_bits_xor(vbits a, vbits b) { return veorq_u32(a, b); }
#define v_bits_left(a, n) vshlq_n_u32(a, n)
#define v_bits_right(a, n) vshrq_n_u32(a, n)
INLINE vbits v_min32(vbits a, vbits b) { return vminq_u32(a, b); }
INLINE uint32_t v_top(vbits a) { return vmaxvq_u32(a); }
INLINE vbits v_load_u8(const uint8_t *a) {
    uint32_t four;
    memcpy(&four, a, sizeof four);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}
INLINE v32 v_load_e4m3(const uint8_t *a) {
    uint32_t four;
    memcpy(&four, a, sizeof four);
    uint16x4_t wide = vget_low_u16(vreinterpretq_u16_s16(vmovl_s8(vcreate_s8(four))));
    wide = vand_u16(vshl_n_u16(wide, 7), vdup_n_u16(0xbfff));
    return vcvt_f32_f16(vreinterpret_f16_u16(wide));
}
INLINE vbits v_load_s16(const uint16_t *a) {
    return vreinterpretq_u32_s32(vmovl_s16(vreinterpret_s16_u16(vld1_u16(a))));
}
INLINE uint16x8_t v_upper(vbits a, vbits b) { return vuzp2q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)); }
INLINE void v_store_upper(uint16_t *array, vbits a, vbits b) { vst1q_u16(array, v_upper(a, b)); }
INLINE void v_stream_upper(uint16_t *array, vbits a, vbits b) { v_store_upper(array, a, b); }
INLINE uint8x8_t v_codes(uint16x8_t upper, int has_sign) {
    uint8x8_t code = vshrn_n_u16(upper, 4);
    return has_sign ? vbsl_u8(vdup_n_u8(0x80), vshrn_n_u16(upper, 8), code) : code;
}
INLINE void v_store_codes(uint8_t *array, vbits a, vbits b, vbits c, vbits d, int has_sign) {
    vst1q_u8(array, vcombine_u8(v_codes(v_upper(a, b), has_sign), v_codes(v_upper(c, d), has_sign)));
}
INLINE void v_store_lower(uint16_t *array, vbits a, vbits b) {
    vst1q_u16(array, vuzp1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
}
typedef uint32x4_t vmask; /* all bits of a part set, or none */
INLINE vmask v_equal(vbits a, vbits b) { return vceqq_u32(a, b); }
INLINE vmask v_ordered(v32 a) { return vceqq_f32(a, a); }
INLINE vmask v_mask_clear(vmask a, vmask b) { return vbicq_u32(a, b); }
INLINE vbits v_pick(vmask where, vbits a, vbits b) { return vbslq_u32(where, a, b); }
static const uint32_t each_bit[4] = {1, 2, 4, 8};
INLINE vmask v_mask_load(const uint8_t *bytes, int64_t i) {
    return vtstq_u32(vdupq_n_u32((uint32_t)bytes[i / 8] >> (i & 4)), vld1q_u32(each_bit));
}
INLINE void v_mask_store(uint8_t *bytes, int64_t i, vmask mask) {
    uint8_t four = (uint8_t)vaddvq_u32(vandq_u32(mask, vld1q_u32(each_bit)));
    bytes[i / 8] = i & 4 ? (uint8_t)((bytes[i / 8] & 15) | four << 4) : (uint8_t)((bytes[i / 8] & 0xf0) | four);
}

INLINE v64 w_load(const float *a) { return vcvt_f64_f32(vld1_f32(a)); }
INLINE v64 w_set(double x) { return vdupq_n_f64(x); }
INLINE v64 w_add(v64 a, v64 b) { return vaddq_f64(a, b); }
INLINE v64 w_sub(v64 a, v64 b) { return vsubq_f64(a, b); }
INLINE v64 w_fma(v64 a, v64 b, v64 c) { return vfmaq_f64(c, a, b); }
INLINE vint w_int_zero(void) { return vdupq_n_u64(0); }
INLINE vint w_bits_add(vint sum, v64 a) { return vaddq_u64(sum, vreinterpretq_u64_f64(a)); }
INLINE uint64_t w_int_sum(vint a) { return vaddvq_u64(a); }

#include "kernels_simd.h"

const oc_kernels oc_neon_kernels = {OC_NEON, update, sum_squares, accumulate, reduce, cast};
#endif
