/* The kernels of a device: the oracle's arithmetic, a thread for each element of a block.
 *
 * NVRTC or HIPRTC compiles this for one kernel at a time, when it is first needed (offload_core/native/device_code.py).
 * One of these is defined before:
 *   OC_UPDATE {grad_dtype, param_dtype, ...}   an oc_kind
 *   OC_SUM_SQUARES, OC_ACCUMULATE, OC_REDUCE   the element type of the source
 *   OC_CAST, OC_CAST_TO                        the element types of source and destination
 *
 * Each is launched with OC_STATE_BLOCK threads. A group of these goes through OC_GROUP_BLOCKS blocks in a row (of a sum
 * of squares OC_SUM_BLOCKS), so that it looks up their run, and rounds its scalars, once. first[i] is the number of
 * blocks in the runs before run i, and first[n_runs] that of all.
 */
#define OC_DEVICE
#include "portable.h"

#include "arithmetic.h"

/* The blocks of this group of threads that lie in one run: [block, end). */
typedef struct {
    int64_t run, block, end, group_end;
} oc_place;

OC_FUNCTION int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

OC_FUNCTION oc_place first_place(const int64_t *first, int64_t n_runs, int group_blocks) {
    oc_place place;
    place.block = (int64_t)blockIdx.x * group_blocks;
    place.group_end = least(place.block + group_blocks, first[n_runs]);
    place.run = oc_find_run(first, n_runs, place.block);
    place.end = least(first[place.run + 1], place.group_end);
    return place;
}

OC_FUNCTION void next_place(oc_place *place, const int64_t *first) {
    place->block = place->end;
    place->run++;
    if (place->block < place->group_end)
        place->end = least(first[place->run + 1], place->group_end);
}

OC_FUNCTION int block_length(int64_t numel, int64_t begin) { return (int)least(numel - begin, OC_STATE_BLOCK); }

#define OC_KERNEL extern "C" __global__ void __launch_bounds__(OC_STATE_BLOCK)

#ifdef OC_UPDATE
OC_KERNEL oc_device_update(const oc_segment *segments, const int64_t *first, int64_t n_segments,
                           const oc_scalars *scalars) {
    const oc_kind kind = OC_UPDATE;
    oc_place place = first_place(first, n_segments, OC_GROUP_BLOCKS);
    for (; place.block < place.group_end; next_place(&place, first)) {
        const oc_segment segment = segments[place.run];
        const oc_rounded_scalars rounded = oc_rounded(scalars + segment.scalars);
        for (int64_t block = place.block; block < place.end; block++) {
            int64_t begin = (block - first[place.run]) * OC_STATE_BLOCK;
            update_block(&segment, begin, block_length(segment.numel, begin), &rounded, &kind);
        }
    }
}
#endif

#ifdef OC_SUM_SQUARES
/* Each thread has its own digits, at OC_DIGIT; these are then added in pairs of threads, and those of the first to
 * `bins`. */
OC_KERNEL oc_device_sum_squares(const oc_span *spans, const int64_t *first, int64_t n_spans, int64_t *bins) {
    OC_SHARED int64_t digits[OC_NORM_BINS * OC_STATE_BLOCK];
    const int thread = (int)threadIdx.x;
    int64_t *own = digits + thread;
    oc_place place = first_place(first, n_spans, OC_SUM_BLOCKS);
    for (int i = 0; i < OC_NORM_BINS; i++)
        own[OC_DIGIT(i)] = 0;
    for (; place.block < place.group_end; next_place(&place, first)) {
        const oc_span span = spans[place.run];
        for (int64_t block = place.block; block < place.end; block++) {
            int64_t begin = (block - first[place.run]) * OC_STATE_BLOCK;
            OC_EACH(k, block_length(span.numel, begin)) add_square_at(span.src, OC_SUM_SQUARES, begin + k, own);
        }
    }
    for (int half = OC_STATE_BLOCK / 2; half; half /= 2) {
        OC_BARRIER();
        if (thread < half)
            for (int i = 0; i < OC_NORM_BINS; i++)
                own[OC_DIGIT(i)] += own[OC_DIGIT(i) + half];
    }
    OC_ONCE oc_carry(own);
    OC_BARRIER();
    OC_EACH(i, OC_NORM_BINS) {
        if (digits[OC_DIGIT(i)])
            atomicAdd((uint64_t *)bins + i, (uint64_t)digits[OC_DIGIT(i)]);
    }
}
#endif

#ifdef OC_ACCUMULATE
OC_KERNEL oc_device_accumulate(const oc_span *spans, const int64_t *first, int64_t n_spans) {
    oc_place place = first_place(first, n_spans, OC_GROUP_BLOCKS);
    for (; place.block < place.group_end; next_place(&place, first)) {
        const oc_span span = spans[place.run];
        for (int64_t block = place.block; block < place.end; block++) {
            int64_t begin = (block - first[place.run]) * OC_STATE_BLOCK;
            OC_EACH(k, block_length(span.numel, begin))
            accumulate_at(span.src, OC_ACCUMULATE, (float *)span.dst, begin + k);
        }
    }
}
#endif

#ifdef OC_CAST
OC_KERNEL oc_device_cast(const oc_span *spans, const int64_t *first, int64_t n_spans) {
    oc_place place = first_place(first, n_spans, OC_GROUP_BLOCKS);
    for (; place.block < place.group_end; next_place(&place, first)) {
        const oc_span span = spans[place.run];
        for (int64_t block = place.block; block < place.end; block++) {
            int64_t begin = (block - first[place.run]) * OC_STATE_BLOCK;
            OC_EACH(k, block_length(span.numel, begin)) cast_at(span.src, OC_CAST, span.dst, OC_CAST_TO, begin + k);
        }
    }
}
#endif

#ifdef OC_REDUCE
OC_KERNEL oc_device_reduce(oc_reduction reduction) {
    int64_t begin = (int64_t)blockIdx.x * OC_STATE_BLOCK;
    reduction.dtype = OC_REDUCE;
    OC_EACH(k, block_length(reduction.numel, begin)) reduce_at(&reduction, begin + k);
}
#endif
