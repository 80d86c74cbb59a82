/* A device on the host: groups of threads, one thread after another between two barriers.
 *
 * The text of the kernels is put in the place of TEXT. What a vendor's compiler would predefine comes before it.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static

static struct {
    unsigned x;
} threadIdx, blockIdx;

enum { THREADS = 256, STACK = 1 << 16, DIVERGED = 1 };

static char stacks[THREADS][STACK];
static ucontext_t scheduler, contexts[THREADS];
static char is_done[THREADS];

static void __syncthreads() { swapcontext(&contexts[threadIdx.x], &scheduler); }

static unsigned atomicMax(unsigned *at, unsigned value) {
    unsigned before = *at;
    *at = before > value ? before : value;
    return before;
}

static unsigned long long atomicAdd(unsigned long long *at, unsigned long long value) {
    unsigned long long before = *at;
    *at += value;
    return before;
}

/* The types of the kernel that runs: constants for a vendor's compiler, variables here. */
static int types[7];
#define OC_UPDATE {types[0], types[1], types[2], types[3], types[4], {types[5], types[6]}}
#define OC_SUM_SQUARES types[0]
#define OC_ACCUMULATE types[0]
#define OC_REDUCE types[0]
#define OC_CAST types[0]
#define OC_CAST_TO types[1]

extern "C" {
TEXT
}

static const char *function;
static void **arguments;

template <typename T> static T argument(int i) { return *(T *)arguments[i]; }

static void run_thread() {
    if (!strcmp(function, "oc_device_update"))
        oc_device_update(argument<const oc_segment *>(0), argument<const int64_t *>(1), argument<int64_t>(2),
                         argument<const oc_scalars *>(3));
    else if (!strcmp(function, "oc_device_sum_squares"))
        oc_device_sum_squares(argument<const oc_span *>(0), argument<const int64_t *>(1), argument<int64_t>(2),
                              argument<int64_t *>(3));
    else if (!strcmp(function, "oc_device_accumulate"))
        oc_device_accumulate(argument<const oc_span *>(0), argument<const int64_t *>(1), argument<int64_t>(2));
    else if (!strcmp(function, "oc_device_cast"))
        oc_device_cast(argument<const oc_span *>(0), argument<const int64_t *>(1), argument<int64_t>(2));
    else if (!strcmp(function, "oc_device_reduce"))
        oc_device_reduce(argument<oc_reduction>(0));
    else
        abort();
    is_done[threadIdx.x] = 1;
}

static void start(int thread) {
    getcontext(&contexts[thread]);
    contexts[thread].uc_stack.ss_sp = stacks[thread];
    contexts[thread].uc_stack.ss_size = STACK;
    contexts[thread].uc_link = &scheduler;
    makecontext(&contexts[thread], run_thread, 0);
    is_done[thread] = 0;
}

/* Every thread, up to its next barrier or to its end, `turn` times as far apart as their numbers. Return how many have
 * ended. */
static int run_to_barrier(int turn) {
    int ended = 0;
    for (int i = 0; i < THREADS; i++) {
        threadIdx.x = (unsigned)(i * turn) % THREADS;
        swapcontext(&scheduler, &contexts[threadIdx.x]);
        ended += is_done[threadIdx.x];
    }
    return ended;
}

/* Run a kernel. The order of the threads and of their groups depends on `turn`, an odd number. */
extern "C" int emulate(const char *name, const int *kernel_types, int groups, void **values, int turn) {
    function = name;
    arguments = values;
    memcpy(types, kernel_types, sizeof types);
    for (int group = 0; group < groups; group++) {
        blockIdx.x = (unsigned)(turn % 4 == 1 ? group : groups - 1 - group);
        for (int thread = 0; thread < THREADS; thread++)
            start(thread);
        int ended;
        while (!(ended = run_to_barrier(turn))) {
        }
        if (ended < THREADS) /* some wait at a barrier that others do not reach: a device would hang */
            return DIVERGED;
    }
    return 0;
}
