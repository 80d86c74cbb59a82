/* Checks every instruction set's kernels against the scalar oracle, bit for bit, and the thread pool.
 *
 *     test_kernels [--bench | --few] [isa] [update] [formats] [cast] [accumulate] [reduce] [norm] [entry] [stream]
 * [fork] [pool] [bind]
 *
 * Without names, every section runs; with --few, a quarter of the entry points' random calls, or half of them. One
 * randomised body for each kernel is its check and, with --bench, its benchmark (as in dav1d's checkasm), so only code
 * that was checked is timed. Stops at the first failing case and prints it. A NaN equals any NaN; all other values are
 * compared by bits.
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../offload_core.h"
#include "../rules.h"
#include "../sum_squares.h"

#define COUNT(array) ((int64_t)(sizeof(array) / sizeof *(array)))

static const char *const isa_names[] = {"scalar", "avx2", "avx512", "neon"};
static const char *const dtype_names[] = {"float32", "bfloat16", "float16", "none"};
#define RULE_NAME(RULE, ...) #RULE,
static const char *const rule_names[] = {OC_EACH_RULE(RULE_NAME)};

/* --- the present case, and its failure ----------------------------------------------------------- */

enum { GRAD, MASTER, MOMENTS, PARAM = MOMENTS + OC_MOMENTS, ARRAYS };

typedef struct {
    const char *kernel;
    int isa, src_dtype, dst_dtype; /* of an update: of the gradient and of the device parameter */
    int64_t begin, n;
    int offset[ARRAYS]; /* elements past a 64-byte boundary; spans use the first two */
    oc_kind kind;
    int stream, threads;
    oc_scalars scalars;
} test_case;

static test_case now;
static int64_t n_checks;
static int benchmark, few;

static _Noreturn __attribute__((format(printf, 1, 2))) void fail(const char *format, ...) {
    va_list arguments;
    printf("FAILED %s %s: ", isa_names[now.isa], now.kernel);
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n  src %s, dst %s, begin %lld, n %lld, offsets %d %d %d %d %d, stream %d, threads %d, %s, "
           "keep_states %d\n",
           dtype_names[now.src_dtype], dtype_names[now.dst_dtype], (long long)now.begin, (long long)now.n,
           now.offset[0], now.offset[1], now.offset[2], now.offset[3], now.offset[4], now.stream, now.threads,
           rule_names[now.kind.rule], now.kind.keep_states);
    printf("  grad_scale %a, values", now.scalars.grad_scale);
    for (int i = 0; i < OC_SCALARS; i++)
        printf(" %a", now.scalars.values[i]);
    printf("\n");
    exit(1);
}

static void check(int holds, const char *law) {
    if (!holds)
        fail("%s", law);
    n_checks++;
}

/* --- random values ------------------------------------------------------------------------------- */

static uint64_t random_state = 1;

static uint64_t random_bits(void) { /* splitmix64 */
    uint64_t z = random_state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

static int64_t random_below(int64_t n) { return (int64_t)(random_bits() % (uint64_t)n); }

static float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Magnitudes at which formats change: zero, subnormals, limits and rounding ties of fp32, bf16 and fp16. */
static const uint32_t special_magnitudes[] = {
    0x00000000, 0x00000001, 0x00000002, 0x00007fff, 0x00008000, 0x00008001, 0x00010000, 0x007fffff, 0x00800000,
    0x00800001, 0x1a000000, 0x1f800000, 0x20000000, 0x33000000, 0x33000001, 0x33800000, 0x33c00000, 0x387fc000,
    0x387fe000, 0x387fffff, 0x38800000, 0x3effffff, 0x3f000000, 0x3f800000, 0x3f801000, 0x3f803000, 0x3f808000,
    0x3f818000, 0x477fe000, 0x477fefff, 0x477ff000, 0x47800000, 0x5f000000, 0x5f800000, 0x7f7f0000, 0x7f7f7fff,
    0x7f7f8000, 0x7f7fffff, 0x7f800000, 0x7f800001, 0x7fbfffff, 0x7fc00000, 0x7fffffff};

static float ordinary_value(void) { /* +-[2^-15, 2) */
    uint64_t r = random_bits();
    return bits_float((uint32_t)(r & 0x807fffff) | (uint32_t)(112 + (r >> 40) % 16) << 23);
}

static float any_value(void) {
    uint64_t r = random_bits();
    uint32_t sign = (uint32_t)r & 0x80000000;
    switch ((r >> 32) % 8) {
    case 0: return bits_float(sign | special_magnitudes[(r >> 40) % COUNT(special_magnitudes)]);
    case 1:
    case 2: return bits_float((uint32_t)r);
    default: return ordinary_value();
    }
}

static void fill(void *array, int dtype, int64_t n, float value(void)) {
    for (int64_t i = 0; i < n; i++) {
        float x = value();
        oc_scalar_kernels.cast(&x, OC_FLOAT32, (char *)array + i * oc_itemsize(dtype), dtype, 1);
    }
}

/* --- guarded memory, and comparison -------------------------------------------------------------- */

/* Arrays lie between guard bytes, so that a write outside is found. AddressSanitizer's red zones also find reads: with
 * it, no guard follows the last element. */
#if defined(__SANITIZE_ADDRESS__)
enum { BOUNDARY = 64, GUARD = 0xa5, AFTER = 0 };
#else
enum { BOUNDARY = 64, GUARD = 0xa5, AFTER = 64 };
#endif

typedef struct {
    unsigned char *block;
    void *data;
    size_t before, bytes;
} buffer;

static buffer new_buffer(int dtype, int64_t n, int offset) {
    int64_t size = oc_itemsize(dtype);
    buffer b = {.before = BOUNDARY + (size_t)(offset * size), .bytes = (size_t)(n * size)};
    void *block;
    if (posix_memalign(&block, BOUNDARY, b.before + b.bytes + AFTER))
        fail("no memory for %lld elements", (long long)n);
    b.block = memset(block, GUARD, b.before + b.bytes + AFTER);
    b.data = b.block + b.before;
    return b;
}

static buffer copy_of(const void *values, int dtype, int64_t n, int offset) {
    buffer b = new_buffer(dtype, n, offset);
    memcpy(b.data, values, b.bytes);
    return b;
}

static void release(buffer *b, const char *name) {
    for (size_t i = 0; i < b->before + b->bytes + AFTER; i++) {
        int inside = i >= b->before && i < b->before + b->bytes;
        if (!inside && b->block[i] != GUARD)
            fail("wrote %lld bytes from the start of %s, which has %zu", (long long)i - (long long)b->before, name,
                 b->bytes);
    }
    free(b->block);
}

static uint32_t bits_at(const void *array, int dtype, int64_t i) {
    return dtype == OC_FLOAT32 ? ((const uint32_t *)array)[i] : ((const uint16_t *)array)[i];
}

static int is_nan(uint32_t bits, int dtype) {
    switch (dtype) {
    case OC_BFLOAT16: return (bits & 0x7fff) > 0x7f80;
    case OC_FLOAT16: return (bits & 0x7fff) > 0x7c00;
    default: return (bits & 0x7fffffff) > 0x7f800000;
    }
}

static void check_same(const char *name, const void *got, const void *expected, int dtype, int64_t n) {
    if (memcmp(got, expected, (size_t)(n * oc_itemsize(dtype))))
        for (int64_t i = 0; i < n; i++) {
            uint32_t a = bits_at(got, dtype, i), b = bits_at(expected, dtype, i);
            if (a != b && !(is_nan(a, dtype) && is_nan(b, dtype)))
                fail("%s[%lld] is 0x%x, the oracle says 0x%x", name, (long long)i, a, b);
        }
    n_checks++;
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Repeats `call` for a tenth of a second and prints the best of its times; bytes are those moved for each element. */
#define BENCH(bytes, call)                                                                                             \
    do {                                                                                                               \
        double best = 1e9, start = seconds(), before = start, after;                                                   \
        if (!benchmark)                                                                                                \
            break;                                                                                                     \
        for (; before < start + 0.1; before = after) {                                                                 \
            call;                                                                                                      \
            after = seconds();                                                                                         \
            best = after - before < best ? after - before : best;                                                      \
        }                                                                                                              \
        printf("%-7s %-12s %-8s -> %-8s %8.3f ns/element %7.2f GB/s\n", isa_names[now.isa], now.kernel,                \
               dtype_names[now.src_dtype], dtype_names[now.dst_dtype], best / (double)now.n * 1e9,                     \
               (double)now.n * (double)(bytes) / best * 1e-9);                                                         \
    } while (0)

static const oc_kernels *kernels_of(int isa) {
    check(oc_set_isa(isa) == 0, "an instruction set that is supported can be set");
    return oc_current_kernels();
}

/* Calls body with `now.isa` at each supported instruction set; the oracle itself only when timing. */
static void for_each_isa(void body(void)) {
    for (now.isa = 0; now.isa < OC_ISA_COUNT; now.isa++)
        if (oc_isa_supported(now.isa) && (now.isa != OC_SCALAR || benchmark))
            body();
}

/* Both sides of each boundary of a vector, a block of the norm and a chunk of the dispatch. */
static const int64_t lengths[] = {0,  1,  2,  3,  4,  5,  7,    8,    9,    15,    16,    17,
                                  31, 32, 33, 63, 64, 65, 2047, 2048, 2049, 32767, 32768, 32769};
enum { SMALL_LENGTHS = 18 };

static void random_offsets(void) {
    int aligned = random_below(2) == 0;
    for (int i = 0; i < ARRAYS; i++)
        now.offset[i] = aligned ? 0 : (int)random_below(17);
}

/* --- choice of the instruction set --------------------------------------------------------------- */

enum { FIRST_CALLERS = 4 };

typedef struct {
    _Atomic int waiting, wrong;
    int set; /* the first of the callers sets the scalar kernels, instead of asking */
} first_calls;

static void *first_caller(void *context) {
    first_calls *first = context;
    float src = 1, dst = 2;
    oc_span span = {&src, &dst, 1};
    int widest = OC_ISA_COUNT - 1;
    while (!oc_isa_supported(widest))
        widest--;
    int sets = atomic_fetch_add(&first->waiting, 1) == 0 && first->set;
    while (atomic_load(&first->waiting) < FIRST_CALLERS) {
    }
    if (sets)
        oc_set_isa(OC_SCALAR);
    int error = oc_accumulate(&span, 1, OC_FLOAT32, 1), isa = oc_isa();
    int expected = isa == widest ? !sets : isa == OC_SCALAR && first->set;
    if (error || dst != 3 || !expected)
        atomic_store(&first->wrong, 1);
    return NULL;
}

/* True if threads that make their first calls at the same time, in a child without earlier calls, agree, and if one
 * thread's choice stays. */
static int first_calls_agree(int set) {
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        pthread_t threads[FIRST_CALLERS];
        first_calls first = {.set = set};
        alarm(60); /* an endless wait is a failure */
        for (int i = 0; i < FIRST_CALLERS; i++)
            if (pthread_create(threads + i, NULL, first_caller, &first))
                _exit(1);
        for (int i = 0; i < FIRST_CALLERS; i++)
            pthread_join(threads[i], NULL);
        _exit(first.wrong || (set && oc_isa() != OC_SCALAR));
    }
    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

static int child_keeps_isa(int isa) {
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0)
        _exit(oc_isa() != isa || oc_current_kernels()->isa != isa);
    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

static void test_isa(void) {
    now.kernel = "instruction set";
    if (benchmark)
        return;
    for (int i = 0; i < 20; i++) {
        check(first_calls_agree(0), "first calls at once find the widest instruction set");
        check(first_calls_agree(1), "an instruction set that is set while others detect one stays");
    }
    for (int isa = 0; isa < OC_ISA_COUNT; isa++)
        if (oc_isa_supported(isa)) {
            check(oc_set_isa(isa) == 0, "an instruction set that is supported can be set");
            check(oc_isa() == isa && oc_current_kernels()->isa == isa, "the instruction set is the one that was set");
            check(child_keeps_isa(isa), "a child has its parent's instruction set");
        }
}

/* --- updates ------------------------------------------------------------------------------------- */

/* Scalars of a rule, some of which are at the places where its functions branch. */

static oc_scalars adam_scalars(unsigned options, int rule) {
    const double beta1s[] = {0.9, 0.5, 0.0, 0.3}; /* on each side of the branch at 1 - beta1 = 0.5, and on it */
    double lr = 1e-3, beta2 = 0.999, t = 1.0 + (double)random_below(1000), decay = options >> 4 & 1 ? 0.1 : 0;
    double beta1 = beta1s[options >> 3 & 1 ? 1 + random_below(3) : 0];
    double unbias1 = 1 - pow(beta1, t), unbias2 = 1 - pow(beta2, t);
    int torch = rule == OC_ADAM_TORCH, l2 = options >> 1 & 1;
    oc_scalars s = {.update = (int64_t)t};
    s.values[ADAM_L2] = l2 ? decay : 0;
    s.values[ADAM_WEIGHT_DECAY] = l2 ? 0 : decay;
    s.values[ADAM_DECAY] = l2 ? 1 : 1 - lr * decay;
    s.values[ADAM_BETA1] = beta1;
    s.values[ADAM_BETA2] = beta2;
    s.values[ADAM_ONE_MINUS_BETA1] = 1 - beta1;
    s.values[ADAM_ONE_MINUS_BETA2] = 1 - beta2;
    s.values[ADAM_CORRECTION1] = unbias1;
    s.values[ADAM_CORRECTION2] = torch ? sqrt(unbias2) : unbias2;
    s.values[ADAM_EPS] = random_below(2) ? 1e-8 : 1e-40; /* the second is subnormal as a float */
    s.values[ADAM_EPS_ROOT] = random_below(2) ? 1e-12 : 0;
    s.values[ADAM_STEP_SIZE] = torch ? -lr / unbias1 : -lr;
    return s;
}

static oc_scalars sgd_scalars(unsigned options, int rule) {
    oc_scalars s = {.update = 1 + random_below(1000)};
    (void)rule;
    s.values[SGD_LR] = 1e-3;
    s.values[SGD_MOMENTUM] = options >> 3 & 1 ? 0 : random_below(4) ? 0.9 : 1e-40;
    s.values[SGD_ONE_MINUS_DAMPENING] = random_below(2) ? 1 : 0.7;
    s.values[SGD_WEIGHT_DECAY] = options >> 4 & 1 ? 0.1 : 0;
    s.values[SGD_NESTEROV] = options >> 1 & 1;
    s.values[SGD_FIRST] = random_below(4) == 0;
    return s;
}

static oc_scalars lion_scalars(unsigned options, int rule) {
    oc_scalars s = {.update = 1 + random_below(1000)};
    (void)rule;
    s.values[LION_LR] = 1e-3;
    s.values[LION_BETA1] = options >> 3 & 1 ? 0 : 0.9;
    s.values[LION_BETA2] = 0.99;
    s.values[LION_ONE_MINUS_BETA1] = 1 - s.values[LION_BETA1];
    s.values[LION_ONE_MINUS_BETA2] = 1 - s.values[LION_BETA2];
    s.values[LION_WEIGHT_DECAY] = options >> 4 & 1 ? 0.1 : 0;
    return s;
}

static oc_scalars adagrad_scalars(unsigned options, int rule) {
    oc_scalars s = {.update = 1 + random_below(1000)};
    (void)rule;
    s.values[ADAGRAD_LR] = 1e-3;
    s.values[ADAGRAD_EPS] = options >> 3 & 1 ? 0 : random_below(2) ? 1e-10 : 1e-40;
    s.values[ADAGRAD_WEIGHT_DECAY] = options >> 4 & 1 ? 0.1 : 0;
    return s;
}

static oc_scalars muon_scalars(unsigned options, int rule) {
    oc_scalars s = {.update = 1 + random_below(1000)};
    (void)rule;
    s.values[MUON_MOMENTUM] = options >> 3 & 1 ? 0.3 : 0.95; /* below and above one half, where a lerp has two forms */
    s.values[MUON_ONE_MINUS_MOMENTUM] = 1 - s.values[MUON_MOMENTUM];
    s.values[MUON_NESTEROV] = options >> 1 & 1;
    s.values[MUON_ADDS] = options >> 2 & 1;
    s.values[MUON_DECAY] = (options >> 4 & 1 ? 0.999 : 1) - s.values[MUON_ADDS];
    s.values[MUON_STEP_SIZE] = -1e-3;
    return s;
}

static oc_scalars scalars_of(unsigned options, int rule, double grad_scale) {
    oc_scalars s = {0};
    switch (rule) {
#define SCALARS_CASE(RULE, NAME, ...)                                                                                  \
    case RULE: s = NAME##_scalars(options, RULE); break;
        OC_EACH_RULE(SCALARS_CASE)
    }
    s.grad_scale = grad_scale;
    return s;
}

static oc_rounded_scalars rounded(const oc_scalars *scalars) {
    oc_rounded_scalars result = {
        .grad_scale = (float)scalars->grad_scale, .update = (uint64_t)scalars->update, .exact = scalars->values};
    for (int i = 0; i < OC_SCALARS; i++)
        result.values[i] = (float)scalars->values[i];
    return result;
}

static const char *const array_names[] = {"grad", "master", "first moment", "second moment", "param"};

static int array_type(int array) { return array == GRAD ? now.src_dtype : array == PARAM ? now.dst_dtype : OC_FLOAT32; }

/* Moments that the rule lacks are NULL. */
static oc_segment segment_of(const buffer *b, int64_t numel, const oc_scalars *scalars) {
    oc_segment segment = {.grad = b[GRAD].data, .master = b[MASTER].data, .param = b[PARAM].data, .numel = numel};
    for (int k = 0; k < oc_kept_moments(now.kind.rule, scalars->values); k++)
        segment.moments[k] = b[MOMENTS + k].data;
    return segment;
}

/* Two equal sets of arrays of n elements: one for the oracle, one, misaligned, for the kernel. */
static void new_arrays(buffer *expected, buffer *got, int64_t n) {
    for (int i = 0; i < ARRAYS; i++) {
        expected[i] = new_buffer(array_type(i), n, 0);
        if (i != PARAM)
            fill(expected[i].data, array_type(i), n, benchmark ? ordinary_value : any_value);
        if (i >= MOMENTS && i < PARAM && !oc_has_sign(now.kind.rule, i - MOMENTS))
            for (int64_t j = 0; j < n; j++) /* only sometimes a negative one, whose root is NaN */
                if (benchmark || random_below(16))
                    ((float *)expected[i].data)[j] = fabsf(((float *)expected[i].data)[j]);
        got[i] = copy_of(expected[i].data, array_type(i), n, now.offset[i]);
    }
}

static void check_arrays(buffer *expected, buffer *got, int64_t n) {
    for (int i = 0; i < ARRAYS; i++) {
        check_same(array_names[i], got[i].data, expected[i].data, array_type(i), n);
        release(expected + i, array_names[i]);
        release(got + i, array_names[i]);
    }
}

static void check_update(void) {
    int64_t end = now.begin + now.n;
    buffer expected[ARRAYS], got[ARRAYS];
    const oc_kernels *kernels = kernels_of(now.isa);
    new_arrays(expected, got, end);
    oc_segment oracle = segment_of(expected, end, &now.scalars), segment = segment_of(got, end, &now.scalars);
    oc_rounded_scalars scalars = rounded(&now.scalars);
    oc_scalar_kernels.update(&oracle, now.begin, end, &scalars, &now.kind, 0);
    kernels->update(&segment, now.begin, end, &scalars, &now.kind, now.stream);
    check_arrays(expected, got, end);
    if (benchmark) {
        new_arrays(expected, got, end);
        segment = segment_of(got, end, &now.scalars);
        BENCH(8 + 8 * oc_kept_moments(now.kind.rule, now.scalars.values) + oc_itemsize(now.src_dtype) +
                  oc_itemsize(now.dst_dtype),
              kernels->update(&segment, now.begin, end, &scalars, &now.kind, now.stream));
        for (int i = 0; i < ARRAYS; i++) {
            release(expected + i, array_names[i]);
            release(got + i, array_names[i]);
        }
    }
}

static void set_case(unsigned options, int rule, int grad_dtype, int param_dtype) {
    now.src_dtype = grad_dtype;
    now.dst_dtype = param_dtype;
    now.kind = (oc_kind){.grad_dtype = grad_dtype, .param_dtype = param_dtype, .rule = rule};
    now.kind.keep_states = param_dtype != OC_NO_PARAM && options >> 6 & 1;
    now.stream = options >> 2 & 1;
    now.scalars = scalars_of(options, rule, options >> 5 & 1 ? 0.3 : 1);
}

static void test_update(void) {
    if (benchmark) {
        now.n = 1 << 14;
        for (int rule = 0; rule < OC_RULES; rule++)
            for (int dtype = 0; dtype < 3; dtype++) {
                now.kernel = rule_names[rule];
                set_case(0x10, rule, dtype, dtype);
                for_each_isa(check_update);
            }
        return;
    }
    now.kernel = "update";
    for (int rule = 0; rule < OC_RULES; rule++)
        for (unsigned options = 0; options < 128; options += 2) /* the lowest bit is free */
            for (int pair = 0; pair < 12; pair++)
                for (int i = 0; i < COUNT(lengths); i++) {
                    if (i >= SMALL_LENGTHS && random_below(96))
                        continue;
                    set_case(options, rule, pair % 3, pair / 3);
                    random_offsets();
                    now.n = lengths[i];
                    now.begin = now.offset[0] ? random_below(20) : 16 * random_below(2);
                    for_each_isa(check_update);
                }
}

/* --- states in narrow formats -------------------------------------------------------------------- */

/* The arrays of a segment, and their types: a byte is as wide as an OC_FLOAT8. */
enum { HIGH = ARRAYS, TIES, SCALES, FORMAT_ARRAYS = SCALES + OC_MOMENTS };
static const char *const format_names[] = {"grad", "master", "first moment", "second moment", "param",
                                           "high", "ties",   "first scales", "second scales"};

static int format_type(int array) {
    switch (array) {
    case GRAD: return now.kind.grad_dtype;
    case MASTER: return now.kind.master_format;
    case PARAM: return now.kind.param_dtype;
    case HIGH: return OC_BFLOAT16;
    default: return array < PARAM ? now.kind.moment_formats[array - MOMENTS] : OC_FLOAT8;
    }
}

static int64_t format_length(int array, int64_t n) {
    return array == TIES ? (n + 7) / 8 : array >= SCALES ? (n + 255) / 256 : n;
}

/* Any bytes are a state: what they stand for is the same to all instruction sets. But with the scale 254 codes past
 * that of infinity are none, and no update makes one. */
static buffer format_array(int array, int64_t n) {
    int type = format_type(array);
    buffer b = new_buffer(type, format_length(array, n), 0);
    if (type == OC_FLOAT32 || array == GRAD)
        fill(b.data, type, n, any_value);
    else
        for (size_t i = 0; i < b.bytes; i++)
            ((uint8_t *)b.data)[i] =
                (uint8_t)(array >= SCALES && random_below(4) ? 100 + random_below(30) : random_below(256));
    if (array >= SCALES)
        for (size_t i = 0; i < b.bytes; i++)
            ((uint8_t *)b.data)[i] -= ((uint8_t *)b.data)[i] == 254;
    return b;
}

static oc_segment format_segment(const buffer *b, int64_t numel, int64_t start) {
    oc_segment segment = segment_of(b, numel, &now.scalars);
    segment.high = b[HIGH].data;
    segment.ties = b[TIES].data;
    for (int k = 0; k < OC_MOMENTS; k++)
        segment.scales[k] = b[SCALES + k].data;
    segment.start = start;
    segment.seed = 7;
    return segment;
}

static void check_format(void) {
    buffer expected[FORMAT_ARRAYS], got[FORMAT_ARRAYS];
    int blocks = now.kind.moment_formats[0] == OC_FLOAT8 || now.kind.moment_formats[1] == OC_FLOAT8;
    int64_t start = blocks ? now.begin * 256 : now.begin;
    for (int i = 0; i < FORMAT_ARRAYS; i++) {
        expected[i] = format_array(i, now.n);
        got[i] = copy_of(expected[i].data, format_type(i), format_length(i, now.n), now.offset[i % ARRAYS]);
    }
    oc_segment oracle = format_segment(expected, now.n, start), segment = format_segment(got, now.n, start);
    kernels_of(OC_SCALAR);
    int error = oc_update(&oracle, 1, &now.scalars, 1, now.kind, 1);
    kernels_of(now.isa);
    error |= oc_update(&segment, 1, &now.scalars, 1, now.kind, now.threads);
    check(error == 0, "the calls succeed");
    for (int i = 0; i < FORMAT_ARRAYS; i++) {
        int64_t length = format_length(i, now.n);
        if (i <= PARAM && format_type(i) <= OC_FLOAT16)
            check_same(format_names[i], got[i].data, expected[i].data, format_type(i), length);
        else if (memcmp(got[i].data, expected[i].data, expected[i].bytes))
            fail("%s differs from the oracle's", format_names[i]);
        release(expected + i, format_names[i]);
        release(got + i, format_names[i]);
    }
}

static void bench_format(void) {
    buffer b[FORMAT_ARRAYS];
    const oc_kernels *kernels = kernels_of(now.isa);
    for (int i = 0; i < FORMAT_ARRAYS; i++) {
        b[i] = new_buffer(format_type(i), format_length(i, now.n), 0);
        memset(b[i].data, 0, b[i].bytes);
    }
    fill(b[GRAD].data, now.kind.grad_dtype, now.n, ordinary_value);
    oc_segment segment = format_segment(b, now.n, 0);
    oc_rounded_scalars scalars = rounded(&now.scalars);
    BENCH(0, kernels->update(&segment, 0, now.n, &scalars, &now.kind, 0));
    for (int i = 0; i < FORMAT_ARRAYS; i++)
        release(b + i, format_names[i]);
}

static void test_formats(void) {
    static const int masters[] = {OC_FLOAT32, OC_BFLOAT16, OC_SPLIT};
    static const int moments[] = {OC_FLOAT32, OC_BFLOAT16, OC_FLOAT8};
    for (int combination = 0; combination < 27; combination++) {
        static char name[64];
        int master = masters[combination / 9], first = moments[combination / 3 % 3], second = moments[combination % 3];
        snprintf(name, sizeof name, "update %d %d %d", master, first, second);
        now.kernel = name;
        for (int repeat = 0; repeat < (benchmark ? OC_RULES : 300); repeat++) {
            unsigned options = benchmark ? 0x10 : (unsigned)random_below(128);
            set_case(options, repeat % OC_RULES, benchmark ? 1 : (int)random_below(3),
                     benchmark ? 1 : (int)random_below(4));
            now.kind.master_format = master;
            now.kind.moment_formats[0] = first;
            now.kind.moment_formats[1] = second;
            now.begin = random_below(600);
            now.threads = 1 + (int)random_below(3);
            now.n = benchmark ? 1 << 14 : repeat < 280 ? random_below(700) : lengths[random_below(COUNT(lengths))];
            random_offsets();
            for_each_isa(benchmark ? bench_format : check_format);
        }
    }
}

/* --- casts and accumulation ---------------------------------------------------------------------- */

static const void *values; /* the input of the present case */

static void check_cast(void) {
    const oc_kernels *kernels = kernels_of(now.isa);
    buffer src = copy_of(values, now.src_dtype, now.n, now.offset[0]);
    buffer expected = new_buffer(now.dst_dtype, now.n, 0), got = new_buffer(now.dst_dtype, now.n, now.offset[1]);
    oc_scalar_kernels.cast(values, now.src_dtype, expected.data, now.dst_dtype, now.n);
    kernels->cast(src.data, now.src_dtype, got.data, now.dst_dtype, now.n);
    check_same("dst", got.data, expected.data, now.dst_dtype, now.n);
    BENCH(oc_itemsize(now.src_dtype) + oc_itemsize(now.dst_dtype),
          kernels->cast(src.data, now.src_dtype, got.data, now.dst_dtype, now.n));
    release(&src, "src");
    release(&expected, "dst of the oracle");
    release(&got, "dst");
}

static void check_accumulate(void) {
    const oc_kernels *kernels = kernels_of(now.isa);
    buffer src = copy_of(values, now.src_dtype, now.n, now.offset[0]), expected = new_buffer(OC_FLOAT32, now.n, 0);
    fill(expected.data, OC_FLOAT32, now.n, benchmark ? ordinary_value : any_value);
    buffer got = copy_of(expected.data, OC_FLOAT32, now.n, now.offset[1]);
    oc_scalar_kernels.accumulate(values, now.src_dtype, expected.data, now.n);
    kernels->accumulate(src.data, now.src_dtype, got.data, now.n);
    check_same("dst", got.data, expected.data, OC_FLOAT32, now.n);
    BENCH(8 + oc_itemsize(now.src_dtype), kernels->accumulate(src.data, now.src_dtype, got.data, now.n));
    release(&src, "src");
    release(&expected, "dst of the oracle");
    release(&got, "dst");
}

static void check_reduce(void) {
    const oc_kernels *kernels = kernels_of(now.isa);
    int64_t sources = benchmark ? 2 : 1 + random_below(4);
    int add = benchmark ? 1 : (int)random_below(2);
    float divisor = benchmark || random_below(2) ? (float)sources : 1.0f;
    buffer whole = new_buffer(now.src_dtype, sources * now.n, 0), expected = new_buffer(OC_FLOAT32, now.n, 0);
    fill(whole.data, now.src_dtype, sources * now.n, benchmark ? ordinary_value : any_value);
    fill(expected.data, OC_FLOAT32, now.n, benchmark ? ordinary_value : any_value);
    buffer src = copy_of(whole.data, now.src_dtype, sources * now.n, now.offset[0]);
    buffer got = copy_of(expected.data, OC_FLOAT32, now.n, now.offset[1]);
    int64_t cut = random_below(now.n + 1);
    oc_reduction oracle = {whole.data, expected.data, sources, now.n, now.n, divisor, now.src_dtype, add};
    oc_reduction reduction = {src.data, got.data, sources, now.n, now.n, divisor, now.src_dtype, add};
    oc_scalar_kernels.reduce(&oracle, 0, now.n);
    kernels->reduce(&reduction, cut, now.n);
    kernels->reduce(&reduction, 0, cut);
    check_same("dst", got.data, expected.data, OC_FLOAT32, now.n);
    BENCH(8 + sources * oc_itemsize(now.src_dtype), kernels->reduce(&reduction, 0, now.n));
    release(&whole, "all sources");
    release(&src, "src");
    release(&expected, "dst of the oracle");
    release(&got, "dst");
}

static float scratch[32769];

static void spans(const char *kernel, void body(void), int n_dst_dtypes) {
    now.kernel = kernel;
    for (int pair = 0; pair < 3 * n_dst_dtypes; pair++)
        for (int i = benchmark ? COUNT(lengths) - 2 : 0; i < (benchmark ? COUNT(lengths) - 1 : COUNT(lengths)); i++)
            for (int repeat = 0; repeat < (i < SMALL_LENGTHS ? 20 : 2); repeat++) {
                now.src_dtype = pair % 3;
                now.dst_dtype = pair / 3;
                now.n = lengths[i];
                if (!benchmark)
                    random_offsets();
                fill(scratch, now.src_dtype, now.n, benchmark ? ordinary_value : any_value);
                values = scratch;
                for_each_isa(body);
                if (benchmark)
                    break;
            }
}

static void sweep(const uint32_t *patterns, int64_t n) {
    now.kernel = "cast";
    now.src_dtype = OC_FLOAT32;
    now.n = n;
    values = patterns;
    for (now.dst_dtype = OC_BFLOAT16; now.dst_dtype <= OC_FLOAT16; now.dst_dtype++)
        for_each_isa(check_cast);
}

static void test_cast(void) {
    static uint16_t halves[65536];
    static float wide[65536];
    static uint32_t patterns[8192];
    int n = 0;
    spans("cast", check_cast, 3);
    if (benchmark)
        return;
    memset(now.offset, 0, sizeof now.offset);
    for (int i = 0; i < COUNT(halves); i++)
        halves[i] = (uint16_t)i;
    for (int dtype = OC_BFLOAT16; dtype <= OC_FLOAT16; dtype++) {
        now.kernel = "cast";
        now.src_dtype = dtype;
        now.dst_dtype = OC_FLOAT32;
        now.n = COUNT(halves);
        values = halves;
        for_each_isa(check_cast); /* every half */
        oc_scalar_kernels.cast(halves, dtype, wide, OC_FLOAT32, COUNT(halves));
        for (int i = 0; i < COUNT(halves); i++) { /* and back to itself, and five floats round each tie above it */
            uint32_t bits = float_bits(wide[i]);
            uint16_t back;
            oc_scalar_kernels.cast(wide + i, OC_FLOAT32, &back, dtype, 1);
            if (back != i && !(is_nan(back, dtype) && is_nan(bits, OC_FLOAT32)))
                fail("0x%x -> 0x%x -> 0x%x: a half in fp32 casts back to itself", (unsigned)i, bits, back);
            float next = i + 1 < COUNT(halves) ? wide[i + 1] : wide[i];
            uint32_t tie = float_bits((float)(((double)wide[i] + (double)next) / 2));
            for (uint32_t around = tie - 2; around != tie + 3; around++)
                patterns[n++] = around;
            if (n > COUNT(patterns) - 5 || i == COUNT(halves) - 1) {
                int src_dtype = now.src_dtype, dst_dtype = now.dst_dtype;
                sweep(patterns, n);
                now.src_dtype = src_dtype;
                now.dst_dtype = dst_dtype;
                n = 0;
            }
        }
    }
    for (uint64_t bits = 0; bits >> 32 == 0; bits += 997) { /* one in 997 of all floats */
        patterns[n++] = (uint32_t)bits;
        if (n == COUNT(patterns) || (bits + 997) >> 32) {
            sweep(patterns, n);
            n = 0;
        }
    }
}

/* --- sum of squares ------------------------------------------------------------------------------ */

/* The sum in bins as canonical digits, and true if it is not finite. */
typedef struct {
    int64_t digits[OC_NORM_DIGITS];
    int nonfinite;
} total;

static total total_of(const int64_t *bins) {
    total t = {.nonfinite = bins[OC_NORM_NONFINITE] != 0};
    int64_t carry = 0;
    for (int k = 0; k < OC_NORM_DIGITS && !t.nonfinite; k++) {
        carry += bins[k];
        t.digits[k] = k < OC_NORM_DIGITS - 1 ? carry & 0xffffffff : carry;
        carry >>= 32;
    }
    return t;
}

static void check_total(const char *what, const int64_t *got_bins, const int64_t *expected_bins) {
    total got = total_of(got_bins), expected = total_of(expected_bins);
    if (got.nonfinite != expected.nonfinite)
        fail("%s: nonfinite is %d, the oracle says %d", what, got.nonfinite, expected.nonfinite);
    for (int k = OC_NORM_DIGITS - 1; k >= 0; k--)
        if (got.digits[k] != expected.digits[k])
            fail("%s: digit %d of the sum is %lld, the oracle says %lld", what, k, (long long)got.digits[k],
                 (long long)expected.digits[k]);
    n_checks++;
}

static void check_norm(void) {
    const oc_kernels *kernels = kernels_of(now.isa);
    int64_t expected[OC_NORM_BINS] = {0}, whole[OC_NORM_BINS] = {0}, parts[OC_NORM_BINS] = {0};
    int64_t size = oc_itemsize(now.src_dtype), cut = random_below(now.n + 1);
    buffer src = copy_of(values, now.src_dtype, now.n, now.offset[0]);
    oc_scalar_kernels.sum_squares(values, now.src_dtype, now.n, expected);
    kernels->sum_squares(src.data, now.src_dtype, now.n, whole);
    check_total("whole", whole, expected);
    kernels->sum_squares((const char *)src.data + cut * size, now.src_dtype, now.n - cut, parts);
    kernels->sum_squares(src.data, now.src_dtype, cut, parts);
    check_total("cut, last part first", parts, expected);
    BENCH(size, kernels->sum_squares(src.data, now.src_dtype, now.n, whole));
    release(&src, "src");
}

static float zero_value(void) { return 0; }
static float largest_value(void) { return bits_float(0x7f7fffff); }
static float subnormal_value(void) { return bits_float((uint32_t)random_bits() & 0x807fffff); }
static float finite_value(void) { /* every exponent alike */
    uint32_t bits = (uint32_t)random_bits();
    return bits_float((bits & 0x7f800000) == 0x7f800000 ? bits ^ 0x40000000 : bits);
}
static int window_shift;
static float window_value(void) { /* exponents within 20 of one that moves with the case: both paths are mixed */
    uint32_t exponent = (uint32_t)(window_shift + random_below(20));
    return bits_float(((uint32_t)random_bits() & 0x807fffff) | exponent << 23);
}
static float gaussian_value(void) { /* as gradients are spread; scaled by the case */
    double sum = 0;
    for (int i = 0; i < 12; i++)
        sum += (double)random_bits() * 0x1p-64;
    return (float)ldexp(sum - 6, window_shift - 127);
}

static void test_norm(void) {
    static float (*const spreads[])(void) = {finite_value,    window_value,  window_value, ordinary_value,
                                             subnormal_value, largest_value, zero_value,   any_value};
    now.kernel = "sum_squares";
    now.dst_dtype = OC_NO_PARAM;
    values = scratch;
    if (benchmark) {
        now.n = 32768;
        for (window_shift = 107; window_shift <= 131; window_shift += 6) { /* the top window's place moves */
            printf("sigma 2^%d\n", window_shift - 127);
            for (now.src_dtype = 0; now.src_dtype < 3; now.src_dtype++) {
                fill(scratch, now.src_dtype, now.n, gaussian_value);
                for_each_isa(check_norm);
            }
        }
        return;
    }
    for (now.src_dtype = 0; now.src_dtype < 3; now.src_dtype++)
        for (int spread = 0; spread < COUNT(spreads); spread++)
            for (int i = 0; i < COUNT(lengths); i++)
                for (int repeat = 0; repeat < (i < SMALL_LENGTHS ? 20 : 2); repeat++) {
                    now.n = lengths[i];
                    window_shift = (int)random_below(235);
                    random_offsets();
                    fill(scratch, now.src_dtype, now.n, spreads[spread]);
                    for_each_isa(check_norm);
                }
    now.src_dtype = OC_FLOAT32;
    for (now.n = 1; now.n <= 67; now.n++) /* an inf and a NaN at every place */
        for (int64_t i = 0; i < now.n; i++) {
            fill(scratch, OC_FLOAT32, now.n, ordinary_value);
            scratch[i] = bits_float(i % 2 ? 0x7f800000 : 0xffc00000);
            for_each_isa(check_norm);
        }
}

/* --- control word -------------------------------------------------------------------------------- */

#if defined(__x86_64__)
#include <xmmintrin.h>
/* Flush to zero, subnormals are zero, round towards zero, all exceptions masked. */
static const uint64_t hostile_control = 0xffc0;
static const uint64_t ieee_control = 0x1f80;
static uint64_t control(void) { return _mm_getcsr(); }
static void set_control(uint64_t word) { _mm_setcsr((unsigned)word); }
#else
static const uint64_t hostile_control = 1 << 24 | 3 << 22;
static const uint64_t ieee_control = 0;
static uint64_t control(void) {
    uint64_t word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    return word;
}
static void set_control(uint64_t word) { __asm__ volatile("msr fpcr, %0" ::"r"(word)); }
#endif

/* Makes `call` with the hostile control word: results must not change, nor the word. */
#define WITH_HOSTILE_CONTROL(call)                                                                                     \
    do {                                                                                                               \
        uint64_t before = control();                                                                                   \
        set_control(hostile_control);                                                                                  \
        int error = (call);                                                                                            \
        uint64_t after = control();                                                                                    \
        set_control(before);                                                                                           \
        check(error == 0, "the call succeeds");                                                                        \
        check(after == hostile_control, "the caller's control word is restored");                                      \
    } while (0)

/* --- entry points -------------------------------------------------------------------------------- */

enum { RUNS = 4 };
static const int64_t run_lengths[] = {0, 1, 17, 2049, 32767, 32768, 32769, 70001};
static const int thread_counts[] = {-1, 1, 2, 3, 9};

static void entry_update(void) {
    now.kernel = "oc_update";
    for (int repeat = 0; repeat < (few ? 2 : 8) * OC_RULES; repeat++) {
        buffer expected[RUNS][ARRAYS], got[RUNS][ARRAYS];
        oc_segment segments[RUNS];
        oc_scalars scalars[RUNS];
        set_case((unsigned)random_below(128), repeat % OC_RULES, (int)random_below(3), (int)random_below(4));
        now.threads = thread_counts[repeat % COUNT(thread_counts)];
        for (int i = 0; i < RUNS; i++) {
            random_offsets();
            now.n = run_lengths[random_below(COUNT(run_lengths))];
            scalars[i] = scalars_of((unsigned)random_below(128), now.kind.rule, i % 2 ? 0.5 : 1e-40);
            oc_rounded_scalars floats = rounded(scalars + i);
            new_arrays(expected[i], got[i], now.n);
            segments[i] = segment_of(expected[i], now.n, scalars + i);
            oc_scalar_kernels.update(segments + i, 0, now.n, &floats, &now.kind, 0);
            segments[i] = segment_of(got[i], now.n, scalars + i);
            segments[i].scalars = i;
        }
        kernels_of(now.isa);
        WITH_HOSTILE_CONTROL(oc_update(segments, RUNS, scalars, RUNS, now.kind, now.threads));
        for (int i = 0; i < RUNS; i++)
            check_arrays(expected[i], got[i], segments[i].numel);
    }
}

/* A call large enough for streaming stores, made of one small run many times: on one thread, as many steps. */
static void check_streaming(void) {
    enum { N = 32768 + 1, TIMES = (8 << 20) / N + 1 };
    static oc_segment segments[TIMES];
    buffer expected[ARRAYS], got[ARRAYS];
    now.kernel = "oc_update, streaming";
    now.n = N;
    now.threads = 1;
    for (int param_dtype = 0; param_dtype < 3; param_dtype++) {
        set_case(0x30, param_dtype % 2 ? OC_SGD_TORCH : OC_ADAM_TORCH, OC_BFLOAT16, param_dtype);
        memset(now.offset, 0, sizeof now.offset);
        new_arrays(expected, got, N);
        oc_segment oracle = segment_of(expected, N, &now.scalars);
        oc_rounded_scalars scalars = rounded(&now.scalars);
        for (int i = 0; i < TIMES; i++) {
            oc_scalar_kernels.update(&oracle, 0, N, &scalars, &now.kind, 0);
            segments[i] = segment_of(got, N, &now.scalars);
        }
        kernels_of(now.isa);
        WITH_HOSTILE_CONTROL(oc_update(segments, TIMES, &now.scalars, 1, now.kind, 1));
        check_arrays(expected, got, N);
    }
}

static void entry_spans(void) {
    for (int repeat = 0; repeat < (few ? 9 : 18); repeat++) {
        buffer src[RUNS], cast[RUNS], cast_expected[RUNS], sum[RUNS], sum_expected[RUNS];
        oc_span casts[RUNS], sums[RUNS];
        int64_t expected_bins[OC_NORM_BINS] = {0}, bins[OC_NORM_BINS] = {0}, chunks = 0;
        now.threads = thread_counts[repeat % COUNT(thread_counts)];
        now.src_dtype = repeat % 3;
        now.dst_dtype = repeat / 3 % 3;
        for (int i = 0; i < RUNS; i++) {
            random_offsets();
            now.n = run_lengths[random_below(COUNT(run_lengths))];
            src[i] = new_buffer(now.src_dtype, now.n, now.offset[0]);
            fill(src[i].data, now.src_dtype, now.n, finite_value);
            if (now.src_dtype == OC_FLOAT16) /* few random floats are finite halves */
                fill(src[i].data, now.src_dtype, now.n, ordinary_value);
            cast_expected[i] = new_buffer(now.dst_dtype, now.n, 0);
            cast[i] = new_buffer(now.dst_dtype, now.n, now.offset[1]);
            oc_scalar_kernels.cast(src[i].data, now.src_dtype, cast_expected[i].data, now.dst_dtype, now.n);
            sum_expected[i] = new_buffer(OC_FLOAT32, now.n, 0);
            fill(sum_expected[i].data, OC_FLOAT32, now.n, any_value);
            sum[i] = copy_of(sum_expected[i].data, OC_FLOAT32, now.n, now.offset[2]);
            oc_scalar_kernels.accumulate(src[i].data, now.src_dtype, sum_expected[i].data, now.n);
            oc_scalar_kernels.sum_squares(src[i].data, now.src_dtype, now.n, expected_bins);
            casts[i] = (oc_span){src[i].data, cast[i].data, now.n};
            sums[i] = (oc_span){src[i].data, sum[i].data, now.n};
            chunks += (now.n + 32767) / 32768;
        }
        kernels_of(now.isa);
        now.kernel = "oc_cast";
        WITH_HOSTILE_CONTROL(oc_cast(casts, RUNS, now.src_dtype, now.dst_dtype, now.threads));
        now.kernel = "oc_accumulate";
        WITH_HOSTILE_CONTROL(oc_accumulate(sums, RUNS, now.src_dtype, now.threads));
        now.kernel = "oc_sum_squares";
        WITH_HOSTILE_CONTROL(oc_sum_squares(sums, 1, now.src_dtype, bins, now.threads));
        WITH_HOSTILE_CONTROL(oc_sum_squares(sums + 1, RUNS - 1, now.src_dtype, bins, now.threads)); /* goes on */
        check_total("bins", bins, expected_bins);
        for (int k = 0; k < OC_NORM_DIGITS - 1; k++) /* so no number of elements overflows a digit */
            check(bins[k] >= 0 && bins[k] >> 32 < chunks + !chunks, "a chunk adds less than 2^32 to a low digit");
        for (int i = 0; i < RUNS; i++) {
            check_same("cast", cast[i].data, cast_expected[i].data, now.dst_dtype, casts[i].numel);
            check_same("sum", sum[i].data, sum_expected[i].data, OC_FLOAT32, casts[i].numel);
            release(src + i, "src");
            release(cast + i, "cast");
            release(cast_expected + i, "cast of the oracle");
            release(sum + i, "sum");
            release(sum_expected + i, "sum of the oracle");
        }
    }
}

static void entry_reduce(void) {
    enum { SOURCES = 3, APART = 5 }; /* elements between two sources, which are not summed */
    now.kernel = "oc_reduce";
    for (int repeat = 0; repeat < (few ? 4 : 16); repeat++) {
        now.threads = thread_counts[repeat % COUNT(thread_counts)];
        now.src_dtype = repeat % 3;
        now.n = run_lengths[repeat % COUNT(run_lengths)];
        random_offsets();
        int64_t stride = now.n + APART, n_src = (SOURCES - 1) * stride + now.n;
        buffer src = new_buffer(now.src_dtype, n_src, now.offset[0]);
        buffer expected = new_buffer(OC_FLOAT32, now.n, 0);
        fill(src.data, now.src_dtype, n_src, any_value);
        fill(expected.data, OC_FLOAT32, now.n, any_value);
        buffer got = copy_of(expected.data, OC_FLOAT32, now.n, now.offset[1]);
        oc_reduction reduction = {src.data, expected.data, SOURCES, stride, now.n, 3, now.src_dtype, repeat & 1};
        oc_scalar_kernels.reduce(&reduction, 0, now.n);
        reduction.dst = got.data;
        kernels_of(now.isa);
        WITH_HOSTILE_CONTROL(oc_reduce(&reduction, now.threads));
        check_same("dst", got.data, expected.data, OC_FLOAT32, now.n);
        release(&src, "src");
        release(&expected, "dst of the oracle");
        release(&got, "dst");
    }
}

/* n elements in two runs, on two threads, through every entry point that takes runs. */
static void call_on_two_runs(int64_t n_elements) {
    static float src[32769], sum[32769], first[32769], second[32769], param[32769];
    int64_t bins[OC_NORM_BINS] = {0}, half = n_elements / 2, rest = n_elements - half;
    oc_span sums[] = {{src, sum, half}, {src + half, sum + half, rest}};
    oc_span casts[] = {{src, param, half}, {src + half, param + half, rest}};
    oc_segment segments[] = {
        {.grad = src, .master = sum, .moments = {first, second}, .param = param, .numel = half},
        {.grad = src + half,
         .master = sum + half,
         .moments = {first + half, second + half},
         .param = param + half,
         .numel = rest},
    };
    oc_scalars scalars = scalars_of(0, OC_ADAM_TORCH, 1);
    int error = oc_update(segments, 2, &scalars, 1, (oc_kind){0}, 2) | oc_cast(casts, 2, 0, 0, 2) |
                oc_accumulate(sums, 2, 0, 2) | oc_sum_squares(sums, 2, 0, bins, 2);
    check(error == 0, "the calls succeed");
}

static void entry_small_calls(void) {
    now.kernel = "small calls";
    int workers = oc_pool_workers();
    call_on_two_runs(32);
    call_on_two_runs(32768);
    check(oc_pool_workers() == workers, "a chunk's elements in two runs wake no worker");
    call_on_two_runs(32769);
    check(oc_pool_workers() > 0, "one element more wakes one");
}

static void entry_refusals(void) {
    float x[4] = {1, 2, 3, 4};
    int64_t bins[OC_NORM_BINS] = {0};
    const oc_kind kind = {0};
    oc_kind bad_kind[] = {{.grad_dtype = OC_NO_PARAM},
                          {.grad_dtype = -1},
                          {.param_dtype = 4},
                          {.rule = OC_RULES},
                          {.rule = -1},
                          {.keep_states = 2},
                          {.keep_states = -1},
                          {.param_dtype = OC_NO_PARAM, .keep_states = 1},
                          {.master_format = OC_FLOAT16},
                          {.master_format = OC_FLOAT8},
                          {.moment_formats = {OC_SPLIT}},
                          {.moment_formats = {0, OC_NO_PARAM}}};
    oc_segment good = {.grad = x, .master = x + 1, .moments = {x + 2, x + 3}, .param = x, .numel = 1}, bad[8];
    oc_span span = {x, x + 1, 1}, no_src = {NULL, x, 1}, no_dst = {x, NULL, 1}, negative = {x, x + 1, -1};
    oc_scalars scalars = {0}, with_momentum = {.values = {[SGD_MOMENTUM] = 0.9}};
    const oc_reduction sum = {x, x + 2, 2, 1, 1, 1, 0, 0};
    oc_reduction bad_sum[] = {sum, sum, sum, sum, sum, sum};
    bad_sum[0].src = bad_sum[1].dst = NULL;
    bad_sum[2].n_sources = bad_sum[3].stride = 0;
    bad_sum[4].numel = -1;
    bad_sum[5].dtype = OC_NO_PARAM;
    now.kernel = "refusals";
    for (int i = 0; i < COUNT(bad); i++)
        bad[i] = good;
    bad[0].grad = bad[1].master = bad[2].moments[0] = bad[3].moments[1] = bad[4].param = NULL;
    bad[5].numel = bad[6].scalars = bad[7].start = -1;
    for (int i = 0; i < COUNT(bad); i++)
        check(oc_update(bad + i, 1, &scalars, 1, kind, 1) == OC_EARGUMENT, "a bad segment is refused");
    for (int i = 0; i < COUNT(bad_kind); i++)
        check(oc_update(&good, 1, &scalars, 1, bad_kind[i], 1) == OC_EARGUMENT, "a bad kind is refused");
    for (int rule = OC_SGD_TORCH; rule <= OC_SGD_OPTAX; rule++)
        check(oc_update(bad + 2, 1, &with_momentum, 1, (oc_kind){.rule = rule}, 1) == OC_EARGUMENT,
              "momentum without a moment is refused");
    check(oc_update(&good, -1, &scalars, 1, kind, 1) == OC_EARGUMENT, "a negative count is refused");
    check(oc_update(&good, 1, &scalars, 0, kind, 1) == OC_EARGUMENT, "scalars that are not there are refused");
    check(oc_update(NULL, 0, NULL, 0, kind, 1) == 0, "no segments is no work");
    check(oc_cast(&no_src, 1, 0, 0, 1) == OC_EARGUMENT, "a null source is refused");
    check(oc_sum_squares(&no_src, 1, 0, bins, 1) == OC_EARGUMENT, "a null source is refused");
    check(oc_cast(&no_dst, 1, 0, 0, 1) == OC_EARGUMENT, "a null destination is refused");
    check(oc_accumulate(&no_dst, 1, 0, 1) == OC_EARGUMENT, "a null destination is refused");
    check(oc_cast(&negative, 1, 0, 0, 1) == OC_EARGUMENT, "a negative length is refused");
    check(oc_cast(&span, -1, 0, 0, 1) == OC_EARGUMENT, "a negative count is refused");
    check(oc_cast(&span, 1, 3, 0, 1) == OC_EARGUMENT, "an unknown source type is refused");
    check(oc_cast(&span, 1, 0, 3, 1) == OC_EARGUMENT, "an unknown destination type is refused");
    check(oc_sum_squares(&no_dst, 1, 0, bins, 1) == 0, "a sum of squares needs no destination");
    for (int i = 0; i < COUNT(bad_sum); i++)
        check(oc_reduce(bad_sum + i, 1) == OC_EARGUMENT, "a bad reduction is refused");
    check(oc_first_touch(NULL, 1, 1) == OC_EARGUMENT && oc_first_touch(x, -1, 1) == OC_EARGUMENT,
          "first touch refuses no memory");
    check(oc_set_isa(OC_ISA_COUNT) == OC_EUNSUPPORTED && oc_set_isa(-1) == OC_EUNSUPPORTED && !oc_isa_supported(-1),
          "an unknown instruction set is refused");
    check(x[0] == 1 && x[1] == 2 && x[2] == 3 && x[3] == 4, "a refused call writes nothing");
}

static void entry_first_touch(void) {
    const int64_t sizes[] = {0, 1, 4096, 4097, (2 << 20) - 1, 2 << 20, (2 << 20) + 1};
    now.kernel = "oc_first_touch";
    for (int i = 0; i < COUNT(sizes); i++) {
        unsigned char *memory = malloc((size_t)sizes[i] + 1);
        memset(memory, 1, (size_t)sizes[i] + 1);
        check(oc_first_touch(memory, sizes[i], 2) == 0, "first touch succeeds");
        for (int64_t j = 0; j <= sizes[i]; j++)
            if (memory[j] != (j == sizes[i] || j % 4096))
                fail("byte %lld of %lld: one a page is touched, none past the end", (long long)j, (long long)sizes[i]);
        free(memory);
    }
}

/* A call on few elements measures the overhead around the kernel; it asks for more threads than are useful. */
static void bench_small_call(void) {
    enum { N = 16, CALLS = 1000 };
    float dst[N];
    uint16_t src[N];
    oc_span span = {src, dst, N};
    double best = 1e9;
    int error = 0;
    now.kernel = "oc_accumulate";
    fill(src, OC_BFLOAT16, N, ordinary_value);
    fill(dst, OC_FLOAT32, N, ordinary_value);
    kernels_of(now.isa);
    for (int repeat = 0; repeat < 200; repeat++) {
        double start = seconds();
        for (int i = 0; i < CALLS; i++)
            error |= oc_accumulate(&span, 1, OC_BFLOAT16, 8);
        double each = (seconds() - start) / CALLS;
        best = each < best ? each : best;
    }
    check(error == 0, "the calls succeed");
    printf("%-7s %s of %d elements %8.1f ns a call\n", isa_names[now.isa], now.kernel, N, best * 1e9);
}

static void test_entry(void) {
    if (benchmark) {
        for_each_isa(bench_small_call);
        return;
    }
    entry_small_calls(); /* first, because the pool keeps the workers of all calls */
    for (now.isa = 0; now.isa < OC_ISA_COUNT; now.isa++)
        if (oc_isa_supported(now.isa)) {
            entry_update();
            entry_spans();
            entry_reduce();
        }
    now.isa = OC_SCALAR;
    entry_refusals();
    entry_first_touch();
}

static void test_stream(void) {
    if (!benchmark)
        for_each_isa(check_streaming);
}

/* --- pool ---------------------------------------------------------------------------------------- */

enum { MAX_ITEMS = 1000, CALLERS = 6 };

typedef struct {
    _Atomic int visits[MAX_ITEMS];
    _Atomic int wrong_control;
} visits;

static void visit(void *context, int64_t item) {
    visits *v = context;
    atomic_fetch_add_explicit(&v->visits[item], 1, memory_order_relaxed);
    if (control() != ieee_control)
        atomic_store(&v->wrong_control, 1);
}

/* True if one job visits every item once with the right control word, and keeps the caller's word. */
static int job_is_whole(int64_t n_items, int threads) {
    visits v = {.wrong_control = 0};
    set_control(hostile_control);
    oc_parallel_for(visit, &v, n_items, threads);
    int holds = control() == hostile_control;
    set_control(ieee_control);
    for (int i = 0; i < MAX_ITEMS; i++)
        holds = holds && v.visits[i] == (i < n_items);
    return holds && !v.wrong_control;
}

static void *caller(void *whole) {
    for (int i = 0; i < 100; i++)
        if (!job_is_whole(i * 37 % MAX_ITEMS, 1 + i % 9))
            atomic_store((_Atomic int *)whole, 0);
    return NULL;
}

/* True if the jobs of many callers are complete, and `meanwhile` returns true. */
static int callers_are_whole(int meanwhile(void)) {
    pthread_t callers[CALLERS];
    _Atomic int whole = 1;
    for (int i = 0; i < CALLERS; i++)
        check(pthread_create(callers + i, NULL, caller, &whole) == 0, "a thread starts");
    int holds = !meanwhile || meanwhile();
    for (int i = 0; i < CALLERS; i++)
        pthread_join(callers[i], NULL);
    return holds && whole;
}

static void test_pool(void) {
    const int64_t items[] = {0, 1, 2, 3, 8, 9, 10, 100, MAX_ITEMS};
    now.kernel = "pool";
    if (benchmark)
        return;
    for (int repeat = 0; repeat < 10; repeat++)
        for (int i = 0; i < COUNT(items); i++)
            for (now.threads = -1; now.threads <= 9; now.threads++)
                check(job_is_whole(now.n = items[i], now.threads), "every item is visited once, in IEEE mode");
    check(oc_pool_workers() == 8, "9 threads are the caller and 8 workers, which stay");
    check(callers_are_whole(NULL), "jobs of many callers at once are each whole");
    check(job_is_whole(MAX_ITEMS, 1 << 20), "a thread count past the limit is cut to it");
}

#if defined(__linux__)
/* What the threads of one job have seen of themselves. */
typedef struct {
    pthread_t caller;
    cpu_set_t expected;
    _Atomic int by_caller, elsewhere;
} places;

static void note_place(void *context, int64_t item) {
    places *p = context;
    cpu_set_t own;
    (void)item;
    pthread_getaffinity_np(pthread_self(), sizeof own, &own);
    if (pthread_equal(pthread_self(), p->caller))
        atomic_fetch_add(&p->by_caller, 1);
    else if (!CPU_EQUAL(&own, &p->expected))
        atomic_fetch_add(&p->elsewhere, 1);
}

/* How many items of a job the caller has done; -1 if another thread was bound otherwise than expected. */
static int done_by_caller(const cpu_set_t *expected, int64_t n_items, int threads) {
    places p = {.caller = pthread_self(), .expected = *expected};
    oc_parallel_for(note_place, &p, n_items, threads);
    return p.elsewhere ? -1 : p.by_caller;
}

static void bind_to(const cpu_set_t *set) {
    int32_t cpus[CPU_SETSIZE], n = 0;
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, set))
            cpus[n++] = i;
    check(oc_bind_workers(cpus, n) == 0, "workers are bound");
}

static void test_bind(void) {
    enum { ITEMS = 200 };
    cpu_set_t all, one, after;
    int32_t first = 0, no_such[] = {-1}, too_high[] = {CPU_SETSIZE, 1 << 30}, offline[] = {CPU_SETSIZE - 1};
    now.kernel = "bind";
    if (benchmark)
        return;
    pthread_getaffinity_np(pthread_self(), sizeof all, &all);
    while (!CPU_ISSET(first, &all))
        first++;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    check(oc_bind_workers(NULL, 1) == OC_EARGUMENT && oc_bind_workers(&first, 0) == OC_EARGUMENT, "a set is not empty");
    check(oc_bind_workers(no_such, 1) == OC_EARGUMENT, "a processor's number is not negative");
    check(oc_bind_workers(too_high, 2) == 0, "numbers past the set's type are left out");
    check(done_by_caller(&all, ITEMS, 3) >= 0, "workers that are not bound run where their maker may");
    if (CPU_COUNT(&all) > 1) {
        bind_to(&one);
        check(done_by_caller(&one, ITEMS, 6) == 0,
              "workers, also earlier ones, do a job without a caller from elsewhere");
        check(done_by_caller(&one, ITEMS, 1) == 0, "so does one worker");
        check(done_by_caller(&one, 1, 6) == 1, "one item is the caller's");
        pthread_getaffinity_np(pthread_self(), sizeof after, &after);
        check(CPU_EQUAL(&all, &after), "the caller is not bound");
        check(job_is_whole(MAX_ITEMS, 4), "every item is visited once, in IEEE mode");
        check(callers_are_whole(NULL), "jobs of many callers at once are each whole");
        pthread_setaffinity_np(pthread_self(), sizeof one, &one);
        check(done_by_caller(&one, ITEMS, 1) == ITEMS, "a caller that runs where the workers do takes part");
        pthread_setaffinity_np(pthread_self(), sizeof all, &all);
    }
    if (!CPU_ISSET(CPU_SETSIZE - 1, &all)) {
        check(oc_bind_workers(offline, 1) == 0, "a processor may be offline");
        check(job_is_whole(MAX_ITEMS, 9), "every item is visited once, in IEEE mode");
    }
    bind_to(&all);
    check(done_by_caller(&all, ITEMS, 4) >= 0, "workers are bound anew");
    check(done_by_caller(&all, ITEMS, 1) == ITEMS, "a caller that runs where the workers do takes part");
}
#else
static void test_bind(void) {}
#endif

static int child_is_whole(void) {
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) { /* a fork copies no workers; the child makes its own */
        alarm(60);    /* a deadlock is a failure, not a wait */
        int holds = oc_pool_workers() == 0 && job_is_whole(MAX_ITEMS, 4) && oc_pool_workers() == 3;
        _exit(holds ? 0 : 1);
    }
    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

static void test_fork(void) {
    now.kernel = "fork";
    if (benchmark)
        return;
    check(child_is_whole(), "a child of a process without a pool has a pool of its own");
    check(job_is_whole(MAX_ITEMS, 9), "every item is visited once, in IEEE mode");
    check(child_is_whole(), "a child of an idle pool has a pool of its own");
    for (int i = 0; i < 5; i++)
        check(callers_are_whole(child_is_whole), "a child of a busy pool has a pool of its own");
#if defined(__linux__)
    int32_t first[] = {0};
    cpu_set_t all;
    pthread_getaffinity_np(pthread_self(), sizeof all, &all);
    check(oc_bind_workers(first, 1) == 0, "workers are bound");
    check(child_is_whole(), "a child's workers are not bound, so that its caller takes part");
    bind_to(&all);
#endif
}

/* --- main ---------------------------------------------------------------------------------------- */

static void test_accumulate(void) { spans("accumulate", check_accumulate, 1); }
static void test_reduce(void) { spans("reduce", check_reduce, 1); }

/* The instruction set comes first, because it is detected once in a process. The pool and its binding come last,
 * because its 255 workers slow everything after it. */
static const struct {
    const char *name;
    void (*run)(void);
} sections[] = {{"isa", test_isa},
                {"update", test_update},
                {"formats", test_formats},
                {"cast", test_cast},
                {"accumulate", test_accumulate},
                {"reduce", test_reduce},
                {"norm", test_norm},
                {"entry", test_entry},
                {"stream", test_stream},
                {"fork", test_fork},
                {"pool", test_pool},
                {"bind", test_bind}};

int main(int argc, char **argv) {
    int first = 1, named = 0;
    if (argc > 1 && !strcmp(argv[1], "--bench"))
        benchmark = first = 2;
    else if (argc > 1 && !strcmp(argv[1], "--few"))
        few = first = 2;
    for (int i = 0; i < COUNT(sections); i++) {
        int wanted = argc == first;
        for (int j = first; j < argc; j++)
            wanted |= !strcmp(argv[j], sections[i].name);
        if (!wanted)
            continue;
        memset(&now, 0, sizeof now);
        sections[i].run();
        named++;
    }
    if (!named || named < argc - first) {
        fprintf(stderr, "usage: %s [--bench | --few]", argv[0]);
        for (int i = 0; i < COUNT(sections); i++)
            fprintf(stderr, " [%s]", sections[i].name);
        fprintf(stderr, "\n");
        return 2;
    }
    printf("%lld checks passed\n", (long long)n_checks);
    return 0;
}
