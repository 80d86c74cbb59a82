/* The narrow formats of states, and the random bits that round to them: what all instruction sets share.
 *
 * A block is OC_STATE_BLOCK elements, counted from the parameter's first. Its random bits depend on the parameter's
 * seed, the update's number and the element's number alone, so no cut of the parameter changes them.
 */
#ifndef OC_FORMATS_H
#define OC_FORMATS_H

#include "offload_core.h"

/* A byte of OC_FLOAT8 is a float with 3 bits of mantissa, and 4 of exponent and a sign or 5 of exponent. The block's
 * largest value has the exponent OC_TOP. One more is left above it, so that it can be rounded up: nothing is clamped.
 */
enum { OC_MANTISSA = 3, OC_DROPPED = 23 - OC_MANTISSA, OC_TOP_SIGNED = 14, OC_TOP_UNSIGNED = 30 };

/* A block's scale is the biased exponent of its largest value, and at least OC_LEAST_SCALE, so that no code stands for
 * a subnormal float. OC_NAN_SCALE, where a value was inf or NaN. */
enum { OC_LEAST_SCALE = 22 + OC_TOP_UNSIGNED, OC_NAN_SCALE = 255 };

/* splitmix64's finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014). */
OC_FUNCTION uint64_t oc_mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

/* The key of a block's random bits in one update. */
OC_FUNCTION uint64_t oc_key(uint64_t seed, uint64_t update, uint64_t block) {
    const uint64_t golden = 0x9e3779b97f4a7c15;
    return oc_mix(oc_mix(seed + update * golden) + block * golden);
}

/* Factors of the hash of an element's number in its block and the key (C. Wellons, "Prospecting for hash functions"),
 * and of the hash of that for a master's own bits. */
#define OC_HASH_FIRST 0x21f0aaadu
#define OC_HASH_SECOND 0xd35a2d97u
#define OC_HASH_MASTER 0x9e3779b1u

#endif
