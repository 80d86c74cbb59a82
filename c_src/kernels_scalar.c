/* The oracle: every kernel written once, plainly, one element at a time.
 *
 * Other files must equal this one bit for bit. Compiled with -ffp-contract=off: only fmaf is an
 * FMA.
 */
#include <math.h>
#include <string.h>

#include "formats.h"
#include "offload_core.h"
#include "rules.h"
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

/* --- states in narrow formats ---------------------------------------------------------------------------- */

/* The 32 random bits of an element. */
static uint32_t random_of(const oc_segment *segment, uint64_t update, int64_t i) {
    uint64_t element = (uint64_t)(segment->start + i), key = oc_key(segment->seed, update, element / OC_STATE_BLOCK);
    uint32_t x = (uint32_t)key + (uint32_t)(element % OC_STATE_BLOCK);
    x *= OC_HASH_FIRST;
    x = (x ^ x >> 15 ^ (uint32_t)(key >> 32)) * OC_HASH_SECOND;
    return x ^ x >> 16;
}

/* random is below 2^16. The sum of an infinity and it is still one. */
static uint16_t to_bfloat16_at_random(float x, uint32_t random) {
    return x != x ? 0x7fc0 : (uint16_t)((float_bits(x) + random) >> 16);
}

static int least_scaled(int scale) { return scale < OC_LEAST_SCALE ? OC_LEAST_SCALE : scale; }

static float power(int biased_exponent) { return bits_float((uint32_t)biased_exponent << 23); }

/* Rounding at random may double a value, and the scale leaves room for it. Rounding to nearest needs no room: with the
 * smallest scale that holds the largest value, decoded values come back unchanged. */
static uint8_t scale_of(const float *values, int64_t n, int at_random) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t magnitude = float_bits(values[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (!at_random && largest < 0x7f800000)
        largest += 0x7ffff + (largest >> OC_DROPPED & 1) - (1 << 23);
    return (uint8_t)least_scaled((int)largest >> 23);
}

/* With random, below 2^20, rounded up with the probability of the part that is dropped; without, to nearest even. */
static uint8_t to_float8(float x, int scale, int has_sign, const uint32_t *random) {
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

static float from_float8(uint8_t byte, int scale, int has_sign) {
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

/* high is x rounded to nearest even. Where low is just half of its last bit, the tie's bit says whether x was below. */
static void split(const oc_state *s, int64_t i, float x) {
    uint32_t bits = x != x ? 0x7fc00000 : float_bits(x);
    uint8_t tie = (uint8_t)(1 << (i & 7));
    ((uint16_t *)s->data)[i] = (uint16_t)bits;
    ((uint16_t *)s->high)[i] = to_bfloat16(x);
    if ((bits & 0x1ffff) == 0x18000)
        s->ties[i >> 3] |= tie;
    else
        s->ties[i >> 3] &= (uint8_t)~tie;
}

static float join(const oc_state *s, int64_t i) {
    uint32_t low = ((const uint16_t *)s->data)[i], high = ((const uint16_t *)s->high)[i];
    int tie = s->ties[i >> 3] >> (i & 7) & 1;
    int was_rounded_up = low > 0x8000 || (low == 0x8000 && tie);
    return bits_float(((high - (uint32_t)was_rounded_up) << 16) | low);
}

static float decoded(const oc_state *s, int64_t i) {
    switch (s->format) {
    case OC_FLOAT8: return from_float8(((const uint8_t *)s->data)[i], s->scales[i / OC_STATE_BLOCK], s->has_sign);
    case OC_SPLIT: return join(s, i);
    default: return load(s->data, s->format, i);
    }
}

/* Elements [begin, begin + n) of a state, which lie in one block, become these values. random: as many bits as the
 * format drops, for each; NULL: to nearest even. */
static void encode_block(const oc_state *s, int64_t begin, int64_t n, const float *values, const uint32_t *random) {
    if (s->format == OC_FLOAT8)
        s->scales[begin / OC_STATE_BLOCK] = scale_of(values, n, random != NULL);
    for (int64_t k = 0; k < n; k++) {
        int64_t i = begin + k;
        const uint32_t *r = random ? random + k : NULL;
        if (s->format == OC_FLOAT8)
            ((uint8_t *)s->data)[i] = to_float8(values[k], s->scales[i / OC_STATE_BLOCK], s->has_sign, r);
        else if (s->format == OC_SPLIT)
            split(s, i, values[k]);
        else if (s->format == OC_BFLOAT16 && r)
            ((uint16_t *)s->data)[i] = to_bfloat16_at_random(values[k], *r);
        else
            store(s->data, s->format, i, values[k]);
    }
}

void oc_decode_run(const oc_state *s, int64_t begin, int64_t end, float *out) {
    for (int64_t i = begin; i < end; i++)
        out[i] = decoded(s, i);
}

void oc_encode_run(const oc_state *s, int64_t begin, int64_t end, const float *values) {
    for (int64_t i = begin; i < end; i += OC_STATE_BLOCK)
        encode_block(s, i, end - i < OC_STATE_BLOCK ? end - i : OC_STATE_BLOCK, values + i, NULL);
}

/* --- update rules ---------------------------------------------------------------------------------------- */

/* An element's states: each rule's function puts the new ones in place of the old. g is scaled already. */
typedef struct {
    float master, moments[OC_MOMENTS];
} element;

static void adam(float g, element *x, const oc_rounded_scalars *s, int rule) {
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
    *x = (element){p, {m, v}};
}

static void sgd(float g, element *x, const oc_rounded_scalars *s, int rule) {
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

static void lion(float g, element *x, const oc_rounded_scalars *s, int rule) {
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

static void adagrad(float g, element *x, const oc_rounded_scalars *s, int rule) {
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
static float lerp(float from, float to, float weight) {
    return weight < 0.5f ? fmaf(weight, to - from, from) : fmaf(weight - 1, to - from, to);
}

static void muon(float g, element *x, const oc_rounded_scalars *s, int rule) {
    const float *k = s->values;
    float *m = x->moments;
    m[0] = lerp(m[0], g, k[MUON_ONE_MINUS_MOMENTUM]);
    if (rule == OC_MUON)
        x->master = fmaf(m[1], k[MUON_STEP_SIZE], x->master * k[MUON_DECAY]);
    else
        x->master = k[MUON_NESTEROV] != 0 ? lerp(g, m[0], k[MUON_MOMENTUM]) : m[0];
}

static void update_element(float g, element *x, const oc_rounded_scalars *s, int rule) {
    if (s->grad_scale != 1)
        g = g * s->grad_scale;
    switch (rule) {
#define CASE(RULE, NAME, ...)                                                                                          \
    case RULE: NAME(g, x, s, RULE); break;
        OC_EACH_RULE(CASE)
    }
}

static int is_narrow(const oc_kind *kind) {
    int narrow = kind->master_format != OC_FLOAT32;
    for (int i = 0; i < OC_MOMENTS; i++)
        narrow |= kind->moment_formats[i] != OC_FLOAT32;
    return narrow;
}

static void update_block(const oc_segment *segment, int64_t begin, int64_t n, const oc_rounded_scalars *s,
                         const oc_kind *kind) {
    const int n_moments = oc_kept_moments(kind->rule, s->exact), narrow = is_narrow(kind);
    oc_state master = {
        .data = segment->master, .high = segment->high, .ties = segment->ties, .format = kind->master_format};
    oc_state moments[OC_MOMENTS];
    float p[OC_STATE_BLOCK] = {0}, m[OC_MOMENTS][OC_STATE_BLOCK] = {{0}};
    uint32_t random[OC_MOMENTS][OC_STATE_BLOCK] = {{0}};
    for (int j = 0; j < n_moments; j++)
        moments[j] = (oc_state){.data = segment->moments[j],
                                .scales = segment->scales[j],
                                .format = kind->moment_formats[j],
                                .has_sign = oc_has_sign(kind->rule, j)};
    for (int64_t k = 0; k < n; k++) {
        int64_t i = begin + k;
        uint32_t bits = narrow ? random_of(segment, s->update, i) : 0;
        element x = {.master = decoded(&master, i)};
        for (int j = 0; j < n_moments; j++) { /* the first takes the lower bits, the second the upper ones */
            int width = moments[j].format == OC_FLOAT8 ? OC_DROPPED : 16;
            random[j][k] = j ? bits >> (32 - width) : bits & ((1u << width) - 1);
            x.moments[j] = decoded(moments + j, i);
        }
        update_element(load(segment->grad, kind->grad_dtype, i), &x, s, kind->rule);
        p[k] = x.master;
        for (int j = 0; j < n_moments; j++)
            m[j][k] = x.moments[j];
        if (kind->master_format == OC_BFLOAT16)
            p[k] = load((uint16_t[]){to_bfloat16_at_random(p[k], bits * OC_HASH_MASTER >> 16)}, OC_BFLOAT16, 0);
    }
    if (!kind->keep_states) {
        encode_block(&master, begin, n, p, NULL); /* a bf16 master is rounded already */
        for (int j = 0; j < n_moments; j++)
            encode_block(moments + j, begin, n, m[j], random[j]);
    }
    for (int64_t k = 0; k < n; k++)
        if (kind->param_dtype != OC_NO_PARAM)
            store(segment->param, kind->param_dtype, begin + k, p[k]);
}

static void update(const oc_segment *segment, int64_t begin, int64_t end, const oc_rounded_scalars *s,
                   const oc_kind *kind, int stream) {
    (void)stream;
    for (int64_t i = begin; i < end; i += OC_STATE_BLOCK)
        update_block(segment, i, end - i < OC_STATE_BLOCK ? end - i : OC_STATE_BLOCK, s, kind);
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

const oc_kernels oc_scalar_kernels = {OC_SCALAR, update, sum_squares, accumulate, reduce, cast};
