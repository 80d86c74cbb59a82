/* The choice of the instruction set, and the library's entry points: check, cut into chunks, run. */
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "formats.h"
#include "offload_core.h"
#include "rules.h"
#include "sum_squares.h"

/* --- instruction sets ---------------------------------------------------------------------------- */

#if defined(__x86_64__)
static int has_f16c(void) { /* not every compiler's __builtin_cpu_supports knows it */
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

static const oc_kernels *kernels_of(int isa) {
    switch (isa) {
    case OC_SCALAR: return &oc_scalar_kernels;
#if defined(__x86_64__)
    /* __builtin_cpu_supports also asks whether the operating system saves the registers (XGETBV). */
    case OC_AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() ? &oc_avx2_kernels : NULL;
    case OC_AVX512:
        return kernels_of(OC_AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
                   ? &oc_avx512_kernels
                   : NULL;
#elif defined(__aarch64__)
    case OC_NEON: return &oc_neon_kernels;
#endif
    default: return NULL;
    }
}

/* The kernels in use, NULL before the first call. CPUID is slow, since in a virtual machine it traps to the hypervisor,
 * so it runs once. The threads share only this pointer to a constant table: they need no lock, and a forked child
 * inherits it. */
static _Atomic(const oc_kernels *) current_kernels = NULL;

/* Not inline, so that every other call is one load and one branch. */
static __attribute__((noinline)) const oc_kernels *detect_kernels(void) {
    int isa = OC_ISA_COUNT - 1;
    while (!kernels_of(isa))
        isa--;
    /* If another thread has detected or set them meanwhile, its choice stays. */
    const oc_kernels *before = NULL, *widest = kernels_of(isa);
    return atomic_compare_exchange_strong(&current_kernels, &before, widest) ? widest : before;
}

const oc_kernels *oc_current_kernels(void) {
    const oc_kernels *kernels = atomic_load(&current_kernels);
    return kernels ? kernels : detect_kernels();
}

int oc_isa(void) { return oc_current_kernels()->isa; }

int oc_isa_supported(int isa) { return kernels_of(isa) != NULL; }

int oc_set_isa(int isa) {
    const oc_kernels *kernels = kernels_of(isa);
    if (!kernels)
        return OC_EUNSUPPORTED;
    atomic_store(&current_kernels, kernels);
    return 0;
}

/* --- chunks -------------------------------------------------------------------------------------- */

/* Work is cut into chunks of at most this many elements. A chunk lies in one run. */
enum { CHUNK = 32768 };

/* If all outputs together are larger than this, they do not fit in the caches and are written with streaming stores. */
enum { STREAM_FROM = 8 << 20 };

/* Several runs seen as one row of chunks: first_chunk[i] is the number of chunks before run i. */
typedef struct {
    int64_t n_runs;
    int64_t *first_chunk;
    int64_t total;
} chunked;

static int chunk_runs(chunked *c, const char *runs, size_t stride, size_t numel_at, int64_t n_runs) {
    c->n_runs = n_runs;
    c->total = 0;
    c->first_chunk = malloc((size_t)(n_runs + 1) * sizeof *c->first_chunk);
    if (!c->first_chunk)
        return OC_EMEMORY;
    c->first_chunk[0] = 0;
    for (int64_t i = 0; i < n_runs; i++) {
        int64_t numel;
        memcpy(&numel, runs + (size_t)i * stride + numel_at, sizeof numel);
        if (numel < 0) {
            free(c->first_chunk);
            return OC_EARGUMENT;
        }
        c->total += numel;
        c->first_chunk[i + 1] = c->first_chunk[i] + (numel + CHUNK - 1) / CHUNK;
    }
    return 0;
}

/* The run that a chunk lies in, and the chunk's offset there. */
static int64_t find_run(const chunked *c, int64_t chunk, int64_t *offset) {
    int64_t run = oc_find_run(c->first_chunk, c->n_runs, chunk);
    *offset = (chunk - c->first_chunk[run]) * CHUNK;
    return run;
}

static int64_t chunk_length(int64_t numel, int64_t offset) { return numel - offset < CHUNK ? numel - offset : CHUNK; }

static void run_chunks(chunked *c, oc_task *task, void *context, int threads) {
    /* Short runs are cut into a chunk each, but a thread with less than a chunk's elements costs more to wake than it
     * saves. */
    int64_t worth_waking = (c->total + CHUNK - 1) / CHUNK;
    if (threads > worth_waking)
        threads = (int)worth_waking;
    oc_parallel_for(task, context, c->first_chunk[c->n_runs], threads);
    free(c->first_chunk);
}

static int is_float(int dtype) { return dtype == OC_FLOAT32 || dtype == OC_BFLOAT16 || dtype == OC_FLOAT16; }

/* --- entry points -------------------------------------------------------------------------------- */

typedef struct {
    chunked chunks;
    const oc_kernels *kernels;
    const oc_segment *segments;
    const oc_scalars *scalars;
    oc_kind kind;
    int stream;
} update_job;

static void update_chunk(void *context, int64_t chunk) {
    const update_job *job = context;
    int64_t begin, run = find_run(&job->chunks, chunk, &begin);
    const oc_segment *segment = job->segments + run;
    const oc_rounded_scalars scalars = oc_rounded(job->scalars + segment->scalars);
    job->kernels->update(segment, begin, begin + chunk_length(segment->numel, begin), &scalars, &job->kind,
                         job->stream);
}

static int is_moment(int format) { return format == OC_FLOAT32 || format == OC_BFLOAT16 || format == OC_FLOAT8; }

static int is_good_kind(const oc_kind *k) {
    for (int i = 0; i < OC_MOMENTS; i++)
        if (!is_moment(k->moment_formats[i]))
            return 0;
    return is_float(k->grad_dtype) && (is_float(k->param_dtype) || k->param_dtype == OC_NO_PARAM) && k->rule >= 0 &&
           k->rule < OC_RULES && k->keep_states >= 0 && k->keep_states <= 1 &&
           !(k->keep_states && k->param_dtype == OC_NO_PARAM) &&
           (k->master_format == OC_FLOAT32 || k->master_format == OC_BFLOAT16 || k->master_format == OC_SPLIT);
}

static int is_good_segment(const oc_segment *s, const oc_kind *k, const oc_scalars *scalars, int64_t n_scalars) {
    int has_param = k->param_dtype != OC_NO_PARAM, split = k->master_format == OC_SPLIT;
    if (s->numel < 0 || s->scalars < 0 || s->scalars >= n_scalars || !s->grad || !s->master ||
        (!s->param && has_param) || (split && (!s->high || !s->ties)) || s->start < 0)
        return 0;
    int kept = oc_kept_moments(k->rule, scalars[s->scalars].values);
    for (int i = 0; i < kept; i++)
        if (!s->moments[i] || (k->moment_formats[i] == OC_FLOAT8 && (!s->scales[i] || s->start % OC_STATE_BLOCK)))
            return 0;
    /* A parameter in the master's memory has the master's type, and cannot be written without it. */
    const void *shared = split ? s->high : k->master_format == OC_BFLOAT16 ? s->master : NULL;
    return !has_param || s->param != shared || (k->param_dtype == OC_BFLOAT16 && !k->keep_states);
}

int oc_check_update(const oc_segment *segments, int64_t n_segments, const oc_scalars *scalars, int64_t n_scalars,
                    oc_kind kind) {
    if (n_segments < 0 || !is_good_kind(&kind))
        return OC_EARGUMENT;
    for (int64_t i = 0; i < n_segments; i++)
        if (!is_good_segment(segments + i, &kind, scalars, n_scalars))
            return OC_EARGUMENT;
    return 0;
}

int oc_update(const oc_segment *segments, int64_t n_segments, const oc_scalars *scalars, int64_t n_scalars,
              oc_kind kind, int threads) {
    int error = oc_check_update(segments, n_segments, scalars, n_scalars, kind);
    if (error)
        return error;
    update_job job = {.kernels = oc_current_kernels(), .segments = segments, .scalars = scalars, .kind = kind};
    error = chunk_runs(&job.chunks, (const char *)segments, sizeof *segments, offsetof(oc_segment, numel), n_segments);
    if (error)
        return error;
    job.stream = job.chunks.total >= STREAM_FROM;
    run_chunks(&job.chunks, update_chunk, &job, threads);
    return 0;
}

typedef struct {
    chunked chunks;
    const oc_kernels *kernels;
    const oc_span *spans;
    int src_dtype, dst_dtype;
    _Atomic int64_t bins[OC_NORM_BINS];
} span_job;

int oc_check_spans(const oc_span *spans, int64_t n_spans, int src_dtype, int dst_dtype, int has_dst) {
    if (n_spans < 0 || !is_float(src_dtype) || !is_float(dst_dtype))
        return OC_EARGUMENT;
    for (int64_t i = 0; i < n_spans; i++)
        if (spans[i].numel < 0 || !spans[i].src || (has_dst && !spans[i].dst))
            return OC_EARGUMENT;
    return 0;
}

static int run_spans(span_job *job, const oc_span *spans, int64_t n_spans, int src_dtype, int dst_dtype, int has_dst,
                     oc_task *task, int threads) {
    int error = oc_check_spans(spans, n_spans, src_dtype, dst_dtype, has_dst);
    if (error)
        return error;
    job->kernels = oc_current_kernels();
    job->spans = spans;
    job->src_dtype = src_dtype;
    job->dst_dtype = dst_dtype;
    error = chunk_runs(&job->chunks, (const char *)spans, sizeof *spans, offsetof(oc_span, numel), n_spans);
    if (!error)
        run_chunks(&job->chunks, task, job, threads);
    return error;
}

static const char *src_at(const span_job *job, const oc_span *span, int64_t offset) {
    return (const char *)span->src + offset * oc_itemsize(job->src_dtype);
}

static void sum_squares_chunk(void *context, int64_t chunk) {
    span_job *job = context;
    int64_t offset, bins[OC_NORM_BINS] = {0};
    const oc_span *span = job->spans + find_run(&job->chunks, chunk, &offset);
    job->kernels->sum_squares(src_at(job, span, offset), job->src_dtype, chunk_length(span->numel, offset), bins);
    oc_carry(bins);
    for (int i = 0; i < OC_NORM_BINS; i++)
        if (bins[i])
            atomic_fetch_add_explicit(&job->bins[i], bins[i], memory_order_relaxed);
}

int oc_sum_squares(const oc_span *spans, int64_t n_spans, int dtype, int64_t *bins, int threads) {
    span_job job = {.bins = {0}};
    int error = run_spans(&job, spans, n_spans, dtype, OC_FLOAT32, 0, sum_squares_chunk, threads);
    if (!error)
        for (int i = 0; i < OC_NORM_BINS; i++)
            bins[i] += atomic_load_explicit(&job.bins[i], memory_order_relaxed);
    return error;
}

static void accumulate_chunk(void *context, int64_t chunk) {
    const span_job *job = context;
    int64_t offset;
    const oc_span *span = job->spans + find_run(&job->chunks, chunk, &offset);
    job->kernels->accumulate(src_at(job, span, offset), job->src_dtype, (float *)span->dst + offset,
                             chunk_length(span->numel, offset));
}

int oc_accumulate(const oc_span *spans, int64_t n_spans, int dtype, int threads) {
    span_job job = {.bins = {0}};
    return run_spans(&job, spans, n_spans, dtype, OC_FLOAT32, 1, accumulate_chunk, threads);
}

static void cast_chunk(void *context, int64_t chunk) {
    const span_job *job = context;
    int64_t offset;
    const oc_span *span = job->spans + find_run(&job->chunks, chunk, &offset);
    job->kernels->cast(src_at(job, span, offset), job->src_dtype,
                       (char *)span->dst + offset * oc_itemsize(job->dst_dtype), job->dst_dtype,
                       chunk_length(span->numel, offset));
}

int oc_cast(const oc_span *spans, int64_t n_spans, int src_dtype, int dst_dtype, int threads) {
    span_job job = {.bins = {0}};
    return run_spans(&job, spans, n_spans, src_dtype, dst_dtype, 1, cast_chunk, threads);
}

typedef struct {
    const oc_kernels *kernels;
    const oc_reduction *reduction;
} reduce_job;

static void reduce_chunk(void *context, int64_t chunk) {
    const reduce_job *job = context;
    int64_t begin = chunk * CHUNK;
    job->kernels->reduce(job->reduction, begin, begin + chunk_length(job->reduction->numel, begin));
}

int oc_check_reduction(const oc_reduction *r) {
    int is_good = r->src && r->dst && r->n_sources >= 1 && r->numel >= 0 && r->stride >= r->numel && is_float(r->dtype);
    return is_good ? 0 : OC_EARGUMENT;
}

int oc_reduce(const oc_reduction *reduction, int threads) {
    const oc_reduction *r = reduction;
    if (oc_check_reduction(r))
        return OC_EARGUMENT;
    reduce_job job = {oc_current_kernels(), reduction};
    oc_parallel_for(reduce_chunk, &job, (r->numel + CHUNK - 1) / CHUNK, threads);
    return 0;
}

/* --- conversions of states ----------------------------------------------------------------------- */

typedef struct {
    const oc_state *state;
    float *out;
    const float *values;
} state_job;

static int run_state(oc_task *task, state_job *job, int threads) {
    const oc_state *s = job->state;
    if (s->numel < 0 || !s->data || (!job->out && !job->values) || (s->has_sign != 0 && s->has_sign != 1) ||
        !(is_moment(s->format) || s->format == OC_SPLIT) || (s->format == OC_FLOAT8 && !s->scales) ||
        (s->format == OC_SPLIT && (!s->high || !s->ties)))
        return OC_EARGUMENT;
    oc_parallel_for(task, job, (s->numel + CHUNK - 1) / CHUNK, threads);
    return 0;
}

static void decode_chunk(void *context, int64_t chunk) {
    const state_job *job = context;
    int64_t begin = chunk * CHUNK;
    oc_decode_run(job->state, begin, begin + chunk_length(job->state->numel, begin), job->out);
}

int oc_decode(const oc_state *state, float *out, int threads) {
    state_job job = {.state = state, .out = out};
    return run_state(decode_chunk, &job, threads);
}

static void encode_chunk(void *context, int64_t chunk) {
    const state_job *job = context;
    int64_t begin = chunk * CHUNK;
    oc_encode_run(job->state, begin, begin + chunk_length(job->state->numel, begin), job->values);
}

int oc_encode(const oc_state *state, const float *values, int threads) {
    state_job job = {.state = state, .values = values};
    return run_state(encode_chunk, &job, threads);
}

/* --- first touch --------------------------------------------------------------------------------- */

enum { TOUCH_BYTES = 2 << 20, PAGE = 4096 };

typedef struct {
    volatile char *memory;
    int64_t n_bytes;
} touch_job;

static void touch_chunk(void *context, int64_t chunk) {
    const touch_job *job = context;
    int64_t end = (chunk + 1) * TOUCH_BYTES < job->n_bytes ? (chunk + 1) * TOUCH_BYTES : job->n_bytes;
    for (int64_t i = chunk * TOUCH_BYTES; i < end; i += PAGE)
        job->memory[i] = 0;
}

int oc_first_touch(void *memory, int64_t n_bytes, int threads) {
    if (!memory || n_bytes < 0)
        return OC_EARGUMENT;
    touch_job job = {memory, n_bytes};
    oc_parallel_for(touch_chunk, &job, (n_bytes + TOUCH_BYTES - 1) / TOUCH_BYTES, threads);
    return 0;
}
