/* One text for two machines: C11 for the host, and CUDA or HIP C++ for a device, whose compilers are given no standard
 * headers (device.h).
 *
 * The host goes through a block's elements in a loop. The device has a thread for each. So a text that both compile
 * consists of phases, `OC_EACH(k, n) ...` with no state between them but in
 *   arrays of OC_SLOTS, whose OC_SLOT(k) is element k's: on the device, each thread has its own in registers
 *   OC_SHARED variables, one for all elements: OC_BARRIER() stands between a write by one element and a read by another
 */
#ifndef OC_PORTABLE_H
#define OC_PORTABLE_H

#ifdef OC_DEVICE

/* Macros, because HIPRTC has types of these names. */
#define int32_t int
#define int64_t long long
#define uint8_t unsigned char
#define uint16_t unsigned short
#define uint32_t unsigned int
#define uint64_t unsigned long long

#ifdef __clang__ /* HIPRTC; NVRTC declares it */
#define memcpy __builtin_memcpy
#endif

#define OC_FUNCTION static __device__ __forceinline__
#define OC_SHARED __shared__
#define OC_SLOTS 1
#define OC_SLOT(k) 0
#define OC_EACH(k, n) for (int k = (int)threadIdx.x, left = k < (n); left; left = 0)
#define OC_ONCE if (threadIdx.x == 0)
#define OC_BARRIER() __syncthreads()
#define OC_RAISE(largest, value) atomicMax(largest, value)
/* The place of digit i of a sum of squares: side by side are those of the block's threads. */
#define OC_DIGIT(i) ((i) * OC_STATE_BLOCK)

#else

#include <stdint.h>
#include <string.h>

#define OC_FUNCTION static inline
#define OC_SHARED
#define OC_SLOTS OC_STATE_BLOCK
#define OC_SLOT(k) (k)
#define OC_EACH(k, n) for (int k = 0; k < (n); k++)
#define OC_ONCE
#define OC_BARRIER() (void)0
#define OC_RAISE(largest, value) (*(largest) = *(largest) > (value) ? *(largest) : (value))
#define OC_DIGIT(i) (i)

#endif

#endif
