/* The C library's interface to Python.
 *
 * This file is read by the C compiler (through offload_core.h) and, word for word, by cffi
 * (offload_core/native/_ffi_build.py), so it holds plain declarations only: no preprocessor lines.
 * Functions return 0, or one of the OC_E codes; they never print and never exit.
 */

/* Element types; offload_core/dtypes.py has the same codes. OC_NO_PARAM: no device parameter output. */
enum { OC_FLOAT32 = 0, OC_BFLOAT16 = 1, OC_FLOAT16 = 2, OC_NO_PARAM = 3 };

/* Formats of states beside OC_FLOAT32 and OC_BFLOAT16 (docs/numerics.md). OC_FLOAT8, of moments: a byte an element, and
 * a byte of scale for every 256. OC_SPLIT, of masters: the lower 16 bits; the bf16 parameter and a bit an element say
 * the upper ones. */
enum { OC_FLOAT8 = 4, OC_SPLIT = 5 };

/* Elements that have one scale, or one key of random bits. */
enum { OC_STATE_BLOCK = 256 };

/* Blocks of OC_STATE_BLOCK elements that a group of a device's threads goes through (device.h), and of a sum of
 * squares. */
enum { OC_GROUP_BLOCKS = 8, OC_SUM_BLOCKS = 64 };

/* Update rules, each with the rounding of one library (docs/numerics.md). c_src/rules.h has what each consists of. */
enum {
    OC_ADAM_TORCH = 0,
    OC_ADAM_OPTAX = 1,
    OC_SGD_TORCH = 2,
    OC_SGD_OPTAX = 3,
    OC_LION = 4,
    OC_ADAGRAD_TORCH = 5,
    OC_ADAGRAD_OPTAX = 6,
    OC_MUON_DIRECTION = 7,
    OC_MUON = 8,
    OC_RULES = 9
};

/* The most moments and scalars that a rule has. */
enum { OC_MOMENTS = 2, OC_SCALARS = 12 };

/* Instruction sets, the scalar oracle first. */
enum { OC_SCALAR = 0, OC_AVX2 = 1, OC_AVX512 = 2, OC_NEON = 3, OC_ISA_COUNT = 4 };

enum { OC_EARGUMENT = 1, OC_EMEMORY = 2, OC_EUNSUPPORTED = 3 };

/* A sum of squares is an exact integer multiple of 2^-298, kept as OC_NORM_DIGITS digits:
 * the sum of bins[i] * 2^(32 i - 298). bins[OC_NORM_NONFINITE] is positive if there was an inf or a NaN.
 * Adding two bin arrays element by element adds the sums, so the order and the partition of elements do not matter. */
enum { OC_NORM_DIGITS = 19, OC_NORM_NONFINITE = 19, OC_NORM_BINS = 20 };

/* The scalars of one update of one parameter. oc_update rounds each once to float32; a caller that flushes subnormals
 * to zero could not. */
typedef struct {
    double grad_scale;         /* unscale and clip factor on the gradient; not multiplied if it is 1 */
    double values[OC_SCALARS]; /* in the rule's own order (rules.h); the rest is not read */
    int64_t update;            /* t, counted from 1; stochastic rounding depends on it */
} oc_scalars;

/* A run of elements of one parameter. Moments that the rule lacks are not read, and may be NULL. param may be NULL if
 * the kind's param_dtype is OC_NO_PARAM; it may be the memory of `high`, or of a bf16 master, unless the states are
 * kept. */
typedef struct {
    const void *grad;
    void *master;
    void *moments[OC_MOMENTS];
    void *param;
    void *high;    /* OC_SPLIT: the master rounded to bf16, read, and written unless the states are kept */
    uint8_t *ties; /* OC_SPLIT: bit i & 7 of byte i >> 3 is element i's */
    uint8_t *scales[OC_MOMENTS]; /* of OC_FLOAT8 moments: a byte for every 256 elements of the segment */
    int64_t numel;
    int64_t scalars; /* index into the array of oc_scalars */
    int64_t start;   /* number of the first element within the parameter; with OC_FLOAT8 a multiple of 256 */
    uint64_t seed;   /* the parameter's, for stochastic rounding */
} oc_segment;

typedef struct {
    int32_t grad_dtype;
    int32_t param_dtype;
    int32_t rule;
    int32_t keep_states;                /* read the states, write the device parameter only */
    int32_t master_format;              /* OC_FLOAT32, OC_BFLOAT16 or OC_SPLIT */
    int32_t moment_formats[OC_MOMENTS]; /* OC_FLOAT32, OC_BFLOAT16 or OC_FLOAT8 */
} oc_kind;

/* A run of one state in some format. */
typedef struct {
    void *data;
    uint8_t *scales; /* OC_FLOAT8 */
    void *high;      /* OC_SPLIT */
    uint8_t *ties;   /* OC_SPLIT */
    int64_t numel;
    int32_t format;
    int32_t has_sign; /* OC_FLOAT8: 1; 0 if the bytes have an exponent bit instead (rules.h says it of each moment) */
} oc_state;

/* A run of elements, read from src and, if the operation has an output, written to dst. */
typedef struct {
    const void *src;
    void *dst;
    int64_t numel;
} oc_span;

/* A sum of n_sources runs of numel elements. The first is at src, and they begin stride elements apart. */
typedef struct {
    const void *src;
    float *dst;
    int64_t n_sources;
    int64_t stride;
    int64_t numel;
    float divisor;
    int32_t dtype; /* of src */
    int32_t add;   /* to dst, instead of overwriting it */
} oc_reduction;

/* One step of every segment: unscale, clip factor, update, cast, in one pass. */
int oc_update(const oc_segment *segments, int64_t n_segments, const oc_scalars *scalars, int64_t n_scalars,
              oc_kind kind, int threads);

/* bins += sum of squares of every span's src. */
int oc_sum_squares(const oc_span *spans, int64_t n_spans, int dtype, int64_t *bins, int threads);

/* dst (fp32) += f32(src). */
int oc_accumulate(const oc_span *spans, int64_t n_spans, int dtype, int threads);

/* dst = (f32(source 0) + f32(source 1) + ... , in this order) / divisor, or dst += that if `add` is set. */
int oc_reduce(const oc_reduction *reduction, int threads);

/* dst = src, rounded to nearest even; a NaN stays a NaN. */
int oc_cast(const oc_span *spans, int64_t n_spans, int src_dtype, int dst_dtype, int threads);

/* out = the state's values. */
int oc_decode(const oc_state *state, float *out, int threads);

/* The state = values, rounded to nearest even. */
int oc_encode(const oc_state *state, const float *values, int threads);

/* Check the arguments of these kernels as their calls do: 0 or OC_EARGUMENT. A device's own kernels check nothing. */
int oc_check_update(const oc_segment *segments, int64_t n_segments, const oc_scalars *scalars, int64_t n_scalars,
                    oc_kind kind);
int oc_check_spans(const oc_span *spans, int64_t n_spans, int src_dtype, int dst_dtype, int has_dst);
int oc_check_reduction(const oc_reduction *reduction);

/* Touch every page of fresh memory from the threads that will use it. */
int oc_first_touch(void *memory, int64_t n_bytes, int threads);

/* The instruction set in use; the widest supported one unless set. */
int oc_isa(void);
int oc_isa_supported(int isa);
int oc_set_isa(int isa);

/* Bind the pool's workers, and those that it will make, to this set of processors. It may hold some that are offline.
 * Nothing happens if all are, or outside Linux. */
int oc_bind_workers(const int32_t *cpus, int64_t n_cpus);

/* Worker threads alive in this process, the callers' own not counted. */
int oc_pool_workers(void);
