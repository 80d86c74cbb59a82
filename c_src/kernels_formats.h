/* The Adam update of states in narrow formats, for kernels_simd.h: a block of 256 elements at a time.
 *
 * One loop decodes, updates as in fp32 and leaves fp32 results in the innermost cache; others round these. All in one
 * loop would take twice as long: a processor keeps a limited number of results until the divisions before them are
 * done, and divides only as fast as several elements are under way at once.
 *
 * Beside kernels_simd.h's names it uses, on the 32-bit parts of vbits:
 *   v_of_bits(vbits) -> v32, v_bits_set, v_bits_add, v_bits_sub, v_bits_mul, v_bits_and, v_bits_or, v_bits_xor,
 *   v_bits_left(a, n), v_bits_right(a, n) (n a literal), v_min32 (unsigned), v_top(vbits)
 *   v_load_u8, v_store_u8, v_load_s16
 *   v_store_upper, v_store_lower(array, a, b)   the upper and the lower 16 bits of the parts of two vectors
 *   vmask, v_equal, v_ordered(v32): not a NaN, v_pick(mask, a, b): a where it is set
 *   v_mask_load(bytes, i), v_mask_store, v_mask_clear(a, b): a where b is not. Bit i & 7 of byte i >> 3 and the next
 *   LANES - 1, i being a multiple of LANES
 */
#include "formats.h"

/* --- decoding -------------------------------------------------------------------------------------------- */

/* A block of OC_FLOAT8 to decode. With exponents from 1 on, a code's bits and the block's offset are those of its
 * value. Below, they are those of its mean with the least such value, from which a float is exactly as far as the code
 * says. */
typedef struct {
    const uint8_t *codes;
    vbits offset;
    v32 minus_least;
} float8_block;

INLINE float8_block float8_block_of(const void *codes, const uint8_t *scale, int format, int top) {
    static const uint8_t zeros[OC_STATE_BLOCK];
    const vbits nan = v_bits_set(0x7fc00000);
    int biased = format != OC_FLOAT8 || *scale < OC_LEAST_SCALE ? OC_LEAST_SCALE : *scale;
    if (biased == OC_NAN_SCALE)
        return (float8_block){zeros, nan, v_of_bits(nan)};
    return (float8_block){codes, v_bits_set((uint32_t)(biased - top) << 23),
                          v_of_bits(v_bits_set(0x80000000 | (uint32_t)(biased - top + 1) << 23))};
}

INLINE v32 from_float8(const float8_block *block, int64_t i, int has_sign) {
    vbits byte = v_load_u8(block->codes + i), code = has_sign ? v_bits_and(byte, v_bits_set(127)) : byte;
    vbits value = v_bits_add(v_bits_left(code, OC_DROPPED), block->offset);
    value = v_min32(value, v_bits_of(v_fma(v_of_bits(value), v_set(2), block->minus_least)));
    vbits sign = v_bits_and(v_bits_left(byte, 24), v_bits_set(0x80000000));
    return v_of_bits(has_sign ? v_bits_or(sign, value) : value);
}

INLINE v32 load_moment(const void *array, int format, int64_t i, int has_sign, const float8_block *block) {
    switch (format) {
    case OC_FLOAT8: return from_float8(block, i, has_sign);
    case OC_BFLOAT16: return v_load_bf16((const uint16_t *)array + i);
    default: return v_load((const float *)array + i);
    }
}

/* The lower half counts as a signed number: `high` was rounded up where that is negative. A half that is just the least
 * one is a tie, of which `ties` says whether it was. */
INLINE v32 joined(const uint16_t *low, const uint16_t *high, const uint8_t *ties, int64_t i) {
    vbits lower = v_load_s16(low + i), sum = v_bits_add(v_bits_of(v_load_bf16(high + i)), lower);
    vmask down = v_mask_clear(v_equal(lower, v_bits_set(0xffff8000)), v_mask_load(ties, i));
    return v_of_bits(v_pick(down, v_bits_add(sum, v_bits_set(0x10000)), sum));
}

INLINE v32 load_master(const oc_segment *a, int format, int64_t i) {
    switch (format) {
    case OC_SPLIT: return joined(a->master, a->high, a->ties, i);
    case OC_BFLOAT16: return v_load_bf16((const uint16_t *)a->master + i);
    default: return v_load((const float *)a->master + i);
    }
}

/* --- rounding -------------------------------------------------------------------------------------------- */

/* fp32 results in place where a state is fp32, else in the scratch memory of a block. */
typedef struct {
    float *master, *exp_avg, *exp_avg_sq;
} adam_results;

/* Both keys of the elements of a run, which lies in one block of the parameter or in two. */
typedef struct {
    uint64_t key, next_key;
    int64_t next_from; /* the first element of the run that is in the next block */
    uint32_t number;   /* of the run's first element in its block */
} random_source;

INLINE random_source random_source_of(const oc_segment *a, uint64_t update) {
    uint64_t first = (uint64_t)a->start, block = first / OC_STATE_BLOCK, number = first % OC_STATE_BLOCK;
    return (random_source){oc_key(a->seed, update, block), number ? oc_key(a->seed, update, block + 1) : 0,
                           OC_STATE_BLOCK - (int64_t)number, (uint32_t)number};
}

/* The random bits of n elements; what is written past them is not read. */
INLINE void fill_random(uint32_t *random, uint64_t key, uint32_t number, int64_t n) {
    static const uint32_t counted[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vbits first = v_bits_set(OC_HASH_FIRST), second = v_bits_set(OC_HASH_SECOND);
    const vbits upper = v_bits_set((uint32_t)(key >> 32)), many = v_bits_set(LANES);
    vbits count = v_bits_add(v_bits_load(counted), v_bits_set((uint32_t)key + number));
    for (int64_t i = 0; i < n; i += LANES) {
        vbits x = v_bits_mul(count, first);
        x = v_bits_mul(v_bits_xor(v_bits_xor(x, v_bits_right(x, 15)), upper), second);
        v_bits_store(random + i, v_bits_xor(x, v_bits_right(x, 16)));
        count = v_bits_add(count, many);
    }
}

/* random is below 2^16. The result is in the upper halves. */
INLINE vbits rounded_to_bf16(const float *x, vbits random) {
    v32 value = v_load(x);
    return v_pick(v_ordered(value), v_bits_add(v_bits_of(value), random), v_bits_set(0x7fc00000));
}

/* What part of an element's random bits is its master's, exp_avg's or exp_avg_sq's. */
enum { FOR_MASTER, FOR_EXP_AVG, FOR_EXP_AVG_SQ };

INLINE vbits random_16(const uint32_t *random, int whose) {
    vbits bits = v_bits_load(random);
    switch (whose) {
    case FOR_MASTER: return v_bits_right(v_bits_mul(bits, v_bits_set(OC_HASH_MASTER)), 16);
    case FOR_EXP_AVG: return v_bits_and(bits, v_bits_set(0xffff));
    default: return v_bits_right(bits, 16);
    }
}

INLINE void round_to_bf16(const float *values, uint16_t *rounded, const uint32_t *random, int whose, int64_t n) {
    for (int64_t i = 0; i < n; i += 2 * LANES)
        v_store_upper(rounded + i, rounded_to_bf16(values + i, random_16(random + i, whose)),
                      rounded_to_bf16(values + i + LANES, random_16(random + i + LANES, whose)));
}

INLINE vbits magnitudes(const float *values) { return v_bits_and(v_bits_of(v_load(values)), v_bits_set(0x7fffffff)); }

/* The scale of a block whose largest absolute value has these bits. */
static int scale_of(uint32_t largest) {
    int biased = (int)(largest >> 23);
    return biased < OC_LEAST_SCALE ? OC_LEAST_SCALE : biased;
}

INLINE void round_to_float8(const float *values, uint8_t *codes, int biased, const uint32_t *random, int has_sign,
                            int64_t n) {
    const vbits absolute = v_bits_set(0x7fffffff);
    const int top = has_sign ? OC_TOP_SIGNED : OC_TOP_UNSIGNED;
    if (biased == OC_NAN_SCALE) {
        memset(codes, 0, (size_t)n);
        return;
    }
    /* Below the least value with an exponent of its own, the mean with it has the code's bits. */
    const v32 half_least = v_of_bits(v_bits_set((uint32_t)(biased - top) << 23)), half = v_set(0.5f);
    const vbits offset = v_bits_set((uint32_t)(biased - top) << OC_MANTISSA);
    for (int64_t i = 0; i < n; i += LANES) {
        vbits bits = v_bits_of(v_load(values + i)), magnitude = v_bits_and(bits, absolute), r = v_bits_load(random + i);
        r = has_sign ? v_bits_and(r, v_bits_set((1 << OC_DROPPED) - 1)) : v_bits_right(r, 32 - OC_DROPPED);
        vbits exact = v_max32(magnitude, v_bits_of(v_fma(v_of_bits(magnitude), half, half_least)));
        vbits code = v_bits_sub(v_bits_right(v_bits_add(exact, r), OC_DROPPED), offset);
        vbits sign = v_bits_and(v_bits_right(bits, 24), v_bits_set(0x80));
        v_store_u8(codes + i, has_sign ? v_bits_or(sign, code) : code);
    }
}

INLINE void split_masters(const float *values, const oc_segment *a, int64_t n) {
    const vbits nan = v_bits_set(0x7fc00000), low_and_odd = v_bits_set(0x1ffff), odd_tie = v_bits_set(0x18000);
    for (int64_t i = 0; i < n; i += 2 * LANES) { /* the body has stored the upper halves */
        v32 x = v_load(values + i), y = v_load(values + i + LANES);
        vbits a_bits = v_pick(v_ordered(x), v_bits_of(x), nan), b_bits = v_pick(v_ordered(y), v_bits_of(y), nan);
        v_store_lower((uint16_t *)a->master + i, a_bits, b_bits);
        v_mask_store(a->ties, i, v_equal(v_bits_and(a_bits, low_and_odd), odd_tie));
        v_mask_store(a->ties, i + LANES, v_equal(v_bits_and(b_bits, low_and_odd), odd_tie));
    }
}

INLINE void store_param(void *param, int dtype, int64_t i, v32 x, int stream) {
    switch (dtype) {
    case OC_BFLOAT16: store_from_f32(param, OC_BFLOAT16, i, x, stream); break;
    case OC_FLOAT16: store_from_f32(param, OC_FLOAT16, i, x, stream); break;
    default: store_from_f32(param, OC_FLOAT32, i, x, stream); break;
    }
}

/* --- a block --------------------------------------------------------------------------------------------- */

INLINE void adam_values(const oc_segment *a, adam_results to, int64_t n, const adam_constants *constants,
                        const oc_adam_kind *kind, int order, int grad_dtype, int exp_avg_format, int exp_avg_sq_format,
                        int master_format, int param_dtype, int stream) {
    const adam_constants c = *constants;
    const int split = master_format == OC_SPLIT && !kind->keep_states;
    const int has_param = param_dtype != OC_NO_PARAM && master_format != OC_BFLOAT16 && !(split && a->param == a->high);
    const float8_block m_block = float8_block_of(a->exp_avg, a->exp_avg_scale, exp_avg_format, OC_TOP_SIGNED);
    const float8_block v_block =
        float8_block_of(a->exp_avg_sq, a->exp_avg_sq_scale, exp_avg_sq_format, OC_TOP_UNSIGNED);
    for (int64_t i = 0; i < n; i += LANES) {
        fetch(a->grad, grad_dtype, i + FETCH_AHEAD);
        fetch(a->master, master_format, i + FETCH_AHEAD);
        fetch(a->exp_avg, exp_avg_format, i + FETCH_AHEAD);
        fetch(a->exp_avg_sq, exp_avg_sq_format, i + FETCH_AHEAD);
        if (master_format == OC_SPLIT)
            fetch(a->high, OC_BFLOAT16, i + FETCH_AHEAD);
        v32 g = load_as_f32(a->grad, grad_dtype, i);
        v32 m = load_moment(a->exp_avg, exp_avg_format, i, 1, &m_block);
        v32 v = load_moment(a->exp_avg_sq, exp_avg_sq_format, i, 0, &v_block);
        v32 p = adam_element(g, load_master(a, master_format, i), &m, &v, &c, order);
        v_store(to.master + i, p);
        v_store(to.exp_avg + i, m);
        v_store(to.exp_avg_sq + i, v);
        if (split)
            v_store_bf16((uint16_t *)a->high + i, p);
        if (has_param)
            store_param(a->param, param_dtype, i, p, stream);
    }
}

/* Instances for each type of gradients with common formats, and one for all others. */
#define VALUES(G, M, V)                                                                                                \
    if (kind->master_format == OC_FLOAT32 && kind->param_dtype == OC_BFLOAT16)                                         \
        adam_values(a, to, n, c, kind, order, G, M, V, OC_FLOAT32, OC_BFLOAT16, stream);                               \
    else                                                                                                               \
        adam_values(a, to, n, c, kind, order, G, M, V, kind->master_format, kind->param_dtype, stream);
#define VALUES_OF_MOMENTS(G)                                                                                           \
    switch (kind->exp_avg_format == kind->exp_avg_sq_format ? kind->exp_avg_format : -1) {                             \
    case OC_FLOAT8: VALUES(G, OC_FLOAT8, OC_FLOAT8) break;                                                             \
    case OC_BFLOAT16: VALUES(G, OC_BFLOAT16, OC_BFLOAT16) break;                                                       \
    case OC_FLOAT32: VALUES(G, OC_FLOAT32, OC_FLOAT32) break;                                                          \
    default: VALUES(G, kind->exp_avg_format, kind->exp_avg_sq_format) break;                                           \
    }

INLINE void adam_values_of(const oc_segment *a, adam_results to, int64_t n, const adam_constants *c,
                           const oc_adam_kind *kind, int order, int stream) {
    switch (kind->grad_dtype) {
    case OC_BFLOAT16: VALUES_OF_MOMENTS(OC_BFLOAT16) break;
    case OC_FLOAT16: VALUES_OF_MOMENTS(OC_FLOAT16) break;
    default: VALUES_OF_MOMENTS(OC_FLOAT32) break;
    }
}

/* n is a multiple of 2 * LANES. Elements from `count` on are padding. */
static void adam_block(const oc_segment *a, int64_t n, int64_t count, const adam_constants *c, uint64_t update,
                       const oc_adam_kind *kind, int stream) {
    _Alignas(64) float master[OC_STATE_BLOCK], exp_avg[OC_STATE_BLOCK], exp_avg_sq[OC_STATE_BLOCK];
    _Alignas(64) uint32_t random[OC_STATE_BLOCK + LANES];
    _Alignas(64) uint16_t rounded[OC_STATE_BLOCK];
    const int keep = kind->keep_states, master_format = kind->master_format;
    const int exp_avg_format = kind->exp_avg_format, exp_avg_sq_format = kind->exp_avg_sq_format;
    adam_results to = {keep || master_format != OC_FLOAT32 ? master : a->master,
                       keep || exp_avg_format != OC_FLOAT32 ? exp_avg : a->exp_avg,
                       keep || exp_avg_sq_format != OC_FLOAT32 ? exp_avg_sq : a->exp_avg_sq};
    if (kind->op_order == OC_ORDER_TORCH)
        adam_values_of(a, to, n, c, kind, OC_ORDER_TORCH, stream);
    else
        adam_values_of(a, to, n, c, kind, OC_ORDER_OPTAX, stream);
    for (int64_t i = count; i < n; i++) /* padding has no part in a block's largest value */
        to.exp_avg[i] = to.exp_avg_sq[i] = 0;
    int exp_avg_scale = 0, exp_avg_sq_scale = 0;
    if (!keep && (exp_avg_format == OC_FLOAT8 || exp_avg_sq_format == OC_FLOAT8)) {
        vbits m_largest = v_bits_zero(), v_largest = v_bits_zero();
        for (int64_t i = 0; i < n; i += LANES) {
            m_largest = v_max32(m_largest, magnitudes(to.exp_avg + i));
            v_largest = v_max32(v_largest, magnitudes(to.exp_avg_sq + i));
        }
        exp_avg_scale = scale_of(v_top(m_largest));
        exp_avg_sq_scale = scale_of(v_top(v_largest));
    }
    if (master_format == OC_BFLOAT16 || (!keep && (exp_avg_format != OC_FLOAT32 || exp_avg_sq_format != OC_FLOAT32))) {
        random_source s = random_source_of(a, update);
        fill_random(random, s.key, s.number, s.next_from < n ? s.next_from : n);
        if (s.next_from < n)
            fill_random(random + s.next_from, s.next_key, 0, n - s.next_from);
    }
    if (!keep && exp_avg_format == OC_FLOAT8) {
        *a->exp_avg_scale = (uint8_t)exp_avg_scale;
        round_to_float8(exp_avg, a->exp_avg, exp_avg_scale, random, 1, n);
    }
    if (!keep && exp_avg_format == OC_BFLOAT16)
        round_to_bf16(exp_avg, a->exp_avg, random, FOR_EXP_AVG, n);
    if (!keep && exp_avg_sq_format == OC_FLOAT8) {
        *a->exp_avg_sq_scale = (uint8_t)exp_avg_sq_scale;
        round_to_float8(exp_avg_sq, a->exp_avg_sq, exp_avg_sq_scale, random, 0, n);
    }
    if (!keep && exp_avg_sq_format == OC_BFLOAT16)
        round_to_bf16(exp_avg_sq, a->exp_avg_sq, random, FOR_EXP_AVG_SQ, n);
    if (!keep && master_format == OC_SPLIT)
        split_masters(master, a, n);
    if (master_format == OC_BFLOAT16) { /* the device parameter is what the master was rounded to */
        uint16_t *narrow = keep ? rounded : a->master;
        round_to_bf16(master, narrow, random, FOR_MASTER, n);
        if (kind->param_dtype != OC_NO_PARAM && a->param != narrow)
            for (int64_t i = 0; i < n; i += LANES)
                store_param(a->param, kind->param_dtype, i, v_load_bf16(narrow + i), stream);
    }
}

/* The arrays of a block that is no whole number of pairs of vectors, padded with zeros. */
typedef struct {
    _Alignas(64) float grad[OC_STATE_BLOCK], master[OC_STATE_BLOCK], exp_avg[OC_STATE_BLOCK];
    _Alignas(64) float exp_avg_sq[OC_STATE_BLOCK], param[OC_STATE_BLOCK];
    _Alignas(64) uint16_t high[OC_STATE_BLOCK];
    uint8_t ties[OC_STATE_BLOCK / 8];
} padded_block;

static void adam_padded(const oc_segment *a, int64_t count, const adam_constants *c, uint64_t update,
                        const oc_adam_kind *kind) {
    padded_block pad;
    oc_segment block = *a;
    const int split = kind->master_format == OC_SPLIT, bits = (int)(count % 8);
    const size_t n = (size_t)count, tie_bytes = (n + 7) / 8;
    const size_t master = n * (size_t)oc_itemsize(kind->master_format);
    const size_t exp_avg = n * (size_t)oc_itemsize(kind->exp_avg_format);
    const size_t exp_avg_sq = n * (size_t)oc_itemsize(kind->exp_avg_sq_format);
    memset(&pad, 0, sizeof pad);
    block.grad = memcpy(pad.grad, a->grad, n * (size_t)oc_itemsize(kind->grad_dtype));
    block.master = memcpy(pad.master, a->master, master);
    block.exp_avg = memcpy(pad.exp_avg, a->exp_avg, exp_avg);
    block.exp_avg_sq = memcpy(pad.exp_avg_sq, a->exp_avg_sq, exp_avg_sq);
    block.param = pad.param;
    if (split) {
        block.high = memcpy(pad.high, a->high, 2 * n);
        block.ties = memcpy(pad.ties, a->ties, tie_bytes);
    }
    adam_block(&block, (count + 2 * LANES - 1) / (2 * LANES) * (2 * LANES), count, c, update, kind, 0);
    if (!kind->keep_states) {
        memcpy(a->master, pad.master, master);
        memcpy(a->exp_avg, pad.exp_avg, exp_avg);
        memcpy(a->exp_avg_sq, pad.exp_avg_sq, exp_avg_sq);
    }
    if (!kind->keep_states && split) {
        if (bits) { /* of the last byte, those past the end stay as they are */
            uint8_t ours = (uint8_t)((1 << bits) - 1), *last = pad.ties + tie_bytes - 1;
            *last = (uint8_t)((*last & ours) | (a->ties[tie_bytes - 1] & ~ours));
        }
        memcpy(a->high, pad.high, 2 * n);
        memcpy(a->ties, pad.ties, tie_bytes);
    }
    if (kind->param_dtype != OC_NO_PARAM)
        memcpy(a->param, pad.param, n * (size_t)oc_itemsize(kind->param_dtype));
}

static void *moved(const void *array, int dtype, int64_t i) {
    return array ? (char *)(uintptr_t)array + i * oc_itemsize(dtype) : NULL;
}

/* Elements [begin, end) of a segment, from a multiple of 256 on. */
static void adam_blocks(const oc_segment *a, int64_t begin, int64_t end, const adam_constants *c, uint64_t update,
                        const oc_adam_kind *kind, int stream) {
    for (int64_t i = begin; i < end; i += OC_STATE_BLOCK) {
        int64_t count = end - i < OC_STATE_BLOCK ? end - i : OC_STATE_BLOCK;
        oc_segment block = {.grad = moved(a->grad, kind->grad_dtype, i),
                            .master = moved(a->master, kind->master_format, i),
                            .exp_avg = moved(a->exp_avg, kind->exp_avg_format, i),
                            .exp_avg_sq = moved(a->exp_avg_sq, kind->exp_avg_sq_format, i),
                            .param = moved(a->param, kind->param_dtype, i),
                            .high = moved(a->high, OC_BFLOAT16, i),
                            .ties = a->ties ? a->ties + i / 8 : NULL,
                            .exp_avg_scale = a->exp_avg_scale ? a->exp_avg_scale + i / OC_STATE_BLOCK : NULL,
                            .exp_avg_sq_scale = a->exp_avg_sq_scale ? a->exp_avg_sq_scale + i / OC_STATE_BLOCK : NULL,
                            .start = a->start + i,
                            .seed = a->seed};
        if (count % (2 * LANES))
            adam_padded(&block, count, c, update, kind);
        else
            adam_block(&block, count, count, c, update, kind, stream);
    }
    if (stream)
        v_fence();
}
