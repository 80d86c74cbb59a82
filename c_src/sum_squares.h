/* The windows of the exact sum of squares, shared by every instruction set.
 *
 * A float's square is exact in double. Adding 1.5 * 2^(52 + L) to it and taking that off again rounds it
 * to a multiple of 2^L (its part in the window whose lowest bit is 2^L), exactly; what is left over goes
 * to the next window below. The parts are integers and are summed as integers, so no order and no cut of
 * the elements can change the result. After J. Demmel, P. Ahrens and H. D. Nguyen, "Efficient Reproducible
 * Floating Point Summation and BLAS" (UCB/EECS-2016-121), section 3; there bins follow the running
 * maximum and the lowest are dropped, here all twelve are kept, so the sum is exact.
 */
#ifndef OC_SUM_SQUARES_H
#define OC_SUM_SQUARES_H

#include <stdint.h>
#include <string.h>

#include "offload_core.h"

enum { OC_BLOCK = 2048, OC_NORM_LOWEST = -298 };

static inline double oc_power_of_two(int exponent) {
    uint64_t bits = (uint64_t)(exponent + 1023) << 52;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline int oc_window_lowest_bit(int window) { return OC_NORM_LOWEST + OC_NORM_WINDOW_BITS * window; }

static inline double oc_window_extractor(int window) {
    return 1.5 * oc_power_of_two(52 + oc_window_lowest_bit(window));
}

/* The lowest window that holds the square of a finite float with these absolute bits, and at least 1, so
 * that there is always a window below it. */
static inline int oc_top_window(uint32_t max_bits) {
    int biased = (int)(max_bits >> 23);
    int exponent = biased ? biased - 127 : -126;
    int above = 2 * exponent + 2 - OC_NORM_WINDOW_BITS - OC_NORM_LOWEST;
    int window = above <= 0 ? 0 : (above + OC_NORM_WINDOW_BITS - 1) / OC_NORM_WINDOW_BITS;
    return window < 1 ? 1 : window;
}

static inline void oc_add_to_window(int64_t *bins, int window, int64_t value) {
    bins[2 * window] += value & 0xffffffff;
    bins[2 * window + 1] += value >> 32;
}

/* Split the square of x over the windows from `window` down; those above `first` were counted already. */
static inline void oc_split_square(float x, int window, int first, int64_t *bins) {
    double rest = (double)x * (double)x;
    for (; window >= 0 && rest != 0; window--) {
        double extractor = oc_window_extractor(window);
        double part = (rest + extractor) - extractor;
        if (window <= first)
            oc_add_to_window(bins, window, (int64_t)(part * oc_power_of_two(-oc_window_lowest_bit(window))));
        rest -= part;
    }
}

#endif
