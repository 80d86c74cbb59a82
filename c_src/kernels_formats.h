/* The Adam update of states in narrow formats, for kernels_simd.h: a block of 256 elements at a time, decoded, updated
 * as in fp32, and rounded from fp32 results that stay in the innermost cache.
 *
 * Beside kernels_simd.h's names it uses, on the 32-bit parts of vbits:
 *   v_of_bits(vbits) -> v32, v_bits_set, v_bits_add, v_bits_sub, v_bits_mul, v_bits_and, v_bits_or, v_bits_xor,
 *   v_bits_left(a, n), v_bits_right(a, n) (n a literal), v_truncated(v32), v_from_int(vbits) -> v32, v_top(vbits)
 *   v_load_u8, v_store_u8, v_load_u16, v_store_u16 (values that fit)
 *   vmask, v_less(a, b) (signed), v_equal, v_mask_and, v_mask_or, v_pick(mask, a, b): a where it is set
 *   v_mask_load(bytes, i), v_mask_store: bit i & 7 of byte i >> 3 and the next LANES - 1, i being a multiple of LANES
 */
#include "formats.h"

/* --- random bits ----------------------------------------------------------------------------------------- */

/* The random bits of elements [first, first + n) of a parameter. */
INLINE void fill_random(uint32_t *random, uint64_t seed, uint64_t update, uint64_t first, int64_t n) {
    static const uint32_t counted[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vbits count = v_bits_load(counted), many = v_bits_set(LANES);
    const vbits factor1 = v_bits_set(OC_HASH_FIRST), factor2 = v_bits_set(OC_HASH_SECOND);
    for (int64_t done = 0; done < n;) {
        uint64_t element = first + (uint64_t)done, key = oc_key(seed, update, element / OC_STATE_BLOCK);
        int64_t in_block = (int64_t)(element % OC_STATE_BLOCK);
        int64_t end = OC_STATE_BLOCK - in_block < n - done ? OC_STATE_BLOCK - in_block : n - done;
        const vbits upper = v_bits_set((uint32_t)(key >> 32));
        vbits number = v_bits_add(count, v_bits_set((uint32_t)key + (uint32_t)in_block));
        for (int64_t i = 0; i < end; i += LANES) {
            vbits x = v_bits_mul(v_bits_xor(number, v_bits_right(number, 16)), factor1);
            x = v_bits_mul(v_bits_xor(v_bits_xor(x, v_bits_right(x, 15)), upper), factor2);
            v_bits_store(random + done + i, v_bits_xor(x, v_bits_right(x, 15)));
            number = v_bits_add(number, many);
        }
        done += end; /* what was stored past the end is written over, or not read */
    }
}

/* --- decoding -------------------------------------------------------------------------------------------- */

/* The numbers that decode a block of OC_FLOAT8. */
typedef struct {
    vbits exponent, nan;
    v32 unit;
} float8_scale;

INLINE float8_scale scale_at(const uint8_t *scale, int format, int top) {
    int biased = format != OC_FLOAT8 || *scale < OC_LEAST_SCALE ? OC_LEAST_SCALE : *scale;
    return (float8_scale){v_bits_set((uint32_t)(biased - top) << 23),
                          v_bits_set(biased == OC_NAN_SCALE ? 0x7fc00000 : 0),
                          v_of_bits(v_bits_set((uint32_t)(biased - top - 2) << 23))};
}

INLINE v32 from_float8(const uint8_t *codes, int has_sign, float8_scale scale) {
    vbits byte = v_load_u8(codes), code = has_sign ? v_bits_and(byte, v_bits_set(127)) : byte;
    vbits large = v_bits_add(v_bits_left(code, 20), scale.exponent);
    vbits small = v_bits_of(v_mul(v_from_int(code), scale.unit));
    vbits bits = v_bits_or(v_pick(v_less(code, v_bits_set(8)), small, large), scale.nan);
    return v_of_bits(has_sign ? v_bits_or(bits, v_bits_left(v_bits_right(byte, 7), 31)) : bits);
}

INLINE v32 load_moment(const void *array, int format, int64_t i, int has_sign, float8_scale scale) {
    switch (format) {
    case OC_FLOAT8: return from_float8((const uint8_t *)array + i, has_sign, scale);
    case OC_BFLOAT16: return v_load_bf16((const uint16_t *)array + i);
    default: return v_load((const float *)array + i);
    }
}

/* The master whose lower half is in `low`. `high` is the upper half, or one more where it was rounded up. */
INLINE v32 joined(const uint16_t *low, const uint16_t *high, const uint8_t *ties, int64_t i) {
    const vbits half = v_bits_set(0x8000);
    vbits lower = v_load_u16(low + i), upper = v_bits_left(v_load_u16(high + i), 16);
    vmask tied = v_mask_and(v_mask_load(ties, i), v_equal(lower, half));
    vbits whole = v_bits_or(upper, lower);
    return v_of_bits(v_pick(v_mask_or(v_less(half, lower), tied), v_bits_sub(whole, v_bits_set(0x10000)), whole));
}

INLINE v32 load_master(const oc_segment *a, int format, int64_t i) {
    switch (format) {
    case OC_SPLIT: return joined(a->master, a->high, a->ties, i);
    case OC_BFLOAT16: return v_load_bf16((const uint16_t *)a->master + i);
    default: return v_load((const float *)a->master + i);
    }
}

/* --- rounding -------------------------------------------------------------------------------------------- */

INLINE vmask is_nan(vbits bits) { return v_less(v_bits_set(0x7f800000), v_bits_and(bits, v_bits_set(0x7fffffff))); }

/* The part of an element's random bits that is its master's, exp_avg's or exp_avg_sq's. */
enum { FOR_MASTER, FOR_EXP_AVG, FOR_EXP_AVG_SQ };

INLINE void round_to_bf16(const float *values, uint16_t *rounded, const uint32_t *random, int whose, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        vbits bits = v_bits_of(v_load(values + i)), r = v_bits_load(random + i);
        if (whose == FOR_MASTER)
            r = v_bits_mul(r, v_bits_set(OC_HASH_MASTER));
        r = whose == FOR_EXP_AVG ? v_bits_and(r, v_bits_set(0xffff)) : v_bits_right(r, 16);
        vbits sum = v_pick(is_nan(bits), v_bits_set(0x7fc00000), v_bits_add(bits, r));
        v_store_u16(rounded + i, v_bits_right(sum, 16));
    }
}

INLINE void round_to_float8(const float *values, uint8_t *codes, uint8_t *scale, const uint32_t *random, int has_sign,
                            int64_t n) {
    const vbits absolute = v_bits_set(0x7fffffff);
    const int top = has_sign ? OC_TOP_SIGNED : OC_TOP_UNSIGNED;
    vbits largest = v_bits_zero();
    for (int64_t i = 0; i < n; i += LANES)
        largest = v_max32(largest, v_bits_and(v_bits_of(v_load(values + i)), absolute));
    int biased = (int)(v_top(largest) >> 23);
    biased = biased < OC_LEAST_SCALE ? OC_LEAST_SCALE : biased;
    *scale = (uint8_t)biased;
    if (biased == OC_NAN_SCALE) {
        memset(codes, 0, (size_t)n);
        return;
    }
    const vbits least = v_bits_set((uint32_t)(biased - top + 1) << 23); /* that has an exponent of its own */
    const vbits below = v_bits_set((uint32_t)(biased - top) << OC_MANTISSA);
    const v32 fixed_point = v_of_bits(v_bits_set((uint32_t)(127 + 149 + top - biased) << 23));
    for (int64_t i = 0; i < n; i += LANES) {
        vbits bits = v_bits_of(v_load(values + i)), magnitude = v_bits_and(bits, absolute), r = v_bits_load(random + i);
        r = has_sign ? v_bits_and(r, v_bits_set(0xfffff)) : v_bits_right(r, 12);
        vbits fixed = v_truncated(v_mul(v_of_bits(magnitude), fixed_point));
        vbits large = v_bits_sub(v_bits_right(v_bits_add(magnitude, r), 20), below);
        vbits code = v_pick(v_less(magnitude, least), v_bits_right(v_bits_add(fixed, r), 20), large);
        v_store_u8(codes + i, has_sign ? v_bits_or(code, v_bits_left(v_bits_right(bits, 31), 7)) : code);
    }
}

INLINE void split_master(const float *values, const oc_segment *a, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        v32 x = v_load(values + i);
        vbits bits = v_pick(is_nan(v_bits_of(x)), v_bits_set(0x7fc00000), v_bits_of(x));
        v_store_u16((uint16_t *)a->master + i, v_bits_and(bits, v_bits_set(0xffff)));
        v_store_bf16((uint16_t *)a->high + i, x);
        v_mask_store(a->ties, i, v_equal(v_bits_and(bits, v_bits_set(0x1ffff)), v_bits_set(0x18000)));
    }
}

INLINE void store_moment(const float *values, void *array, int format, uint8_t *scale, const uint32_t *random,
                         int has_sign, int64_t n) {
    if (format == OC_FLOAT8 && has_sign)
        round_to_float8(values, array, scale, random, 1, n);
    else if (format == OC_FLOAT8)
        round_to_float8(values, array, scale, random, 0, n);
    else if (format == OC_BFLOAT16 && has_sign)
        round_to_bf16(values, array, random, FOR_EXP_AVG, n);
    else if (format == OC_BFLOAT16)
        round_to_bf16(values, array, random, FOR_EXP_AVG_SQ, n);
}

INLINE void store_param(const float *values, void *param, int dtype, int stream, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES)
        store_from_f32(param, dtype, i, v_load(values + i), stream);
}

/* --- a block --------------------------------------------------------------------------------------------- */

/* The fp32 results, in place where a state is fp32, else in scratch. */
typedef struct {
    float *master, *exp_avg, *exp_avg_sq;
} adam_results;

INLINE void adam_values(const oc_segment *a, adam_results to, int64_t n, const adam_constants *constants,
                        const oc_adam_kind *kind, int order) {
    const adam_constants c = *constants;
    const int grad_dtype = kind->grad_dtype, master_format = kind->master_format;
    const int exp_avg_format = kind->exp_avg_format, exp_avg_sq_format = kind->exp_avg_sq_format;
    const float8_scale m_scale = scale_at(a->exp_avg_scale, exp_avg_format, OC_TOP_SIGNED);
    const float8_scale v_scale = scale_at(a->exp_avg_sq_scale, exp_avg_sq_format, OC_TOP_UNSIGNED);
    for (int64_t i = 0; i < n; i += LANES) {
        fetch(a->grad, grad_dtype, i + FETCH_AHEAD);
        fetch(a->master, master_format, i + FETCH_AHEAD);
        fetch(a->exp_avg, exp_avg_format, i + FETCH_AHEAD);
        fetch(a->exp_avg_sq, exp_avg_sq_format, i + FETCH_AHEAD);
        if (master_format == OC_SPLIT)
            fetch(a->high, OC_BFLOAT16, i + FETCH_AHEAD);
        v32 g = load_as_f32(a->grad, grad_dtype, i);
        v32 m = load_moment(a->exp_avg, exp_avg_format, i, 1, m_scale);
        v32 v = load_moment(a->exp_avg_sq, exp_avg_sq_format, i, 0, v_scale);
        v32 p = adam_element(g, load_master(a, master_format, i), &m, &v, &c, order);
        v_store(to.master + i, p);
        v_store(to.exp_avg + i, m);
        v_store(to.exp_avg_sq + i, v);
    }
}

/* A whole number of vectors. Elements from `count` on are padding. */
INLINE void adam_block(const oc_segment *a, int64_t n, int64_t count, const adam_constants *c, uint64_t update,
                       const oc_adam_kind *kind, int stream) {
    _Alignas(64) float master[OC_STATE_BLOCK], exp_avg[OC_STATE_BLOCK], exp_avg_sq[OC_STATE_BLOCK];
    _Alignas(64) uint32_t random[OC_STATE_BLOCK + LANES];
    _Alignas(64) uint16_t rounded[OC_STATE_BLOCK];
    const int keep = kind->keep_states, narrow_master = kind->master_format == OC_BFLOAT16;
    adam_results to = {keep || kind->master_format != OC_FLOAT32 ? master : a->master,
                       keep || kind->exp_avg_format != OC_FLOAT32 ? exp_avg : a->exp_avg,
                       keep || kind->exp_avg_sq_format != OC_FLOAT32 ? exp_avg_sq : a->exp_avg_sq};
    if (narrow_master || (!keep && (kind->exp_avg_format != OC_FLOAT32 || kind->exp_avg_sq_format != OC_FLOAT32)))
        fill_random(random, a->seed, update, (uint64_t)a->start, n);
    if (kind->op_order == OC_ORDER_TORCH)
        adam_values(a, to, n, c, kind, OC_ORDER_TORCH);
    else
        adam_values(a, to, n, c, kind, OC_ORDER_OPTAX);
    for (int64_t i = count; i < n; i++) /* padding has no part in a block's largest value */
        to.exp_avg[i] = to.exp_avg_sq[i] = 0;
    if (!keep) {
        store_moment(to.exp_avg, a->exp_avg, kind->exp_avg_format, a->exp_avg_scale, random, 1, n);
        store_moment(to.exp_avg_sq, a->exp_avg_sq, kind->exp_avg_sq_format, a->exp_avg_sq_scale, random, 0, n);
        if (kind->master_format == OC_SPLIT)
            split_master(master, a, n);
    }
    if (narrow_master) {
        uint16_t *narrow = keep ? rounded : a->master;
        round_to_bf16(master, narrow, random, FOR_MASTER, n);
        for (int64_t i = 0; i < n; i += LANES)
            v_store(master + i, v_load_bf16(narrow + i));
    }
    const void *written = narrow_master ? a->master : kind->master_format == OC_SPLIT ? a->high : NULL;
    if (kind->param_dtype == OC_NO_PARAM || a->param == written)
        return;
    switch (kind->param_dtype) {
    case OC_BFLOAT16:
        stream ? store_param(to.master, a->param, OC_BFLOAT16, 1, n)
               : store_param(to.master, a->param, OC_BFLOAT16, 0, n);
        break;
    case OC_FLOAT16:
        stream ? store_param(to.master, a->param, OC_FLOAT16, 1, n)
               : store_param(to.master, a->param, OC_FLOAT16, 0, n);
        break;
    default:
        stream ? store_param(to.master, a->param, OC_FLOAT32, 1, n)
               : store_param(to.master, a->param, OC_FLOAT32, 0, n);
        break;
    }
}

/* The arrays of a block that is no whole number of vectors, padded with zeros. */
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
    adam_block(&block, (count + LANES - 1) / LANES * LANES, count, c, update, kind, 0);
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
        if (count % LANES)
            adam_padded(&block, count, c, update, kind);
        else
            adam_block(&block, count, count, c, update, kind, stream);
    }
    if (stream)
        v_fence();
}
