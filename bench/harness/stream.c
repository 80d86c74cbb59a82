/* The streaming limit: what an update reads and writes, with no arithmetic to speak of. */
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { STREAM_READ, STREAM_UPDATE, STREAM_WRITE };

static void write_words(uint32_t *to, int64_t words, uint32_t value) {
    int64_t i = 0;
#if defined(__x86_64__)
    for (; ((uintptr_t)to & 31) == 0 && i + 8 <= words; i += 8) /* past the caches, as the kernel writes parameters */
        _mm256_stream_si256((__m256i *)(to + i), _mm256_set1_epi32((int)value));
#endif
    for (; i < words; i++)
        to[i] = value;
}

enum { LINE = 16, FETCH_AHEAD = 64 * LINE }; /* words */

typedef uint32_t line __attribute__((vector_size(4 * LINE), aligned(4)));

/* Fetch ahead, as the kernel does: the processor's own prefetching stops at the end of each page. */
static uint32_t read_words(const uint32_t *from, int64_t words) {
    line seen = {0};
    uint32_t all = 0;
    int64_t i = 0;
    for (; i + LINE <= words; i += LINE) {
        __builtin_prefetch(from + i + FETCH_AHEAD);
        seen ^= *(const line *)(from + i);
    }
    for (; i < words; i++)
        all ^= from[i];
    for (int k = 0; k < LINE; k++)
        all ^= seen[k];
    return all;
}

static void update_words(uint32_t *words, int64_t n, uint32_t zero) {
    int64_t i = 0;
    for (; i + LINE <= n; i += LINE) {
        __builtin_prefetch(words + i + FETCH_AHEAD);
        *(line *)(words + i) ^= zero;
    }
    for (; i < n; i++)
        words[i] ^= zero;
}

enum { CHUNK = 64 }; /* blocks */

/* Pass over so many blocks of all arrays together. Each array has its bytes of a block, a multiple of four. Threads that
 * share `next`, which is 0 first, take chunks of blocks in turn: with a fixed half, one would wait for the other that
 * another program has kept from running. zero is 0, which the compiler does not know: updated arrays keep their bits,
 * written ones become 0. Returns a value that depends on all that was read. */
uint32_t stream(void **arrays, const int64_t *block_bytes, const int *modes, int count, int64_t blocks, int64_t *next,
                uint32_t zero) {
    uint32_t seen = 0;
    int64_t first;
    while ((first = __atomic_fetch_add(next, CHUNK, __ATOMIC_RELAXED)) < blocks)
        for (int64_t block = first; block < blocks && block < first + CHUNK; block++)
            for (int k = 0; k < count; k++) {
                uint32_t *words = (uint32_t *)((char *)arrays[k] + block * block_bytes[k]);
                int64_t n = block_bytes[k] / 4;
                if (modes[k] == STREAM_READ)
                    seen ^= read_words(words, n);
                else if (modes[k] == STREAM_UPDATE)
                    update_words(words, n, zero);
                else
                    write_words(words, n, zero);
            }
#if defined(__x86_64__)
    _mm_sfence();
#endif
    return seen;
}
