/* The exact sum of squares, as a fixed-point number of 32-bit digits in int64s.
 *
 * A float's square is an integer multiple of 2^-298 and is added as such. The vector kernels do it for a
 * block at a time: a square is exact in double, and adding 1.5 * 2^(52 + L) to it rounds it to a multiple of
 * 2^L, exactly, leaving that multiple as an integer in the low bits of the sum. One such window of 50 bits,
 * placed by the block's largest element, holds the squares of bfloat16s down to 2^-17 of that element exactly; two hold
 * those down to 2^-42 (of fp32s down to 2^-26). A block with smaller elements is added element by element. The parts
 * are integers, so neither the order nor the partition of the elements changes the result. After J. Demmel, P. Ahrens
 * and H. D. Nguyen, "Efficient Reproducible Floating Point Summation and BLAS" (UCB/EECS-2016-121), section 3; it
 * drops the bins below the highest few, and this drops none.
 */
#ifndef OC_SUM_SQUARES_H
#define OC_SUM_SQUARES_H

#include "offload_core.h"

enum { OC_BLOCK = 2048, OC_WINDOW_BITS = 50, OC_LOWEST_BIT = -298 };

/* digits += value * 2^bit. Each digit grows by less than 2^32. Of the product's 96 bits, the lower 64 are a shift in
 * 64 bits, and the rest has the sign. OC_DIGIT is the place of a digit. */
OC_FUNCTION void oc_add_at(int64_t *digits, int bit, int64_t value) {
    int at = (bit - OC_LOWEST_BIT) / 32, shift = (bit - OC_LOWEST_BIT) % 32;
    uint64_t lower = (uint64_t)value << shift;
    digits[OC_DIGIT(at)] += (int64_t)(lower & 0xffffffff);
    digits[OC_DIGIT(at + 1)] += (int64_t)(lower >> 32);
    digits[OC_DIGIT(at + 2)] += value >> 32 >> (32 - shift);
}

/* digits += x * x, x being finite. */
OC_FUNCTION void oc_add_square(int64_t *digits, float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    int biased = bits >> 23 & 255;
    int64_t significand = (bits & 0x7fffff) | (biased ? 0x800000 : 0);
    oc_add_at(digits, 2 * ((biased ? biased : 1) - 150), significand * significand);
}

/* The exponent of the float with these absolute bits; of a subnormal, that of the least normal. */
OC_FUNCTION int oc_exponent(uint32_t bits) {
    int biased = (int)(bits >> 23);
    return (biased ? biased : 1) - 127;
}

/* The lowest bit of the upper window for a block; max_bits are those of its largest absolute value. */
OC_FUNCTION int oc_upper_window(uint32_t max_bits) {
    int lowest = 2 * oc_exponent(max_bits) + 2 - OC_WINDOW_BITS;
    int least = OC_LOWEST_BIT + OC_WINDOW_BITS; /* leaves room for the lower window */
    return lowest > least ? lowest : least;
}

OC_FUNCTION double oc_extractor(int lowest_bit) {
    uint64_t bits = (uint64_t)(52 + lowest_bit + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return 1.5 * power;
}

/* Bring each digit into 32 bits, so that 2^31 sums can be added up. */
OC_FUNCTION void oc_carry(int64_t *digits) {
    for (int i = 0; i + 1 < OC_NORM_DIGITS; i++) {
        digits[OC_DIGIT(i + 1)] += digits[OC_DIGIT(i)] >> 32;
        digits[OC_DIGIT(i)] &= 0xffffffff;
    }
}

#endif
