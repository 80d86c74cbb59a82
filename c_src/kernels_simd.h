/* The vector kernels, written once with the following names, which each instruction set's file defines first:
 *
 *   LANES, v32 (LANES floats), v64 (LANES / 2 doubles), vint (LANES / 2 int64)
 *   v_set, v_load, v_store, v_stream, v_add, v_sub, v_mul, v_div, v_sqrt, v_fma(a, b, c) = a * b + c
 *   v_load_bf16, v_load_f16, v_store_bf16, v_store_f16, v_stream_bf16, v_stream_f16
 *   vbits (as wide as v32): v_bits_zero, v_bits_of(v32), v_bits_load, v_bits_store, and on its parts of 32 or 16 bits
 *   v_twice32, v_minus32, v_max32 (unsigned), v_twice16, v_minus16, v_max16
 *   v_low_halves, v_high_halves   the floats whose upper halves are the lower, the upper 16 bits of each 32
 *   w_load (LANES / 2 floats), w_set, w_add, w_sub, w_fma
 *   w_bits_add(vint, v64)   integer sum with the bits of a double
 *   w_int_zero, w_int_sum(vint) -> uint64_t
 *   v_fence                 after streaming stores
 *   the names in kernels_formats.h
 *
 * A tail shorter than a vector, or in the norm than a block, is copied to a padded one and takes the same path, so an
 * element's bits do not depend on its position.
 */
#include "offload_core.h"
#include "rules.h"
#include "sum_squares.h"

/* Main loop and tail share these: dtype is a constant in every call, so each switch folds away. */

INLINE v32 load_as_f32(const void *array, int dtype, int64_t i) {
    switch (dtype) {
    case OC_BFLOAT16: return v_load_bf16((const uint16_t *)array + i);
    case OC_FLOAT16: return v_load_f16((const uint16_t *)array + i);
    default: return v_load((const float *)array + i);
    }
}

INLINE void store_from_f32(void *array, int dtype, int64_t i, v32 x, int stream) {
    switch (dtype) {
    case OC_BFLOAT16: stream ? v_stream_bf16((uint16_t *)array + i, x) : v_store_bf16((uint16_t *)array + i, x); break;
    case OC_FLOAT16: stream ? v_stream_f16((uint16_t *)array + i, x) : v_store_f16((uint16_t *)array + i, x); break;
    case OC_FLOAT32: stream ? v_stream((float *)array + i, x) : v_store((float *)array + i, x); break;
    }
}

/* Prefetch the cache line of an element that the loop will reach later. The processor's own prefetching stops at the
 * end of each page, and memory that was not allocated here has small pages. Never reads past the array's end. */
enum { FETCH_AHEAD = 1024 };

INLINE void fetch(const void *array, int dtype, int64_t i) {
    __builtin_prefetch((const void *)((uintptr_t)array + (uintptr_t)(i * oc_itemsize(dtype))));
}

/* A partial vector, padded with zeros. */
typedef struct {
    _Alignas(64) unsigned char bytes[LANES * 4];
} lanes;

INLINE void to_lanes(lanes *padded, const void *array, int dtype, int64_t i, int64_t n) {
    int64_t size = oc_itemsize(dtype);
    memset(padded, 0, sizeof *padded);
    memcpy(padded->bytes, (const unsigned char *)array + i * size, (size_t)(n * size));
}

INLINE void from_lanes(const lanes *padded, void *array, int dtype, int64_t i, int64_t n) {
    int64_t size = oc_itemsize(dtype);
    memcpy((unsigned char *)array + i * size, padded->bytes, (size_t)(n * size));
}

/* --- update -------------------------------------------------------------------------------------- */

/* The arguments of a rule's functions. */
typedef struct {
    v32 grad_scale, values[OC_SCALARS]; /* the rounded scalars, which the rule may replace */
    int n_moments, scaled, reads_master;
    int on[4]; /* the rule's own switches */
} rule_constants;

#include "rule_adagrad.h"
#include "rule_adam.h"
#include "rule_lion.h"
#include "rule_muon.h"
#include "rule_sgd.h"

static void set_constants(rule_constants *c, const oc_rounded_scalars *s, int rule) {
    c->grad_scale = v_set(s->grad_scale);
    for (int k = 0; k < OC_SCALARS; k++)
        c->values[k] = v_set(s->values[k]);
    c->n_moments = oc_kept_moments(rule, s->exact);
    c->scaled = s->grad_scale != 1;
    switch (rule) {
#define CONSTANTS_CASE(RULE, NAME, ...)                                                                                \
    case RULE: NAME##_constants(c, s, RULE); break;
        OC_EACH_RULE(CONSTANTS_CASE)
    }
}

/* True if the update has this moment. Both are constants in every call, so that most rules ask nothing. */
INLINE int has_moment(const rule_constants *c, int rule, int moment) {
    return moment < oc_moments(rule) && (oc_moments_depend_on(rule) == OC_ALWAYS || moment < c->n_moments);
}

/* Both halves of an element's update. The rule is a constant in every call. */

INLINE v32 new_moments(v32 g, v32 p, v32 *moments, const rule_constants *c, int rule) {
    if (c->scaled)
        g = v_mul(g, c->grad_scale);
    switch (rule) {
#define MOMENTS_CASE(RULE, NAME, ...)                                                                                  \
    case RULE: return NAME##_moments(g, p, moments, c, RULE);
        OC_EACH_RULE(MOMENTS_CASE)
    }
    return g;
}

INLINE v32 new_master(v32 p, const v32 *moments, v32 carry, const rule_constants *c, int rule) {
    switch (rule) {
#define MASTER_CASE(RULE, NAME, ...)                                                                                   \
    case RULE: return NAME##_master(p, moments, carry, c, RULE);
        OC_EACH_RULE(MASTER_CASE)
    }
    return p;
}

/* Whole vectors. All loops over moments have a constant length, so that the compiler unrolls them and the arrays become
 * registers. */

INLINE void update_range(const oc_segment *a, int64_t begin, int64_t end, const rule_constants *constants, int rule,
                         int grad_dtype, int param_dtype, int stream, int keep_states) {
    const rule_constants c = *constants;
    const oc_segment s = *a;
    v32 moments[OC_MOMENTS];
    for (int k = 0; k < OC_MOMENTS; k++)
        moments[k] = v_set(0);
    for (int64_t i = begin; i < end; i += LANES) {
        fetch(s.grad, grad_dtype, i + FETCH_AHEAD);
        fetch(s.master, OC_FLOAT32, i + FETCH_AHEAD);
        for (int k = 0; k < OC_MOMENTS; k++)
            if (has_moment(&c, rule, k)) {
                fetch(s.moments[k], OC_FLOAT32, i + FETCH_AHEAD);
                moments[k] = v_load((const float *)s.moments[k] + i);
            }
        v32 g = load_as_f32(s.grad, grad_dtype, i), p = v_load((const float *)s.master + i);
        v32 carry = new_moments(g, p, moments, &c, rule);
        p = new_master(p, moments, carry, &c, rule);
        if (!keep_states) {
            v_store((float *)s.master + i, p);
            for (int k = 0; k < OC_MOMENTS; k++)
                if (has_moment(&c, rule, k))
                    v_store((float *)s.moments[k] + i, moments[k]);
        }
        store_from_f32(s.param, param_dtype, i, p, stream);
    }
}

#include "kernels_formats.h"

/* Each pair of element types has a function for each rule. They are constants in it, so its switches fold away. One
 * function of all pairs would be slow to compile: the compiler's time grows faster than a function's length. Muon's
 * first pass writes bf16, and its second reads bf16: for other types it has none, and update_blocks does it. */
#define EACH_PARAM(DO, RULE, G)                                                                                        \
    DO(RULE, G, OC_FLOAT32) DO(RULE, G, OC_BFLOAT16) DO(RULE, G, OC_FLOAT16) DO(RULE, G, OC_NO_PARAM)
#define EACH_PAIR(DO, RULE)                                                                                            \
    EACH_PARAM(DO, RULE, OC_FLOAT32) EACH_PARAM(DO, RULE, OC_BFLOAT16) EACH_PARAM(DO, RULE, OC_FLOAT16)
#define EACH_DIRECTION(DO)                                                                                             \
    DO(OC_MUON_DIRECTION, OC_FLOAT32, OC_BFLOAT16)                                                                     \
    DO(OC_MUON_DIRECTION, OC_BFLOAT16, OC_BFLOAT16) DO(OC_MUON_DIRECTION, OC_FLOAT16, OC_BFLOAT16)

#define DEFINE_RANGE(RULE, G, P)                                                                                       \
    static void range_##RULE##_##G##_##P(const oc_segment *a, int64_t begin, int64_t end, const rule_constants *c,     \
                                         int stream, int keep_states) {                                                \
        update_range(a, begin, end, c, RULE, G, P, stream, keep_states);                                               \
    }
#define DEFINE_RANGES(RULE, ...) EACH_PAIR(DEFINE_RANGE, RULE)
OC_EACH_ELEMENTWISE_RULE(DEFINE_RANGES)
EACH_DIRECTION(DEFINE_RANGE)

typedef void range_fn(const oc_segment *a, int64_t begin, int64_t end, const rule_constants *c, int stream,
                      int keep_states);
#define RANGE_ENTRY(RULE, G, P) [RULE][G][P] = range_##RULE##_##G##_##P,
#define RANGE_ENTRIES(RULE, ...) EACH_PAIR(RANGE_ENTRY, RULE)
static range_fn *const ranges[OC_RULES][3][4] = {OC_EACH_ELEMENTWISE_RULE(RANGE_ENTRIES) EACH_DIRECTION(RANGE_ENTRY)};

static range_fn *find_range(const oc_kind *kind) {
    int narrow = kind->master_format != OC_FLOAT32;
    for (int k = 0; k < oc_moments(kind->rule); k++)
        narrow |= kind->moment_formats[k] != OC_FLOAT32;
    return narrow ? NULL : ranges[kind->rule][kind->grad_dtype][kind->param_dtype];
}

/* Elements [begin, end), which are fewer than a vector, in arrays padded with zeros. */
static void update_tail(const oc_segment *a, int64_t begin, int64_t end, const rule_constants *c, const oc_kind *kind,
                        range_fn *run_range) {
    lanes grad, master, moments[OC_MOMENTS], param;
    oc_segment tail = {.grad = grad.bytes, .master = master.bytes, .param = param.bytes};
    const int64_t n = end - begin;
    to_lanes(&grad, a->grad, kind->grad_dtype, begin, n);
    to_lanes(&master, a->master, OC_FLOAT32, begin, n);
    for (int k = 0; k < c->n_moments; k++) {
        to_lanes(moments + k, a->moments[k], OC_FLOAT32, begin, n);
        tail.moments[k] = moments[k].bytes;
    }
    run_range(&tail, 0, LANES, c, 0, kind->keep_states);
    if (!kind->keep_states) {
        from_lanes(&master, a->master, OC_FLOAT32, begin, n);
        for (int k = 0; k < c->n_moments; k++)
            from_lanes(moments + k, a->moments[k], OC_FLOAT32, begin, n);
    }
    if (kind->param_dtype != OC_NO_PARAM)
        from_lanes(&param, a->param, kind->param_dtype, begin, n);
}

static void update(const oc_segment *a, int64_t begin, int64_t end, const oc_rounded_scalars *s, const oc_kind *kind,
                   int stream) {
    rule_constants c; /* not cleared first: a call may be on a few elements */
    set_constants(&c, s, kind->rule);
    if (kind->param_dtype != OC_NO_PARAM) { /* streaming stores need whole aligned vectors */
        int64_t size = oc_itemsize(kind->param_dtype);
        stream = stream && ((uintptr_t)a->param + (uintptr_t)(begin * size)) % (uintptr_t)(LANES * size) == 0;
    }
    range_fn *run_range = find_range(kind);
    if (run_range) {
        const int64_t whole = end - (end - begin) % LANES;
        if (begin < whole)
            run_range(a, begin, whole, &c, stream, kind->keep_states);
        if (whole < end)
            update_tail(a, whole, end, &c, kind, run_range);
    } else {
        update_blocks(a, begin, end, &c, s->update, kind, stream);
    }
    if (stream)
        v_fence();
}

/* --- sum of squares ------------------------------------------------------------------------------ */

/* Add to bins the sum in an extractor's window after n terms, each of which contains the extractor's own bits. */
INLINE void add_window(int64_t *bins, int lowest_bit, vint sum, double extractor, int64_t n) {
    uint64_t bits;
    memcpy(&bits, &extractor, sizeof bits);
    oc_add_at(bins, lowest_bit, (int64_t)(w_int_sum(sum) - (uint64_t)n * bits));
}

INLINE vint in_window(v64 x, v64 above, vint sum) { return w_bits_add(sum, w_fma(x, x, above)); }

INLINE void in_windows(v64 x, v64 above, v64 below, vint *in_upper, vint *in_lower) {
    v64 shifted = w_fma(x, x, above);
    v64 rest = w_fma(x, x, w_sub(above, shifted)); /* x * x - (shifted - above), exactly */
    *in_upper = w_bits_add(*in_upper, shifted);
    *in_lower = w_bits_add(*in_lower, w_add(rest, below));
}

/* The way to add a block's squares: not at all, in one window, in two, or element by element. */
enum { NO_WINDOW, ONE_WINDOW, TWO_WINDOWS, EACH };

/* The result of scanning a block, before its squares are added. */
typedef struct {
    uint32_t max_bits, min_bits; /* absolute bits as fp32 of the largest element, and of the smallest except zero */
} extremes;

INLINE uint32_t top32(vbits a) {
    uint32_t each[LANES], top = 0;
    v_bits_store(each, a);
    for (int i = 0; i < LANES; i++)
        top = each[i] > top ? each[i] : top;
    return top;
}

INLINE uint32_t top16(vbits a) {
    uint16_t each[2 * LANES], top = 0;
    v_bits_store(each, a);
    for (int i = 0; i < 2 * LANES; i++)
        top = each[i] > top ? each[i] : top;
    return top;
}

/* Scan a block (find its extremes and, for narrow types, widen it to floats, in any order), and add the squares of
 * another block, x, that has been scanned. Done together, the arithmetic of one hides the memory reads of the other.
 * Doubling drops the sign. The largest of the negated values, modulo 2^32 or 2^16, is that of the smallest element
 * except zero. */
INLINE extremes scan_and_add(const void *block, int dtype, float *wide, const float *x, int windows, int upper,
                             int64_t *bins) {
    const int lower = upper - OC_WINDOW_BITS;
    const double above = oc_extractor(upper), below = windows == TWO_WINDOWS ? oc_extractor(lower) : 0;
    const v64 above_v = w_set(above), below_v = w_set(below);
    vbits largest = v_bits_zero(), smallest = v_bits_zero();
    vint even = w_int_zero(), odd = w_int_zero(), in_lower = w_int_zero();
    for (int64_t i = 0; i < OC_BLOCK; i += 2 * LANES) {
        if (block && dtype == OC_BFLOAT16) {
            vbits two = v_bits_load((const uint16_t *)block + i), twice = v_twice16(two);
            fetch(block, dtype, i + OC_BLOCK);
            largest = v_max16(largest, twice);
            smallest = v_max16(smallest, v_minus16(twice));
            v_store(wide + i, v_low_halves(two));
            v_store(wide + i + LANES, v_high_halves(two));
        } else if (block) {
            for (int64_t k = i; k < i + 2 * LANES; k += LANES) {
                v32 values = load_as_f32(block, dtype, k);
                fetch(block, dtype, k + OC_BLOCK);
                vbits twice = v_twice32(v_bits_of(values));
                largest = v_max32(largest, twice);
                smallest = v_max32(smallest, v_minus32(twice));
                if (dtype != OC_FLOAT32)
                    v_store(wide + k, values);
            }
        }
        for (int64_t k = i; k < i + 2 * LANES; k += LANES) {
            if (windows == ONE_WINDOW) {
                even = in_window(w_load(x + k), above_v, even);
                odd = in_window(w_load(x + k + LANES / 2), above_v, odd);
            } else if (windows == TWO_WINDOWS) {
                in_windows(w_load(x + k), above_v, below_v, &even, &in_lower);
                in_windows(w_load(x + k + LANES / 2), above_v, below_v, &odd, &in_lower);
            }
        }
    }
    if (windows != NO_WINDOW) {
        add_window(bins, upper, even, above, OC_BLOCK / 2);
        add_window(bins, upper, odd, above, OC_BLOCK / 2);
    }
    if (windows == TWO_WINDOWS)
        add_window(bins, lower, in_lower, below, OC_BLOCK);
    if (dtype == OC_BFLOAT16)
        return (extremes){top16(largest) << 15, (uint32_t)(uint16_t)-top16(smallest) << 15};
    return (extremes){top32(largest) >> 1, (0u - top32(smallest)) >> 1};
}

/* The way to add the squares of elements with fraction_bits bits after the leading one, and the upper window's lowest
 * bit. */
static inline int windows_of(extremes found, int fraction_bits, int *upper) {
    *upper = oc_upper_window(found.max_bits);
    if (found.max_bits == 0 || found.max_bits >= 0x7f800000)
        return NO_WINDOW;
    int lowest = 2 * (oc_exponent(found.min_bits) - fraction_bits);
    return lowest >= *upper ? ONE_WINDOW : lowest >= *upper - OC_WINDOW_BITS ? TWO_WINDOWS : EACH;
}

INLINE void sum_squares_of(const void *src, int dtype, int64_t n, int64_t *bins) {
    const int fraction_bits = dtype == OC_BFLOAT16 ? 7 : dtype == OC_FLOAT16 ? 10 : 23;
    const int64_t size = oc_itemsize(dtype);
    _Alignas(64) float scratch[2][OC_BLOCK], padded[OC_BLOCK];
    const float *x = NULL;
    int windows = NO_WINDOW, upper = 0;
    for (int64_t start = 0; start < n; start += OC_BLOCK) {
        const void *block = (const char *)src + start * size;
        float *wide = scratch[start / OC_BLOCK % 2];
        int64_t count = n - start < OC_BLOCK ? n - start : OC_BLOCK;
        if (count < OC_BLOCK) {
            memset(padded, 0, (size_t)(OC_BLOCK * size));
            block = memcpy(padded, block, (size_t)(count * size));
        }
        extremes found;
        if (windows == ONE_WINDOW)
            found = scan_and_add(block, dtype, wide, x, ONE_WINDOW, upper, bins);
        else if (windows == TWO_WINDOWS)
            found = scan_and_add(block, dtype, wide, x, TWO_WINDOWS, upper, bins);
        else
            found = scan_and_add(block, dtype, wide, x, NO_WINDOW, upper, bins);
        x = dtype == OC_FLOAT32 ? block : wide;
        windows = windows_of(found, fraction_bits, &upper);
        bins[OC_NORM_NONFINITE] += found.max_bits >= 0x7f800000;
        /* Whole vectors, because floats widened from bf16 are not in order. */
        const int64_t whole = (count + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
        for (int64_t i = 0; windows == EACH && i < whole; i++)
            oc_add_square(bins, x[i]);
    }
    if (windows == ONE_WINDOW)
        scan_and_add(NULL, dtype, NULL, x, ONE_WINDOW, upper, bins);
    else if (windows == TWO_WINDOWS)
        scan_and_add(NULL, dtype, NULL, x, TWO_WINDOWS, upper, bins);
}

static void sum_squares(const void *src, int dtype, int64_t n, int64_t *bins) {
    switch (dtype) {
    case OC_BFLOAT16: sum_squares_of(src, OC_BFLOAT16, n, bins); break;
    case OC_FLOAT16: sum_squares_of(src, OC_FLOAT16, n, bins); break;
    default: sum_squares_of(src, OC_FLOAT32, n, bins); break;
    }
}

/* --- accumulate, reduce and cast ------------------------------------------------------------------------- */

INLINE void accumulate_range(const void *src, int dtype, float *dst, int64_t n) {
    int64_t i = 0;
    /* main loop */
    for (; i + LANES <= n; i += LANES) {
        fetch(src, dtype, i + FETCH_AHEAD);
        fetch(dst, OC_FLOAT32, i + FETCH_AHEAD);
        v_store(dst + i, v_add(v_load(dst + i), load_as_f32(src, dtype, i)));
    }
    /* tail */
    if (i < n) {
        lanes addend, sum;
        to_lanes(&addend, src, dtype, i, n - i);
        to_lanes(&sum, dst, OC_FLOAT32, i, n - i);
        v_store((float *)sum.bytes, v_add(v_load((float *)sum.bytes), load_as_f32(addend.bytes, dtype, 0)));
        from_lanes(&sum, dst, OC_FLOAT32, i, n - i);
    }
}

static void accumulate(const void *src, int dtype, float *dst, int64_t n) {
    switch (dtype) {
    case OC_BFLOAT16: accumulate_range(src, OC_BFLOAT16, dst, n); break;
    case OC_FLOAT16: accumulate_range(src, OC_FLOAT16, dst, n); break;
    default: accumulate_range(src, OC_FLOAT32, dst, n); break;
    }
}

INLINE v32 reduced(const void *src, int dtype, int64_t n_sources, int64_t stride, float divisor, int64_t i) {
    fetch(src, dtype, i + FETCH_AHEAD);
    v32 sum = load_as_f32(src, dtype, i);
    for (int64_t r = 1; r < n_sources; r++) {
        fetch(src, dtype, r * stride + i + FETCH_AHEAD);
        sum = v_add(sum, load_as_f32(src, dtype, r * stride + i));
    }
    return divisor == 1 ? sum : v_div(sum, v_set(divisor));
}

INLINE void reduce_range(const void *src, int dtype, int64_t n_sources, int64_t stride, float divisor, int add,
                         float *dst, int64_t n) {
    int64_t i = 0;
    /* main loop */
    for (; i + LANES <= n; i += LANES) {
        v32 sum = reduced(src, dtype, n_sources, stride, divisor, i);
        v_store(dst + i, add ? v_add(v_load(dst + i), sum) : sum);
    }
    /* tail */
    if (i < n) {
        lanes addend, total;
        to_lanes(&addend, src, dtype, i, n - i);
        v32 sum = load_as_f32(addend.bytes, dtype, 0);
        for (int64_t r = 1; r < n_sources; r++) {
            to_lanes(&addend, src, dtype, r * stride + i, n - i);
            sum = v_add(sum, load_as_f32(addend.bytes, dtype, 0));
        }
        if (divisor != 1)
            sum = v_div(sum, v_set(divisor));
        to_lanes(&total, dst, OC_FLOAT32, i, n - i);
        v_store((float *)total.bytes, add ? v_add(v_load((float *)total.bytes), sum) : sum);
        from_lanes(&total, dst, OC_FLOAT32, i, n - i);
    }
}

static void reduce(const oc_reduction *a, int64_t begin, int64_t end) {
    const void *src = (const char *)a->src + begin * oc_itemsize(a->dtype);
    float *dst = a->dst + begin;
    const int64_t n = end - begin;
    switch (a->dtype) {
    case OC_BFLOAT16: reduce_range(src, OC_BFLOAT16, a->n_sources, a->stride, a->divisor, a->add, dst, n); break;
    case OC_FLOAT16: reduce_range(src, OC_FLOAT16, a->n_sources, a->stride, a->divisor, a->add, dst, n); break;
    default: reduce_range(src, OC_FLOAT32, a->n_sources, a->stride, a->divisor, a->add, dst, n); break;
    }
}

INLINE void cast_range(const void *src, int src_dtype, void *dst, int dst_dtype, int64_t n) {
    int64_t i = 0;
    /* main loop */
    for (; i + LANES <= n; i += LANES) {
        fetch(src, src_dtype, i + FETCH_AHEAD);
        store_from_f32(dst, dst_dtype, i, load_as_f32(src, src_dtype, i), 0);
    }
    /* tail */
    if (i < n) {
        lanes from, to;
        to_lanes(&from, src, src_dtype, i, n - i);
        store_from_f32(to.bytes, dst_dtype, 0, load_as_f32(from.bytes, src_dtype, 0), 0);
        from_lanes(&to, dst, dst_dtype, i, n - i);
    }
}

#define CAST_TO(S)                                                                                                     \
    switch (dst_dtype) {                                                                                               \
    case OC_BFLOAT16: cast_range(src, S, dst, OC_BFLOAT16, n); break;                                                  \
    case OC_FLOAT16: cast_range(src, S, dst, OC_FLOAT16, n); break;                                                    \
    default: cast_range(src, S, dst, OC_FLOAT32, n); break;                                                            \
    }

static void cast(const void *src, int src_dtype, void *dst, int dst_dtype, int64_t n) {
    switch (src_dtype) {
    case OC_BFLOAT16: CAST_TO(OC_BFLOAT16) break;
    case OC_FLOAT16: CAST_TO(OC_FLOAT16) break;
    default: CAST_TO(OC_FLOAT32) break;
    }
}
