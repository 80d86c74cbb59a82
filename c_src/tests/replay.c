/* Runs the updates on standard input and writes the results, which are the same on every machine.
 *
 * In:  kind (oc_kind); steps, numel, bytes of the gradient, bytes of the device parameter (int64); scalars of each
 *      step (oc_scalars); grad, master, OC_MOMENTS moments. Out: master, moments, param.
 * The input may hold any number of these, one after the other.
 */
#include <stdio.h>
#include <stdlib.h>

#include "../offload_core.h"

static void *read_array(int64_t n_bytes) {
    void *array = malloc((size_t)n_bytes);
    if (!array || fread(array, 1, (size_t)n_bytes, stdin) != (size_t)n_bytes)
        exit(1);
    return array;
}

int main(void) {
    oc_kind kind;
    while (fread(&kind, sizeof kind, 1, stdin)) {
        int64_t *head = read_array(4 * (int64_t)sizeof *head), steps = head[0], numel = head[1];
        int64_t n_bytes = numel * (int64_t)sizeof(float), param_bytes = head[3];
        oc_scalars *scalars = read_array(steps * (int64_t)sizeof *scalars);
        oc_segment segment = {.grad = read_array(head[2]), .master = read_array(n_bytes), .numel = numel};
        for (int k = 0; k < OC_MOMENTS; k++)
            segment.moments[k] = read_array(n_bytes);
        segment.param = param_bytes ? malloc((size_t)param_bytes) : NULL;
        for (segment.scalars = 0; segment.scalars < steps; segment.scalars++)
            if (oc_update(&segment, 1, scalars, steps, kind, 2))
                return 1;
        fwrite(segment.master, 1, (size_t)n_bytes, stdout);
        for (int k = 0; k < OC_MOMENTS; k++)
            fwrite(segment.moments[k], 1, (size_t)n_bytes, stdout);
        fwrite(segment.param, 1, (size_t)param_bytes, stdout);
        free((void *)(uintptr_t)segment.grad);
        void *arrays[] = {head, scalars, segment.master, segment.moments[0], segment.moments[1], segment.param};
        for (int i = 0; i < 6; i++)
            free(arrays[i]);
    }
    return 0;
}
