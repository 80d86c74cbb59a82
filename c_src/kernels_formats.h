/* The update of states in narrow formats, for kernels_simd.h: a block of 256 elements at a time.
 *
 * One loop decodes, updates as in fp32 and leaves fp32 results in the innermost cache; others round these. The
 * processor divides only as fast as several elements are under way at once, and keeps a limited number of results until
 * the divisions before them are done. So the loop begins two vectors while it finishes the two before: no division
 * waits for another of the same pass.
 *
 * Beside kernels_simd.h's names it uses, on the 32-bit parts of vbits:
 *   v_of_bits(vbits) -> v32, v_bits_set, v_bits_add, v_bits_sub, v_bits_mul, v_bits_and, v_bits_or, v_bits_xor,
 *   v_bits_left(a, n), v_bits_right(a, n) (n a literal), v_min32 (unsigned), v_top(vbits)
 *   v_load_u8, v_load_s16, v_load_e4m3   bytes as floats of a sign, 4 bits of exponent, whose bias is 15, and 3 of
 *                                        mantissa
 *   v_nearest_bf16(v32)                  to nearest even, in the upper 16 bits of the parts
 *   v_store_upper, v_stream_upper, v_store_lower(array, a, b)   the upper or lower 16 bits of the parts of two vectors
 *   v_store_codes(array, a, b, c, d, has_sign)   of the parts of four vectors, a byte each: bits 20 to 27, or bits 20
 * to 26 below bit 31 vmask, v_equal, v_ordered(v32): not a NaN, v_pick(mask, a, b): a where it is set
 *   v_mask_load(bytes, i), v_mask_store, v_mask_clear(a, b): a where b is not. Bit i & 7 of byte i >> 3 and the next
 *   LANES - 1, i being a multiple of LANES
 */
#include "formats.h"

/* --- decoding -------------------------------------------------------------------------------------------- */

/* A block of OC_FLOAT8 to decode. With a sign, a code is a float of 16 bits but for a factor, of which half is always a
 * float of 32. Without, codes with exponents from 1 on and the block's offset have the bits of their values. Below,
 * they have those of its mean with the least such value, from which a float is exactly as far as the code says. */
typedef struct {
    const uint8_t *codes;
    v32 half_factor;
    vbits offset;
    v32 minus_least;
} float8_block;

INLINE float8_block float8_block_of(const void *codes, const uint8_t *scale, int format) {
    uint32_t biased = format != OC_FLOAT8 || *scale < OC_LEAST_SCALE ? OC_LEAST_SCALE : *scale;
    if (biased == OC_NAN_SCALE) {
        const vbits nan = v_bits_set(0x7fc00000);
        return (float8_block){codes, v_of_bits(nan), nan, v_of_bits(nan)};
    }
    return (float8_block){codes, v_of_bits(v_bits_set((biased + 14 - OC_TOP_SIGNED) << 23)),
                          v_bits_set((biased - OC_TOP_UNSIGNED) << 23),
                          v_of_bits(v_bits_set(0x80000000 | (biased - OC_TOP_UNSIGNED + 1) << 23))};
}

INLINE v32 from_float8(const float8_block *block, int64_t i, int has_sign) {
    if (has_sign) {
        v32 half = v_mul(v_load_e4m3(block->codes + i), block->half_factor);
        return v_add(half, half);
    }
    vbits value = v_bits_add(v_bits_left(v_load_u8(block->codes + i), OC_DROPPED), block->offset);
    return v_of_bits(v_min32(value, v_bits_of(v_fma(v_of_bits(value), v_set(2), block->minus_least))));
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
    float *master, *moments[OC_MOMENTS];
} block_results;

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

/* The hash of elements' numbers in their block and its key, vector by vector. */
typedef struct {
    vbits upper, count;
} random_vectors;

INLINE random_vectors random_from(uint64_t key, uint32_t number) {
    static const uint32_t counted[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (random_vectors){v_bits_set((uint32_t)(key >> 32)),
                            v_bits_add(v_bits_load(counted), v_bits_set((uint32_t)key + number))};
}

INLINE vbits next_random(random_vectors *s) {
    vbits x = v_bits_mul(s->count, v_bits_set(OC_HASH_FIRST));
    x = v_bits_mul(v_bits_xor(v_bits_xor(x, v_bits_right(x, 15)), s->upper), v_bits_set(OC_HASH_SECOND));
    s->count = v_bits_add(s->count, v_bits_set(LANES));
    return v_bits_xor(x, v_bits_right(x, 16));
}

/* The random bits of n elements; what is written past them is not read. */
static void fill_random(uint32_t *random, uint64_t key, uint32_t number, int64_t n) {
    random_vectors s = random_from(key, number);
    for (int64_t i = 0; i < n; i += LANES)
        v_bits_store(random + i, next_random(&s));
}

/* Set the source of a run's random bits. Return true after writing all of them, if the run lies in two blocks: the loop
 * over a block makes those of another. */
static int find_random(const oc_segment *a, uint64_t update, int64_t n, random_source *source, uint32_t *random) {
    *source = random_source_of(a, update);
    if (source->next_from >= n)
        return 0;
    fill_random(random, source->key, source->number, source->next_from);
    fill_random(random + source->next_from, source->next_key, 0, n - source->next_from);
    return 1;
}

/* The part of an element's random bits for a moment, by its number, or for the master. */
enum { FOR_FIRST, FOR_SECOND, FOR_MASTER };

INLINE vbits random_16(const uint32_t *random, int whose) {
    vbits bits = v_bits_load(random);
    switch (whose) {
    case FOR_FIRST: return v_bits_and(bits, v_bits_set(0xffff));
    case FOR_MASTER: return v_bits_right(v_bits_mul(bits, v_bits_set(OC_HASH_MASTER)), 16);
    default: return v_bits_right(bits, 16);
    }
}

/* The bits of floats, with one NaN for all: random bits added to another would make it inf, or turn its sign. */
INLINE vbits quiet(v32 x) { return v_pick(v_ordered(x), v_bits_of(x), v_bits_set(0x7fc00000)); }

static void quiet_nans(float *values, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES)
        v_bits_store(values + i, quiet(v_load(values + i)));
}

/* Bits whose upper half is the rounded value. Moments have had their NaNs replaced, if there are any. */
INLINE vbits rounded_bits(const float *values, const uint32_t *random, int whose) {
    v32 x = v_load(values);
    return v_bits_add(whose == FOR_MASTER ? quiet(x) : v_bits_of(x), random_16(random, whose));
}

INLINE void round_to_bf16(const float *values, uint16_t *rounded, const uint32_t *random, int whose, int64_t n) {
    for (int64_t i = 0; i < n; i += 2 * LANES)
        v_store_upper(rounded + i, rounded_bits(values + i, random + i, whose),
                      rounded_bits(values + i + LANES, random + i + LANES, whose));
}

/* The scale of a block whose largest absolute value has these bits. */
static uint8_t scale_of(uint32_t largest) {
    uint32_t biased = largest >> 23;
    return (uint8_t)(biased < OC_LEAST_SCALE ? OC_LEAST_SCALE : biased);
}

/* A vector's codes, where v_store_codes expects them. Without a sign, values are not negative. Below the least value
 * with an exponent of its own, the mean with it has the code's bits. */
INLINE vbits float8_bits(const float *values, vbits offset, const uint32_t *random, int whose, int has_sign) {
    v32 value = v_load(values);
    vbits bits = v_bits_of(value), r = v_bits_load(random);
    r = whose == FOR_FIRST ? v_bits_and(r, v_bits_set((1 << OC_DROPPED) - 1)) : v_bits_right(r, 32 - OC_DROPPED);
    vbits half_least = has_sign ? v_bits_or(v_bits_and(bits, v_bits_set(0x80000000)), offset) : offset;
    vbits exact = v_max32(bits, v_bits_of(v_fma(value, v_set(0.5f), v_of_bits(half_least))));
    return v_bits_sub(v_bits_add(exact, r), offset);
}

INLINE void round_to_float8(const float *values, uint8_t *codes, int biased, const uint32_t *random, int whose,
                            int has_sign, int64_t n) {
    if (biased == OC_NAN_SCALE) {
        memset(codes, 0, (size_t)n);
        return;
    }
    const vbits offset = v_bits_set((uint32_t)(biased - (has_sign ? OC_TOP_SIGNED : OC_TOP_UNSIGNED)) << 23);
#define CODES_AT(i) float8_bits(values + (i), offset, random + (i), whose, has_sign)
    for (int64_t i = 0; i < n; i += 4 * LANES)
        v_store_codes(codes + i, CODES_AT(i), CODES_AT(i + LANES), CODES_AT(i + 2 * LANES), CODES_AT(i + 3 * LANES),
                      has_sign);
#undef CODES_AT
}

static void split_masters(const float *values, const oc_segment *a, int64_t n) {
    const vbits low_and_odd = v_bits_set(0x1ffff), odd_tie = v_bits_set(0x18000);
    for (int64_t i = 0; i < n; i += 2 * LANES) { /* the body has stored the upper halves */
        vbits a_bits = quiet(v_load(values + i)), b_bits = quiet(v_load(values + i + LANES));
        v_store_lower((uint16_t *)a->master + i, a_bits, b_bits);
        v_mask_store(a->ties, i, v_equal(v_bits_and(a_bits, low_and_odd), odd_tie));
        v_mask_store(a->ties, i + LANES, v_equal(v_bits_and(b_bits, low_and_odd), odd_tie));
    }
}

/* Two vectors. */
INLINE void store_params(void *param, int dtype, int64_t i, v32 x, v32 y, int stream) {
    if (dtype == OC_BFLOAT16 && stream) {
        v_stream_upper((uint16_t *)param + i, v_nearest_bf16(x), v_nearest_bf16(y));
    } else if (dtype == OC_BFLOAT16) {
        v_store_upper((uint16_t *)param + i, v_nearest_bf16(x), v_nearest_bf16(y));
    } else if (dtype == OC_FLOAT16) {
        store_from_f32(param, OC_FLOAT16, i, x, stream);
        store_from_f32(param, OC_FLOAT16, i + LANES, y, stream);
    } else {
        store_from_f32(param, OC_FLOAT32, i, x, stream);
        store_from_f32(param, OC_FLOAT32, i + LANES, y, stream);
    }
}

/* After the loop over a block each result is rounded to its format, by functions that all rules and formats share: a
 * copy in each of their functions below took a quarter of the compiler's time. `whose` and the sign are constants. */
typedef void round_fn(const float *values, void *narrow, int biased, const uint32_t *random, int64_t n);
#define ROUND_MOMENT(NAME, WHOSE, HAS_SIGN)                                                                            \
    static void NAME(const float *values, void *narrow, int biased, const uint32_t *random, int64_t n) {               \
        round_to_float8(values, narrow, biased, random, WHOSE, HAS_SIGN, n);                                           \
    }
ROUND_MOMENT(first_to_float8, FOR_FIRST, 1)
ROUND_MOMENT(first_to_unsigned_float8, FOR_FIRST, 0)
ROUND_MOMENT(second_to_float8, FOR_SECOND, 1)
ROUND_MOMENT(second_to_unsigned_float8, FOR_SECOND, 0)

INLINE void copy_masters(void *param, int dtype, const uint16_t *narrow, int64_t n, int stream) {
    for (int64_t i = 0; i < n; i += 2 * LANES)
        store_params(param, dtype, i, v_load_bf16(narrow + i), v_load_bf16(narrow + i + LANES), stream);
}

/* bf16 masters. The device parameter is what the master was rounded to. */
static void round_masters(const oc_segment *a, const float *values, const oc_kind *kind, const uint32_t *random,
                          int64_t n, int stream) {
    _Alignas(64) uint16_t rounded[OC_STATE_BLOCK];
    uint16_t *narrow = kind->keep_states ? rounded : a->master;
    round_to_bf16(values, narrow, random, FOR_MASTER, n);
    if (a->param != narrow)
        switch (kind->param_dtype) {
        case OC_FLOAT32: copy_masters(a->param, OC_FLOAT32, narrow, n, stream); break;
        case OC_BFLOAT16: copy_masters(a->param, OC_BFLOAT16, narrow, n, stream); break;
        case OC_FLOAT16: copy_masters(a->param, OC_FLOAT16, narrow, n, stream); break;
        }
}

/* --- a block --------------------------------------------------------------------------------------------- */

/* The formats and types that a function is made for: its own constants, or those of `kind`. */
typedef struct {
    int rule, grad_dtype, first_format, second_format, master_format, param_dtype;
} block_types;

INLINE int moment_format(block_types types, int moment) { return moment ? types.second_format : types.first_format; }

/* The arguments of the loop over a block. */
typedef struct {
    oc_segment a;
    block_results to;
    rule_constants c;
    block_types types;
    float8_block first_codes, second_codes;
    int stream, splits, has_param;
    uint32_t *random; /* the loop writes random bits here, if it makes them */
} block_loop;

/* Elements whose moments are new, and whose masters are not. */
typedef struct {
    v32 moments[OC_MOMENTS], carry;
} begun;

/* The values that go from vector to vector. The largest absolute bits of new moments give a block's scale, or show that
 * one is a NaN. */
typedef struct {
    vbits largest[OC_MOMENTS];
    random_vectors random;
} carried;

INLINE v32 load_kept(const block_loop *b, int64_t i, int moment) {
    if (!has_moment(&b->c, b->types.rule, moment))
        return v_set(0);
    return load_moment(b->a.moments[moment], moment_format(b->types, moment), i, oc_has_sign(b->types.rule, moment),
                       moment ? &b->second_codes : &b->first_codes);
}

INLINE void store_kept(const block_loop *b, int64_t i, v32 x, carried *next, int moment) {
    if (!has_moment(&b->c, b->types.rule, moment))
        return;
    v_store(b->to.moments[moment] + i, x);
    if (moment_format(b->types, moment) != OC_FLOAT32)
        next->largest[moment] = v_max32(next->largest[moment], v_bits_and(v_bits_of(x), v_bits_set(0x7fffffff)));
}

/* From here on there is one statement for each moment, because the compiler unrolls no loop of this length. */
_Static_assert(OC_MOMENTS == 2, "a block has statements for two moments");

INLINE begun begin_vector(const block_loop *b, int64_t i, carried *next) {
    v32 g = load_as_f32(b->a.grad, b->types.grad_dtype, i);
    v32 moments[OC_MOMENTS] = {load_kept(b, i, 0), load_kept(b, i, 1)};
    v32 p = b->c.reads_master ? load_master(&b->a, b->types.master_format, i) : g;
    v32 carry = new_moments(g, p, moments, &b->c, b->types.rule);
    store_kept(b, i, moments[0], next, 0);
    store_kept(b, i, moments[1], next, 1);
    if (b->random)
        v_bits_store(b->random + i, next_random(&next->random));
    return (begun){{moments[0], moments[1]}, carry};
}

INLINE v32 finish_vector(const block_loop *b, int64_t i, begun x) {
    v32 p = load_master(&b->a, b->types.master_format, i);
    p = new_master(p, x.moments, x.carry, &b->c, b->types.rule);
    v_store(b->to.master + i, p);
    return p;
}

INLINE void store_pair(const block_loop *b, int64_t i, v32 p, v32 q) {
    if (b->splits)
        store_params(b->a.high, OC_BFLOAT16, i, p, q, 0);
    if (b->has_param)
        store_params(b->a.param, b->types.param_dtype, i, p, q, b->stream);
}

INLINE void fetch_two(const void *array, int dtype, int64_t i) {
    fetch(array, dtype, i);
    if (LANES == 16 && dtype == OC_FLOAT32) /* two cache lines */
        fetch(array, dtype, i + LANES);
}

INLINE void fetch_pair(const block_loop *b, int64_t i) {
    fetch_two(b->a.grad, b->types.grad_dtype, i);
    fetch_two(b->a.master, b->types.master_format, i);
    if (has_moment(&b->c, b->types.rule, 0))
        fetch_two(b->a.moments[0], b->types.first_format, i);
    if (has_moment(&b->c, b->types.rule, 1))
        fetch_two(b->a.moments[1], b->types.second_format, i);
    if (b->types.master_format == OC_SPLIT)
        fetch(b->a.high, OC_BFLOAT16, i);
}

INLINE float8_block codes_of(const oc_segment *a, const rule_constants *c, block_types types, int moment) {
    const int format = has_moment(c, types.rule, moment) ? moment_format(types, moment) : OC_FLOAT32;
    return float8_block_of(a->moments[moment], a->scales[moment], format);
}

INLINE carried block_values(const oc_segment *a, block_results to, int64_t n, const rule_constants *c,
                            const oc_kind *kind, block_types types, uint32_t *random, const random_source *source,
                            int stream) {
    const int splits = types.master_format == OC_SPLIT && !kind->keep_states;
    const block_loop b = {
        .a = *a,
        .to = to,
        .c = *c,
        .types = types,
        .first_codes = codes_of(a, c, types, 0),
        .second_codes = codes_of(a, c, types, 1),
        .stream = stream,
        .splits = splits,
        .has_param =
            types.param_dtype != OC_NO_PARAM && types.master_format != OC_BFLOAT16 && !(splits && a->param == a->high),
        .random = random,
    };
    carried next = {{v_bits_zero(), v_bits_zero()}, random_from(source->key, source->number)};
    begun first = begin_vector(&b, 0, &next), second = begin_vector(&b, LANES, &next);
    for (int64_t i = 2 * LANES; i < n; i += 2 * LANES) {
        const begun first_before = first, second_before = second;
        fetch_pair(&b, i + FETCH_AHEAD);
        first = begin_vector(&b, i, &next);
        v32 p = finish_vector(&b, i - 2 * LANES, first_before);
        second = begin_vector(&b, i + LANES, &next);
        v32 q = finish_vector(&b, i - LANES, second_before);
        store_pair(&b, i - 2 * LANES, p, q);
    }
    v32 p = finish_vector(&b, n - 2 * LANES, first), q = finish_vector(&b, n - LANES, second);
    store_pair(&b, n - 2 * LANES, p, q);
    return next;
}

/* Elements are a multiple of PASS: as many as round_to_float8 takes at once. */
enum { PASS = 4 * LANES };

/* A moment's results, rounded to its format. */
INLINE void round_moment(const oc_segment *a, const block_results *to, const carried *last, block_types types,
                         const uint32_t *random, int moment, int64_t n) {
    static round_fn *const to_float8[OC_MOMENTS][2] = {{first_to_unsigned_float8, first_to_float8},
                                                       {second_to_unsigned_float8, second_to_float8}};
    float *values = to->moments[moment];
    const int format = moment_format(types, moment);
    if (format == OC_FLOAT32)
        return;
    const uint32_t largest = v_top(last->largest[moment]);
    if (format == OC_FLOAT8) {
        const int biased = *a->scales[moment] = scale_of(largest);
        to_float8[moment][oc_has_sign(types.rule, moment)](values, a->moments[moment], biased, random, n);
    } else {
        if (largest > 0x7f800000)
            quiet_nans(values, n);
        round_to_bf16(values, a->moments[moment], random, moment, n);
    }
}

/* Padding is of zeros, and its new moments are zeros, unless another element's are NaN. */
INLINE void update_block(const oc_segment *a, int64_t n, const rule_constants *c, uint64_t update, const oc_kind *kind,
                         block_types types, int stream) {
    _Alignas(64) float master[OC_STATE_BLOCK], moments[OC_MOMENTS][OC_STATE_BLOCK];
    _Alignas(64) uint32_t random[OC_STATE_BLOCK + LANES];
    const int keep = kind->keep_states, master_format = types.master_format;
    int rounds = master_format == OC_BFLOAT16;
    block_results to = {.master = keep || master_format != OC_FLOAT32 ? master : a->master};
    for (int k = 0; k < OC_MOMENTS; k++) {
        const int is_narrow = moment_format(types, k) != OC_FLOAT32;
        to.moments[k] = keep || is_narrow ? moments[k] : a->moments[k];
        rounds |= !keep && is_narrow && has_moment(c, types.rule, k);
    }
    random_source source = {0};
    uint32_t *to_fill = rounds && !find_random(a, update, n, &source, random) ? random : NULL;
    const carried last = block_values(a, to, n, c, kind, types, to_fill, &source, stream);
    if (!keep && has_moment(c, types.rule, 0))
        round_moment(a, &to, &last, types, random, 0, n);
    if (!keep && has_moment(c, types.rule, 1))
        round_moment(a, &to, &last, types, random, 1, n);
    if (!keep && master_format == OC_SPLIT)
        split_masters(master, a, n);
    if (master_format == OC_BFLOAT16)
        round_masters(a, master, kind, random, n, stream);
}

/* Each common pair of formats has a function for each elementwise rule, in which they are constants. Moments of
 * different formats share one; a rule of one moment has none such. Muon has that alone: its second pass reads fp32 and
 * bf16. */
#define EACH_NARROW_MASTER(DO, RULE, M) DO(RULE, M, OC_BFLOAT16) DO(RULE, M, OC_SPLIT)
#define EACH_MASTER(DO, RULE, M) DO(RULE, M, OC_FLOAT32) EACH_NARROW_MASTER(DO, RULE, M)
#define EACH_FORMAT(DO, RULE)                                                                                          \
    EACH_NARROW_MASTER(DO, RULE, OC_FLOAT32) EACH_MASTER(DO, RULE, OC_BFLOAT16) EACH_MASTER(DO, RULE, OC_FLOAT8)

/* So has each type of gradients of fp32 masters and bf16 parameters. */
#define EACH_GRAD_TO_BF16(DO, RULE, M) DO(RULE, M, OC_FLOAT32) DO(RULE, M, OC_BFLOAT16)
#define EACH_TO_BF16(DO, RULE) EACH_GRAD_TO_BF16(DO, RULE, OC_BFLOAT16) EACH_GRAD_TO_BF16(DO, RULE, OC_FLOAT8)

#define BLOCK_FUNCTION(BLOCK, RULE, G, M, N, MASTER, P)                                                                \
    static void BLOCK(const oc_segment *a, int64_t n, const rule_constants *c, uint64_t update, const oc_kind *kind,   \
                      int stream) {                                                                                    \
        update_block(a, n, c, update, kind, (block_types){RULE, G, M, N, MASTER, P}, stream);                          \
    }
#define DEFINE_BLOCK(RULE, M, MASTER)                                                                                  \
    BLOCK_FUNCTION(block_##RULE##_##M##_##MASTER, RULE, kind->grad_dtype, M, M, MASTER, kind->param_dtype)
#define DEFINE_BLOCK_TO_BF16(RULE, M, G)                                                                               \
    BLOCK_FUNCTION(to_bf16_##RULE##_##M##_##G, RULE, G, M, M, OC_FLOAT32, OC_BFLOAT16)
#define DEFINE_BLOCKS(RULE, ...)                                                                                       \
    EACH_FORMAT(DEFINE_BLOCK, RULE)                                                                                    \
    EACH_TO_BF16(DEFINE_BLOCK_TO_BF16, RULE)
#define EACH_MIXED(DO) DO(OC_ADAM_TORCH) DO(OC_ADAM_OPTAX) DO(OC_MUON_DIRECTION) DO(OC_MUON)
#define DEFINE_MIXED(RULE)                                                                                             \
    BLOCK_FUNCTION(block_##RULE, RULE, kind->grad_dtype, kind->moment_formats[0], kind->moment_formats[1],             \
                   kind->master_format, kind->param_dtype)
OC_EACH_ELEMENTWISE_RULE(DEFINE_BLOCKS)
EACH_MIXED(DEFINE_MIXED)

typedef void block_fn(const oc_segment *a, int64_t n, const rule_constants *c, uint64_t update, const oc_kind *kind,
                      int stream);
#define BLOCK_ENTRY(RULE, M, MASTER) [RULE][M][MASTER] = block_##RULE##_##M##_##MASTER,
#define BLOCK_TO_BF16_ENTRY(RULE, M, G) [RULE][M][G] = to_bf16_##RULE##_##M##_##G,
#define BLOCK_ENTRIES(RULE, ...) EACH_FORMAT(BLOCK_ENTRY, RULE)
#define BLOCK_TO_BF16_ENTRIES(RULE, ...) EACH_TO_BF16(BLOCK_TO_BF16_ENTRY, RULE)
#define MIXED_ENTRY(RULE) [RULE] = block_##RULE,
static block_fn *const blocks[OC_RULES][OC_FLOAT8 + 1][OC_SPLIT + 1] = {OC_EACH_ELEMENTWISE_RULE(BLOCK_ENTRIES)};
static block_fn *const blocks_to_bf16[OC_RULES][OC_FLOAT8 + 1][2] = {OC_EACH_ELEMENTWISE_RULE(BLOCK_TO_BF16_ENTRIES)};
static block_fn *const blocks_of_mixed[OC_RULES] = {EACH_MIXED(MIXED_ENTRY)};

static block_fn *find_block(const oc_kind *kind) {
    const int rule = kind->rule, format = kind->moment_formats[0];
    const int to_bf16 = kind->master_format == OC_FLOAT32 && kind->param_dtype == OC_BFLOAT16;
    block_fn *found = to_bf16 && kind->grad_dtype != OC_FLOAT16 ? blocks_to_bf16[rule][format][kind->grad_dtype]
                                                                : blocks[rule][format][kind->master_format];
    for (int k = 1; k < oc_moments(rule); k++)
        if (kind->moment_formats[k] != format)
            found = NULL;
    return found ? found : blocks_of_mixed[rule];
}

/* The arrays of a block that is no whole number of passes, padded with zeros. */
typedef struct {
    _Alignas(64) float grad[OC_STATE_BLOCK], master[OC_STATE_BLOCK], moments[OC_MOMENTS][OC_STATE_BLOCK];
    _Alignas(64) float param[OC_STATE_BLOCK];
    _Alignas(64) uint16_t high[OC_STATE_BLOCK];
    uint8_t ties[OC_STATE_BLOCK / 8];
} padded_block;

static void update_padded(const oc_segment *a, int64_t count, const rule_constants *c, uint64_t update,
                          const oc_kind *kind, block_fn *run_block) {
    padded_block pad;
    oc_segment block = *a;
    const int split = kind->master_format == OC_SPLIT, bits = (int)(count % 8);
    const size_t n = (size_t)count, tie_bytes = (n + 7) / 8, master = n * (size_t)oc_itemsize(kind->master_format);
    size_t moments[OC_MOMENTS];
    memset(&pad, 0, sizeof pad);
    block.grad = memcpy(pad.grad, a->grad, n * (size_t)oc_itemsize(kind->grad_dtype));
    block.master = memcpy(pad.master, a->master, master);
    for (int k = 0; k < c->n_moments; k++) {
        moments[k] = n * (size_t)oc_itemsize(kind->moment_formats[k]);
        block.moments[k] = memcpy(pad.moments[k], a->moments[k], moments[k]);
    }
    block.param = pad.param;
    if (split) {
        block.high = memcpy(pad.high, a->high, 2 * n);
        block.ties = memcpy(pad.ties, a->ties, tie_bytes);
    }
    run_block(&block, (count + PASS - 1) / PASS * PASS, c, update, kind, 0);
    if (!kind->keep_states) {
        memcpy(a->master, pad.master, master);
        for (int k = 0; k < c->n_moments; k++)
            memcpy(a->moments[k], pad.moments[k], moments[k]);
    }
    if (!kind->keep_states && split) {
        if (bits) { /* the bits of the last byte that lie past the end do not change */
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
static void update_blocks(const oc_segment *a, int64_t begin, int64_t end, const rule_constants *c, uint64_t update,
                          const oc_kind *kind, int stream) {
    block_fn *run_block = find_block(kind);
    for (int64_t i = begin; i < end; i += OC_STATE_BLOCK) {
        int64_t count = end - i < OC_STATE_BLOCK ? end - i : OC_STATE_BLOCK;
        oc_segment block = {.grad = moved(a->grad, kind->grad_dtype, i),
                            .master = moved(a->master, kind->master_format, i),
                            .param = moved(a->param, kind->param_dtype, i),
                            .high = moved(a->high, OC_BFLOAT16, i),
                            .ties = a->ties ? a->ties + i / 8 : NULL,
                            .start = a->start + i,
                            .seed = a->seed};
        for (int k = 0; k < OC_MOMENTS; k++) {
            block.moments[k] = moved(a->moments[k], kind->moment_formats[k], i);
            block.scales[k] = moved(a->scales[k], OC_FLOAT8, i / OC_STATE_BLOCK);
        }
        if (count % PASS)
            update_padded(&block, count, c, update, kind, run_block);
        else
            run_block(&block, count, c, update, kind, stream);
    }
}
