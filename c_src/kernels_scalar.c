/* The scalar kernels: the oracle's arithmetic in loops. Compiled with -ffp-contract=off. */
#include <math.h>
#include <stddef.h>

#include "arithmetic.h"

static int block_length(int64_t begin, int64_t end) {
    return end - begin < OC_STATE_BLOCK ? (int)(end - begin) : OC_STATE_BLOCK;
}

void oc_decode_run(const oc_state *s, int64_t begin, int64_t end, float *out) {
    for (int64_t i = begin; i < end; i++)
        out[i] = decoded(s, i);
}

void oc_encode_run(const oc_state *s, int64_t begin, int64_t end, const float *values) {
    for (int64_t i = begin; i < end; i += OC_STATE_BLOCK)
        encode_block(s, i, block_length(i, end), values + i, NULL);
}

static void update(const oc_segment *segment, int64_t begin, int64_t end, const oc_rounded_scalars *s,
                   const oc_kind *kind, int stream) {
    (void)stream;
    for (int64_t i = begin; i < end; i += OC_STATE_BLOCK)
        update_block(segment, i, block_length(i, end), s, kind);
}

static void sum_squares(const void *src, int dtype, int64_t n, int64_t *bins) {
    for (int64_t i = 0; i < n; i++)
        add_square_at(src, dtype, i, bins);
}

static void accumulate(const void *src, int dtype, float *dst, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        accumulate_at(src, dtype, dst, i);
}

static void reduce(const oc_reduction *a, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
        reduce_at(a, i);
}

static void cast(const void *src, int src_dtype, void *dst, int dst_dtype, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        cast_at(src, src_dtype, dst, dst_dtype, i);
}

const oc_kernels oc_scalar_kernels = {OC_SCALAR, update, sum_squares, accumulate, reduce, cast};
