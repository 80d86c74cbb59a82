/* The oracle: every kernel written once, plainly, one element at a time.
 *
 * Other files must equal this one bit for bit. Compiled with -ffp-contract=off: only fmaf is an
 * FMA.
 */
#include <math.h>
#include <string.h>

#include "offload_core.h"
#include "sum_squares.h"

static uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint16_t to_bfloat16(float x) {
    uint32_t bits = float_bits(x);
    if (x != x)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float from_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 1023;
    if (exponent == 31) /* inf, or a NaN made quiet */
        return bits_float(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
    if (exponent == 0) { /* a multiple of 2^-24 */
        float magnitude = (float)fraction * 0x1p-24f;
        return bits_float(sign | float_bits(magnitude));
    }
    return bits_float(sign | (exponent + 112) << 23 | fraction << 13);
}

static uint16_t to_float16(float x) {
    uint32_t bits = float_bits(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | ((magnitude >> 13) & 0x1ff));
    if (magnitude >= 0x477ff000) /* 65520 and above round to inf */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) { /* below 2^-14: round to a multiple of 2^-24, as adding 0.5 does */
        float rounded = bits_float(magnitude) + 0.5f;
        return (uint16_t)(sign | (float_bits(rounded) - float_bits(0.5f)));
    }
    magnitude += 0xfff + ((magnitude >> 13) & 1);
    return (uint16_t)(sign | ((magnitude - 0x38000000) >> 13));
}

static float load(const void *array, int dtype, int64_t i) {
    if (dtype == OC_FLOAT32)
        return ((const float *)array)[i];
    uint16_t half = ((const uint16_t *)array)[i];
    return dtype == OC_BFLOAT16 ? bits_float((uint32_t)half << 16) : from_float16(half);
}

static void store(void *array, int dtype, int64_t i, float x) {
    if (dtype == OC_FLOAT32)
        ((float *)array)[i] = x;
    else
        ((uint16_t *)array)[i] = dtype == OC_BFLOAT16 ? to_bfloat16(x) : to_float16(x);
}

static void adam(const oc_segment *segment, int64_t begin, int64_t end, const oc_rounded_scalars *s,
                 const oc_adam_kind *kind, int stream) {
    (void)stream;
    int l2 = kind->adam_mode == OC_ADAM && s->weight_decay != 0;
    for (int64_t i = begin; i < end; i++) {
        float g = load(segment->grad, kind->grad_dtype, i);
        float p = segment->master[i], m = segment->exp_avg[i], v = segment->exp_avg_sq[i];
        if (s->grad_scale != 1)
            g = g * s->grad_scale;
        if (kind->op_order == OC_ORDER_TORCH) {
            if (kind->adam_mode == OC_ADAMW)
                p = p * s->decay;
            if (l2)
                g = fmaf(p, s->weight_decay, g);
            float difference = g - m;
            m = s->one_minus_beta1 < 0.5f ? fmaf(s->one_minus_beta1, difference, m)
                                          : fmaf(s->one_minus_beta1 - 1, difference, g);
            v = fmaf(s->one_minus_beta2 * g, g, v * s->beta2);
            p = p + s->step_size * m / (sqrtf(v) / s->correction2 + s->eps);
        } else {
            if (l2)
                g = g + s->weight_decay * p;
            m = s->one_minus_beta1 * g + s->beta1 * m;
            v = s->one_minus_beta2 * (g * g) + s->beta2 * v;
            float update = m / s->correction1 / (sqrtf(v / s->correction2 + s->eps_root) + s->eps);
            if (kind->adam_mode == OC_ADAMW && s->weight_decay != 0)
                update = update + s->weight_decay * p;
            p = p + update * s->step_size;
        }
        if (!kind->keep_states) {
            segment->master[i] = p;
            segment->exp_avg[i] = m;
            segment->exp_avg_sq[i] = v;
        }
        if (kind->param_dtype != OC_NO_PARAM)
            store(segment->param, kind->param_dtype, i, p);
    }
}

static void sum_squares(const void *src, int dtype, int64_t n, int64_t *bins) {
    for (int64_t i = 0; i < n; i++) {
        float x = load(src, dtype, i);
        if (isfinite(x))
            oc_add_square(bins, x);
        else
            bins[OC_NORM_NONFINITE]++;
    }
}

static void accumulate(const void *src, int dtype, float *dst, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        dst[i] = dst[i] + load(src, dtype, i);
}

static void reduce(const oc_reduction *a, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        float sum = load(a->src, a->dtype, i);
        for (int64_t r = 1; r < a->n_sources; r++)
            sum = sum + load(a->src, a->dtype, r * a->stride + i);
        if (a->divisor != 1)
            sum = sum / a->divisor;
        a->dst[i] = a->add ? a->dst[i] + sum : sum;
    }
}

static void cast(const void *src, int src_dtype, void *dst, int dst_dtype, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        store(dst, dst_dtype, i, load(src, src_dtype, i));
}

const oc_kernels oc_scalar_kernels = {OC_SCALAR, adam, sum_squares, accumulate, reduce, cast};
