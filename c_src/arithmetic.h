/* The arithmetic of all kernels, written once, plainly, one element at a time: the oracle.
 *
 * kernels_scalar.c is made of it, and so are the kernels of a device (device.h). The vector kernels must equal it bit
 * for bit. Compilers contract nothing here: only fmaf is an FMA.
 */
#ifndef OC_ARITHMETIC_H
#define OC_ARITHMETIC_H

#include "formats.h"
#include "offload_core.h"
#include "rules.h"
#include "sum_squares.h"

OC_FUNCTION uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

OC_FUNCTION float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

OC_FUNCTION uint16_t to_bfloat16(float x) {
    uint32_t bits = float_bits(x);
    if (x != x)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

OC_FUNCTION float from_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 1023;
    if (exponent == 31) /* inf, or a NaN made quiet */
        return bits_float(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
    if (exponent == 0) { /* a multiple of 2^-24 */
        float magnitude = (float)fraction * 0x1p-24f;
        return bits_float(sign | float_bits(magnitude));
    }
    return bits_float(sign | (exponent + 112) << 23 | fraction << 13);
}

OC_FUNCTION uint16_t to_float16(float x) {
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

OC_FUNCTION float from_bfloat16(uint16_t half) { return bits_float((uint32_t)half << 16); }

OC_FUNCTION float load(const void *array, int dtype, int64_t i) {
    if (dtype == OC_FLOAT32)
        return ((const float *)array)[i];
    uint16_t half = ((const uint16_t *)array)[i];
    return dtype == OC_BFLOAT16 ? from_bfloat16(half) : from_float16(half);
}

OC_FUNCTION void store(void *array, int dtype, int64_t i, float x) {
    if (dtype == OC_FLOAT32)
        ((float *)array)[i] = x;
    else
        ((uint16_t *)array)[i] = dtype == OC_BFLOAT16 ? to_bfloat16(x) : to_float16(x);
}

/* --- states in narrow formats ---------------------------------------------------------------------------- */

/* The 32 random bits of an element. */
OC_FUNCTION uint32_t random_of(const oc_segment *segment, uint64_t update, int64_t i) {
    uint64_t element = (uint64_t)(segment->start + i), key = oc_key(segment->seed, update, element / OC_STATE_BLOCK);
    uint32_t x = (uint32_t)key + (uint32_t)(element % OC_STATE_BLOCK);
    x *= OC_HASH_FIRST;
    x = (x ^ x >> 15 ^ (uint32_t)(key >> 32)) * OC_HASH_SECOND;
    return x ^ x >> 16;
}

/* random is below 2^16. The sum of an infinity and it is still one. */
OC_FUNCTION uint16_t to_bfloat16_at_random(float x, uint32_t random) {
    return x != x ? 0x7fc0 : (uint16_t)((float_bits(x) + random) >> 16);
}

OC_FUNCTION int least_scaled(int scale) { return scale < OC_LEAST_SCALE ? OC_LEAST_SCALE : scale; }

OC_FUNCTION float power(int biased_exponent) { return bits_float((uint32_t)biased_exponent << 23); }

/* The scale of a block whose largest magnitude has these bits. Rounding at random may double a value, and the scale
 * leaves room for it. Rounding to nearest needs no room: with the smallest scale that holds the largest value, decoded
 * values come back unchanged. */
OC_FUNCTION int scale_of(uint32_t largest, int at_random) {
    if (!at_random && largest < 0x7f800000)
        largest += 0x7ffff + (largest >> OC_DROPPED & 1) - (1 << 23);
    return least_scaled((int)largest >> 23);
}

/* With random, below 2^20, rounded up with the probability of the part that is dropped; without, to nearest even. */
OC_FUNCTION uint8_t to_float8(float x, int scale, int has_sign, const uint32_t *random) {
    int top = has_sign ? OC_TOP_SIGNED : OC_TOP_UNSIGNED;
    float magnitude = fabsf(x), least = power(scale - top + 1); /* the least with an exponent of its own */
    uint32_t bits, code, offset = (uint32_t)(scale - top) << OC_MANTISSA;
    if (scale == OC_NAN_SCALE)
        return 0;
    /* Below, fixed point: the mean with `least` has as many bits more than least / 2. */
    bits = float_bits(magnitude < least ? fmaf(magnitude, 0.5f, least * 0.5f) : magnitude);
    if (random)
        code = ((bits + *random) >> OC_DROPPED) - offset;
    else if (magnitude < least)
        code = (uint32_t)rintf(magnitude * power(127 + 129 + top - scale));
    else
        code = ((bits + 0x7ffff + (bits >> OC_DROPPED & 1)) >> OC_DROPPED) - offset;
    return (uint8_t)(code | (has_sign ? float_bits(x) >> 31 << 7 : 0));
}

OC_FUNCTION float from_float8(uint8_t byte, int scale, int has_sign) {
    int top = has_sign ? OC_TOP_SIGNED : OC_TOP_UNSIGNED;
    uint32_t sign = has_sign ? (uint32_t)byte >> 7 << 31 : 0, code = has_sign ? byte & 127 : byte, bits;
    scale = least_scaled(scale);
    if (scale == OC_NAN_SCALE)
        return bits_float(0x7fc00000);
    if (code >> OC_MANTISSA)
        bits = (code << OC_DROPPED) + ((uint32_t)(scale - top) << 23);
    else
        bits = float_bits((float)code * power(scale - top - 2));
    return bits_float(sign | bits);
}

/* high is x rounded to nearest even. Where low is just half of its last bit, the tie's bit says whether x was below.
 * Return that bit. */
OC_FUNCTION uint8_t split(const oc_state *s, int64_t i, float x) {
    uint32_t bits = x != x ? 0x7fc00000 : float_bits(x);
    ((uint16_t *)s->data)[i] = (uint16_t)bits;
    ((uint16_t *)s->high)[i] = to_bfloat16(x);
    return (bits & 0x1ffff) == 0x18000;
}

/* Write a byte of ties, of the n elements that its lower bits stand for. The other bits stay. */
OC_FUNCTION void store_ties(uint8_t *byte, const uint8_t *ties, int n) {
    uint32_t bits = *byte;
    for (int j = 0; j < n && j < 8; j++)
        bits = (bits & ~(1u << j)) | (uint32_t)ties[j] << j;
    *byte = (uint8_t)bits;
}

OC_FUNCTION float join(const oc_state *s, int64_t i) {
    uint32_t low = ((const uint16_t *)s->data)[i], high = ((const uint16_t *)s->high)[i];
    int tie = s->ties[i >> 3] >> (i & 7) & 1;
    int was_rounded_up = low > 0x8000 || (low == 0x8000 && tie);
    return bits_float(((high - (uint32_t)was_rounded_up) << 16) | low);
}

OC_FUNCTION float decoded(const oc_state *s, int64_t i) {
    switch (s->format) {
    case OC_FLOAT8: return from_float8(((const uint8_t *)s->data)[i], s->scales[i / OC_STATE_BLOCK], s->has_sign);
    case OC_SPLIT: return join(s, i);
    default: return load(s->data, s->format, i);
    }
}

/* The scale of a block of n values, which all its elements wait for. */
OC_FUNCTION int scale_of_block(int n, const float *values, int at_random) {
    OC_SHARED uint32_t largest;
    OC_ONCE largest = 0;
    OC_BARRIER();
    OC_EACH(k, n) OC_RAISE(&largest, float_bits(values[OC_SLOT(k)]) & 0x7fffffff);
    OC_BARRIER();
    return scale_of(largest, at_random);
}

/* Elements [begin, begin + n) of a state, which lie in one block, become these values. begin is a multiple of 256.
 * random: as many bits as the format drops, for each; null: to nearest even. */
OC_FUNCTION void encode_block(const oc_state *s, int64_t begin, int n, const float *values, const uint32_t *random) {
    OC_SHARED uint8_t ties[OC_STATE_BLOCK];
    const int scale = s->format == OC_FLOAT8 ? scale_of_block(n, values, random != 0) : 0;
    OC_EACH(k, n) {
        int64_t i = begin + k;
        float x = values[OC_SLOT(k)];
        const uint32_t *r = random ? random + OC_SLOT(k) : 0;
        if (s->format == OC_FLOAT8)
            ((uint8_t *)s->data)[i] = to_float8(x, scale, s->has_sign, r);
        else if (s->format == OC_SPLIT)
            ties[k] = split(s, i, x);
        else if (s->format == OC_BFLOAT16 && r)
            ((uint16_t *)s->data)[i] = to_bfloat16_at_random(x, *r);
        else
            store(s->data, s->format, i, x);
    }
    if (s->format == OC_FLOAT8)
        OC_ONCE s->scales[begin / OC_STATE_BLOCK] = (uint8_t)scale;
    if (s->format == OC_SPLIT) {
        OC_BARRIER();
        OC_EACH(k, n) if (k % 8 == 0) store_ties(s->ties + (begin + k) / 8, ties + k, n - k);
    }
    if (s->format == OC_FLOAT8 || s->format == OC_SPLIT)
        OC_BARRIER(); /* the next call writes what this one shares */
}

/* --- update rules ---------------------------------------------------------------------------------------- */

/* An element's states: each rule's function puts the new ones in place of the old. g is scaled already. */
typedef struct {
    float master, moments[OC_MOMENTS];
} element;

OC_FUNCTION void adam(float g, element *x, const oc_rounded_scalars *s, int rule) {
    const float *k = s->values, w1 = k[ADAM_ONE_MINUS_BETA1], w2 = k[ADAM_ONE_MINUS_BETA2];
    float p = x->master, m = x->moments[0], v = x->moments[1];
    if (rule == OC_ADAM_TORCH) {
        if (k[ADAM_L2] != 0)
            g = fmaf(p, k[ADAM_L2], g);
        p = p * k[ADAM_DECAY];
        float difference = g - m;
        m = w1 < 0.5f ? fmaf(w1, difference, m) : fmaf(w1 - 1, difference, g);
        v = fmaf(w2 * g, g, v * k[ADAM_BETA2]);
        p = p + k[ADAM_STEP_SIZE] * m / (sqrtf(v) / k[ADAM_CORRECTION2] + k[ADAM_EPS]);
    } else {
        if (k[ADAM_L2] != 0)
            g = g + k[ADAM_L2] * p;
        m = w1 * g + k[ADAM_BETA1] * m;
        v = w2 * (g * g) + k[ADAM_BETA2] * v;
        float update = m / k[ADAM_CORRECTION1] / (sqrtf(v / k[ADAM_CORRECTION2] + k[ADAM_EPS_ROOT]) + k[ADAM_EPS]);
        if (k[ADAM_WEIGHT_DECAY] != 0)
            update = update + k[ADAM_WEIGHT_DECAY] * p;
        p = p + update * k[ADAM_STEP_SIZE];
    }
    x->master = p;
    x->moments[0] = m;
    x->moments[1] = v;
}

OC_FUNCTION void sgd(float g, element *x, const oc_rounded_scalars *s, int rule) {
    const float *k = s->values, momentum = k[SGD_MOMENTUM];
    const int torch = rule == OC_SGD_TORCH, nesterov = k[SGD_NESTEROV] != 0;
    float p = x->master, *m = x->moments;
    if (k[SGD_WEIGHT_DECAY] != 0)
        g = torch ? fmaf(p, k[SGD_WEIGHT_DECAY], g) : g + k[SGD_WEIGHT_DECAY] * p;
    if (oc_kept_moments(rule, s->exact)) {
        if (!torch)
            *m = g + momentum * *m;
        else if (k[SGD_FIRST] != 0)
            *m = g;
        else
            *m = fmaf(g, k[SGD_ONE_MINUS_DAMPENING], *m * momentum);
        if (!nesterov)
            g = *m;
        else
            g = torch ? fmaf(*m, momentum, g) : g + momentum * *m;
    }
    x->master = torch ? fmaf(g, -k[SGD_LR], p) : p + -k[SGD_LR] * g;
}

OC_FUNCTION void lion(float g, element *x, const oc_rounded_scalars *s, int rule) {
    const float *k = s->values;
    float p = x->master, *m = x->moments, step = k[LION_BETA1] * *m + k[LION_ONE_MINUS_BETA1] * g;
    (void)rule;
    *m = k[LION_BETA2] * *m + k[LION_ONE_MINUS_BETA2] * g;
    if (step != 0 && step == step)
        step = copysignf(1, step);
    if (k[LION_WEIGHT_DECAY] != 0)
        step = step + k[LION_WEIGHT_DECAY] * p;
    x->master = p + -k[LION_LR] * step;
}

OC_FUNCTION void adagrad(float g, element *x, const oc_rounded_scalars *s, int rule) {
    const float lr = s->values[ADAGRAD_LR], eps = s->values[ADAGRAD_EPS], decay = s->values[ADAGRAD_WEIGHT_DECAY];
    const int torch = rule == OC_ADAGRAD_TORCH;
    float p = x->master, *sum = x->moments;
    if (decay != 0)
        g = torch ? fmaf(p, decay, g) : g + decay * p;
    *sum = torch ? fmaf(g, g, *sum) : g * g + *sum;
    if (torch)
        x->master = p - lr * g / (sqrtf(*sum) + eps);
    else
        x->master = p + -lr * ((*sum != 0 ? 1 / sqrtf(*sum + eps) : 0) * g);
}

/* torch.lerp of one element. */
OC_FUNCTION float lerp(float from, float to, float weight) {
    return weight < 0.5f ? fmaf(weight, to - from, from) : fmaf(weight - 1, to - from, to);
}

OC_FUNCTION void muon(float g, element *x, const oc_rounded_scalars *s, int rule) {
    const float *k = s->values;
    float *m = x->moments;
    m[0] = lerp(m[0], g, k[MUON_ONE_MINUS_MOMENTUM]);
    if (rule == OC_MUON) {
        float step = fmaf(m[1], k[MUON_STEP_SIZE], x->master * k[MUON_DECAY]);
        x->master = k[MUON_ADDS] != 0 ? x->master + step : step;
    } else
        x->master = k[MUON_NESTEROV] != 0 ? lerp(g, m[0], k[MUON_MOMENTUM]) : m[0];
}

OC_FUNCTION void update_element(float g, element *x, const oc_rounded_scalars *s, int rule) {
    if (s->grad_scale != 1)
        g = g * s->grad_scale;
    switch (rule) {
#define CASE(RULE, NAME, ...)                                                                                          \
    case RULE: NAME(g, x, s, RULE); break;
        OC_EACH_RULE(CASE)
    }
}

OC_FUNCTION int is_narrow(const oc_kind *kind) {
    int narrow = kind->master_format != OC_FLOAT32;
    for (int i = 0; i < OC_MOMENTS; i++)
        narrow |= kind->moment_formats[i] != OC_FLOAT32;
    return narrow;
}

OC_FUNCTION oc_state master_of(const oc_segment *a, const oc_kind *kind) {
    oc_state s = {a->master, 0, a->high, a->ties, a->numel, kind->master_format, 0};
    return s;
}

OC_FUNCTION oc_state moment_of(const oc_segment *a, const oc_kind *kind, int j) {
    oc_state s = {a->moments[j], a->scales[j], 0, 0, a->numel, kind->moment_formats[j], oc_has_sign(kind->rule, j)};
    return s;
}

/* An element's random bits for a moment: the first takes the lower ones, the second the upper ones. */
OC_FUNCTION uint32_t random_of_moment(uint32_t bits, int j, int format) {
    int width = format == OC_FLOAT8 ? OC_DROPPED : 16;
    return j ? bits >> (32 - width) : bits & ((1u << width) - 1);
}

/* Elements [begin, begin + n) of a segment, n being at most 256 and begin a multiple of it. */
OC_FUNCTION void update_block(const oc_segment *segment, int64_t begin, int n, const oc_rounded_scalars *s,
                              const oc_kind *kind) {
    const int n_moments = oc_kept_moments(kind->rule, s->exact), narrow = is_narrow(kind);
    const oc_state master = master_of(segment, kind);
    float p[OC_SLOTS] = {0}, m[OC_MOMENTS][OC_SLOTS] = {{0}};
    uint32_t random[OC_MOMENTS][OC_SLOTS] = {{0}};
    OC_EACH(k, n) {
        int64_t i = begin + k;
        uint32_t bits = narrow ? random_of(segment, s->update, i) : 0;
        element x = {decoded(&master, i), {0}};
        for (int j = 0; j < n_moments; j++) {
            const oc_state moment = moment_of(segment, kind, j);
            random[j][OC_SLOT(k)] = random_of_moment(bits, j, moment.format);
            x.moments[j] = decoded(&moment, i);
        }
        update_element(load(segment->grad, kind->grad_dtype, i), &x, s, kind->rule);
        if (kind->master_format == OC_BFLOAT16)
            x.master = from_bfloat16(to_bfloat16_at_random(x.master, bits * OC_HASH_MASTER >> 16));
        p[OC_SLOT(k)] = x.master;
        for (int j = 0; j < n_moments; j++)
            m[j][OC_SLOT(k)] = x.moments[j];
    }
    if (!kind->keep_states) {
        encode_block(&master, begin, n, p, 0); /* a bf16 master is rounded already */
        for (int j = 0; j < n_moments; j++) {
            const oc_state moment = moment_of(segment, kind, j);
            encode_block(&moment, begin, n, m[j], random[j]);
        }
    }
    if (kind->param_dtype != OC_NO_PARAM)
        OC_EACH(k, n) store(segment->param, kind->param_dtype, begin + k, p[OC_SLOT(k)]);
}

/* --- the other kernels ----------------------------------------------------------------------------------- */

OC_FUNCTION void add_square_at(const void *src, int dtype, int64_t i, int64_t *digits) {
    float x = load(src, dtype, i);
    if ((float_bits(x) & 0x7f800000) != 0x7f800000)
        oc_add_square(digits, x);
    else
        digits[OC_DIGIT(OC_NORM_NONFINITE)]++;
}

OC_FUNCTION void accumulate_at(const void *src, int dtype, float *dst, int64_t i) {
    dst[i] = dst[i] + load(src, dtype, i);
}

OC_FUNCTION void reduce_at(const oc_reduction *a, int64_t i) {
    float sum = load(a->src, a->dtype, i);
    for (int64_t r = 1; r < a->n_sources; r++)
        sum = sum + load(a->src, a->dtype, r * a->stride + i);
    if (a->divisor != 1)
        sum = sum / a->divisor;
    a->dst[i] = a->add ? a->dst[i] + sum : sum;
}

OC_FUNCTION void cast_at(const void *src, int src_dtype, void *dst, int dst_dtype, int64_t i) {
    store(dst, dst_dtype, i, load(src, src_dtype, i));
}

#endif
