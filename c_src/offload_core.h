/* The library's inner interfaces: the kernel table, dispatch and the thread pool. */
#ifndef OFFLOAD_CORE_H
#define OFFLOAD_CORE_H

#include "portable.h"

#include "api.h"

/* oc_scalars as the kernels use them. */
typedef struct {
    float grad_scale, values[OC_SCALARS];
    uint64_t update;
    const double *exact; /* the values before rounding: these decide which moments there are */
} oc_rounded_scalars;

/* Call where subnormals are kept. */
OC_FUNCTION oc_rounded_scalars oc_rounded(const oc_scalars *s) {
    oc_rounded_scalars r;
    r.grad_scale = (float)s->grad_scale;
    r.update = (uint64_t)s->update;
    r.exact = s->values;
    for (int i = 0; i < OC_SCALARS; i++)
        r.values[i] = (float)s->values[i];
    return r;
}

/* The run that chunk `at` lies in, first[i] being the number of chunks before run i. */
OC_FUNCTION int64_t oc_find_run(const int64_t *first, int64_t n_runs, int64_t at) {
    int64_t low = 0, high = n_runs;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (first[middle] <= at)
            low = middle;
        else
            high = middle;
    }
    return low;
}

OC_FUNCTION int64_t oc_itemsize(int dtype) { return dtype == OC_FLOAT32 ? 4 : dtype == OC_FLOAT8 ? 1 : 2; }

#ifndef OC_DEVICE

/* One instruction set's kernels. Each does the same IEEE operations in the same order on every element, at any
 * position, so all entries give the same bits (docs/numerics.md). n may be any non-negative
 * number; pointers need no alignment beyond their element's own. */
typedef void oc_update_fn(const oc_segment *segment, int64_t begin, int64_t end, const oc_rounded_scalars *scalars,
                          const oc_kind *kind, int stream);
typedef void oc_sum_squares_fn(const void *src, int dtype, int64_t n, int64_t *bins);
typedef void oc_accumulate_fn(const void *src, int dtype, float *dst, int64_t n);
typedef void oc_reduce_fn(const oc_reduction *reduction, int64_t begin, int64_t end);
typedef void oc_cast_fn(const void *src, int src_dtype, void *dst, int dst_dtype, int64_t n);

typedef struct {
    int isa;
    oc_update_fn *update;
    oc_sum_squares_fn *sum_squares;
    oc_accumulate_fn *accumulate;
    oc_reduce_fn *reduce;
    oc_cast_fn *cast;
} oc_kernels;

extern const oc_kernels oc_scalar_kernels;
/* Elements [begin, end) of a state to and from fp32, begin being a multiple of 256. One element at a time, whatever the
 * instruction set: checkpoints and views of states need them, no step does. */
void oc_decode_run(const oc_state *state, int64_t begin, int64_t end, float *out);
void oc_encode_run(const oc_state *state, int64_t begin, int64_t end, const float *values);
#if defined(__x86_64__)
extern const oc_kernels oc_avx2_kernels;
extern const oc_kernels oc_avx512_kernels;
#elif defined(__aarch64__)
extern const oc_kernels oc_neon_kernels;
#endif

/* The kernels in use (dispatch.c). */
const oc_kernels *oc_current_kernels(void);

/* Call task(context, i) once for each i in [0, n_items), on up to `threads` threads, the caller's included unless
 * it may run on other processors than the workers.
 * Tasks run with round-to-nearest and with subnormals, for any control word of the caller. */
typedef void oc_task(void *context, int64_t item);
void oc_parallel_for(oc_task *task, void *context, int64_t n_items, int threads);

#endif

#endif
