/* Runs the updates on standard input and writes the results, which are the same on every machine.
 *
 * In:  kind (oc_adam_kind); steps, numel, bytes of the gradient, bytes of the device parameter (int64); scalars of each
 *      step (oc_adam_scalars); grad, master, exp_avg, exp_avg_sq. Out: master, exp_avg, exp_avg_sq, param.
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
    oc_adam_kind kind;
    while (fread(&kind, sizeof kind, 1, stdin)) {
        int64_t *head = read_array(4 * (int64_t)sizeof *head), steps = head[0], numel = head[1];
        int64_t n_bytes = numel * (int64_t)sizeof(float), param_bytes = head[3];
        oc_adam_scalars *scalars = read_array(steps * (int64_t)sizeof *scalars);
        void *grad = read_array(head[2]);
        float *master = read_array(n_bytes), *exp_avg = read_array(n_bytes), *exp_avg_sq = read_array(n_bytes);
        void *param = malloc((size_t)n_bytes);
        for (int64_t step = 0; step < steps; step++) {
            oc_segment segment = {.grad = grad,
                                  .master = master,
                                  .exp_avg = exp_avg,
                                  .exp_avg_sq = exp_avg_sq,
                                  .param = param_bytes ? param : NULL,
                                  .numel = numel,
                                  .scalars = step};
            if (oc_adam(&segment, 1, scalars, steps, kind, 2))
                return 1;
        }
        fwrite(master, 1, (size_t)n_bytes, stdout);
        fwrite(exp_avg, 1, (size_t)n_bytes, stdout);
        fwrite(exp_avg_sq, 1, (size_t)n_bytes, stdout);
        fwrite(param, 1, (size_t)param_bytes, stdout);
        void *arrays[] = {head, scalars, grad, master, exp_avg, exp_avg_sq, param};
        for (int i = 0; i < 7; i++)
            free(arrays[i]);
    }
    return 0;
}
