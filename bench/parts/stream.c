/* The streaming limit: what an update reads and writes, with no arithmetic to speak of. */
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Read an fp32 gradient and three states, write the states: 28 bytes an element. Bits only: no sum that is denormal
   can slow it down. */
void stream_float32(const uint32_t *grad, uint32_t *a, uint32_t *b, uint32_t *c, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        a[i] ^= grad[i];
        b[i] ^= grad[i];
        c[i] ^= grad[i];
    }
}

/* Read a 16-bit gradient and three states, write the states and a 16-bit output: 28 bytes an element. */
void stream_bfloat16(const uint16_t *grad, float *a, float *b, float *c, uint16_t *out, int64_t n) {
    int64_t i = 0;
#if defined(__x86_64__)
    for (; ((uintptr_t)out & 31) == 0 && i + 16 <= n; i += 16) {
        __m256i g = _mm256_loadu_si256((const __m256i *)(grad + i));
        for (int k = 0; k < 2; k++) {
            __m256 x = _mm256_castsi256_ps(g);
            _mm256_storeu_ps(a + i + 8 * k, _mm256_xor_ps(_mm256_loadu_ps(a + i + 8 * k), x));
            _mm256_storeu_ps(b + i + 8 * k, _mm256_xor_ps(_mm256_loadu_ps(b + i + 8 * k), x));
            _mm256_storeu_ps(c + i + 8 * k, _mm256_xor_ps(_mm256_loadu_ps(c + i + 8 * k), x));
        }
        _mm256_stream_si256((__m256i *)(out + i), g);
    }
    _mm_sfence();
#endif
    for (; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, a + i, 4);
        bits ^= grad[i];
        memcpy(a + i, &bits, 4);
        b[i] += 1;
        c[i] += 1;
        out[i] = grad[i];
    }
}
