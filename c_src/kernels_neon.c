/* NEON (every AArch64 processor): 4 lanes. */
#if defined(__aarch64__)
#include <arm_neon.h>
#include <string.h>

#include "offload_core.h"

#define LANES 4
typedef float32x4_t v32;
typedef float64x2_t v64;
typedef uint64x2_t vint;
typedef uint32x4_t vbits;

static inline v32 v_set(float x) { return vdupq_n_f32(x); }
static inline v32 v_load(const float *a) { return vld1q_f32(a); }
static inline void v_store(float *a, v32 x) { vst1q_f32(a, x); }
static inline v32 v_add(v32 a, v32 b) { return vaddq_f32(a, b); }
static inline v32 v_sub(v32 a, v32 b) { return vsubq_f32(a, b); }
static inline v32 v_mul(v32 a, v32 b) { return vmulq_f32(a, b); }
static inline v32 v_div(v32 a, v32 b) { return vdivq_f32(a, b); }
static inline v32 v_sqrt(v32 a) { return vsqrtq_f32(a); }
static inline v32 v_fma(v32 a, v32 b, v32 c) { return vfmaq_f32(c, a, b); }

static inline v32 v_load_bf16(const uint16_t *a) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(a), 16)); }
static inline v32 v_load_f16(const uint16_t *a) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(a))); }
static inline void v_store_bf16(uint16_t *a, v32 x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    rounded = vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000));
    vst1_u16(a, vshrn_n_u32(rounded, 16));
}
static inline void v_store_f16(uint16_t *a, v32 x) { vst1_u16(a, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

/* No streaming stores: STNP is a hint with no measured gain at hand. */
static inline void v_stream(float *a, v32 x) { v_store(a, x); }
static inline void v_stream_bf16(uint16_t *a, v32 x) { v_store_bf16(a, x); }
static inline void v_stream_f16(uint16_t *a, v32 x) { v_store_f16(a, x); }
static inline void v_fence(void) {}

static inline vbits v_bits_zero(void) { return vdupq_n_u32(0); }
static inline vbits v_abs_max(vbits running, v32 x) {
    return vmaxq_u32(running, vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x7fffffff)));
}
static inline vbits v_abs_min(vbits running, v32 x) {
    uint32x4_t magnitude = vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x7fffffff));
    return vmaxq_u32(running, vsubq_u32(vdupq_n_u32(0), magnitude));
}
static inline uint32_t v_bits_top(vbits a) { return vmaxvq_u32(a); }

static inline v64 w_low(v32 a) { return vcvt_f64_f32(vget_low_f32(a)); }
static inline v64 w_high(v32 a) { return vcvt_high_f64_f32(a); }
static inline v64 w_set(double x) { return vdupq_n_f64(x); }
static inline v64 w_add(v64 a, v64 b) { return vaddq_f64(a, b); }
static inline v64 w_sub(v64 a, v64 b) { return vsubq_f64(a, b); }
static inline v64 w_fma(v64 a, v64 b, v64 c) { return vfmaq_f64(c, a, b); }
static inline vint w_int_zero(void) { return vdupq_n_u64(0); }
static inline vint w_bits_add(vint sum, v64 a) { return vaddq_u64(sum, vreinterpretq_u64_f64(a)); }
static inline uint64_t w_int_sum(vint a) { return vaddvq_u64(a); }

#include "kernels_simd.h"

const oc_kernels oc_neon_kernels = {adam, sum_squares, accumulate, reduce, cast};
#endif
