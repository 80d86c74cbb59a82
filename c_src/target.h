/* Macros for the files of instruction sets. */
#ifndef OC_TARGET_H
#define OC_TARGET_H

/* For functions of a few instructions. The compiler inlines them first, and need not weigh thousands of calls. */
#define INLINE static inline __attribute__((always_inline))

/* Compile the rest of a file for an instruction set, without compiler flags, so that one build contains all sets. */
#define OC_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define OC_TARGET_BEGIN(features)                                                                                      \
    OC_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define OC_TARGET_END OC_PRAGMA(clang attribute pop)
#else
#define OC_TARGET_BEGIN(features) OC_PRAGMA(GCC push_options) OC_PRAGMA(GCC target(features))
#define OC_TARGET_END OC_PRAGMA(GCC pop_options)
#endif

#endif
