/* Sums and the like of the ranks' arrays, in the order of the ranks: in blocks of 8, then the blocks.
 *
 * The order depends on the number of ranks alone, so a result has the same bits on all ranks and by every way. Compile
 * with -ffp-contract=off and without -ffast-math. Half types are added up in float and rounded once. NaN as NumPy's.
 */
#ifndef MPIMESH_KERNELS_H
#define MPIMESH_KERNELS_H

#include <complex.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define FOLD_BY_CPU __attribute__((target_clones("avx2", "default")))
#else
#define FOLD_BY_CPU
#endif
enum { FOLD_CHUNK = 1024, FOLD_BLOCK = 8 };

/* `T` as it lies in memory, `A` as it is added up; LOAD, OP, STORE are macros of values. Of -n ranks all are one block. */
#define FOLD(name, T, A, LOAD, OP, STORE)                                                                         \
    FOLD_BY_CPU static void name(void *out, const void *const *in, int ranks, long n) {                           \
        A total[FOLD_CHUNK], block[FOLD_CHUNK];                                                                   \
        int step = ranks < 0 ? (ranks = -ranks) : FOLD_BLOCK;                                                     \
        for (long c = 0; c < n; c += FOLD_CHUNK) {                                                                \
            long m = n - c < FOLD_CHUNK ? n - c : FOLD_CHUNK;                                                     \
            for (int b = 0; b < ranks; b += step) {                                                               \
                A *restrict acc = b ? block : total;                                                              \
                const T *first = (const T *)in[b] + c;                                                            \
                for (long i = 0; i < m; i++) acc[i] = LOAD(first[i]);                                             \
                for (int q = b + 1; q < ranks && q < b + step; q++) {                                             \
                    const T *restrict its = (const T *)in[q] + c;                                                 \
                    for (long i = 0; i < m; i++) acc[i] = OP(acc[i], LOAD(its[i]));                               \
                }                                                                                                 \
                for (long i = 0; b && i < m; i++) total[i] = OP(total[i], block[i]);                              \
            }                                                                                                     \
            T *to = (T *)out + c;                                                                                 \
            for (long i = 0; i < m; i++) to[i] = STORE(total[i], ranks);                                          \
        }                                                                                                         \
    }

/* By integers, which every processor does many at a time: all three ways, then a choice. Adding to or taking from 0.5,
 * whose last bit is the smallest half, is right for those below the normal ones, and rounds to even. */
#define FOLD_CHOOSE(is, a, b) (((a) & -(uint32_t)(is)) | ((b) & ((uint32_t)(is)-1u)))
static inline float fold_from_half(uint16_t h) {
    uint32_t u = h & 0x7FFFu, small_bits = 0x3F000000u + u, bits, sign = (uint32_t)(h & 0x8000u) << 16;
    float small, value;
    memcpy(&small, &small_bits, 4);
    small -= 0.5f;
    memcpy(&small_bits, &small, 4);
    bits = (u << 13) + FOLD_CHOOSE(u >= 0x7C00u, 0x70000000u, 0x38000000u);
    bits = FOLD_CHOOSE(u < 0x400u, small_bits, bits) | sign;
    memcpy(&value, &bits, 4);
    return value;
}
static inline uint16_t fold_to_half(float f) {
    uint32_t u, small_bits, bits, sign;
    memcpy(&u, &f, 4);
    sign = u >> 16 & 0x8000u;
    u &= 0x7FFFFFFFu;
    float small;
    memcpy(&small, &u, 4);
    small += 0.5f;
    memcpy(&small_bits, &small, 4);
    bits = (u - 0x38000000u + 0xFFFu + (u >> 13 & 1)) >> 13;
    bits = FOLD_CHOOSE(u < 0x38800000u, small_bits - 0x3F000000u, bits);
    bits = FOLD_CHOOSE(u >= 0x47800000u, 0x7C00u, bits);
    bits = FOLD_CHOOSE(u > 0x7F800000u, 0x7E00u | (u >> 13 & 0x3FFu), bits);
    return (uint16_t)(bits | sign);
}
static inline float fold_from_brain(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint16_t fold_to_brain(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)(u >> 16 | 0x40); /* NaN stays NaN */
    return (uint16_t)((u + 0x7FFFu + (u >> 16 & 1)) >> 16);
}

#define FOLD_SAME(a) (a)
#define FOLD_TRUTH(a) ((uint8_t)((a) != 0))
#define FOLD_KEEP(a, ranks) (a)
#define FOLD_MEAN(a, ranks) ((a) / ranks)
#define FOLD_HALF(a, ranks) fold_to_half(a)
#define FOLD_HALF_MEAN(a, ranks) fold_to_half((a) / (float)ranks)
#define FOLD_BRAIN(a, ranks) fold_to_brain(a)
#define FOLD_BRAIN_MEAN(a, ranks) fold_to_brain((a) / (float)ranks)
#define FOLD_SUM(a, b) ((a) + (b))
#define FOLD_PROD(a, b) ((a) * (b))
#define FOLD_MIN(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
#define FOLD_MAX(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define FOLD_AND(a, b) ((a) & (b))
#define FOLD_OR(a, b) ((a) | (b))

/* Signed integers wrap: they are added as unsigned. */
#define FOLD_INTEGER(name, S, U)                                        \
    FOLD(sum_##name, U, U, FOLD_SAME, FOLD_SUM, FOLD_KEEP)              \
    FOLD(prod_##name, U, U, FOLD_SAME, FOLD_WRAPPED_PROD, FOLD_KEEP)    \
    FOLD(min_##name, S, S, FOLD_SAME, FOLD_MIN, FOLD_KEEP)              \
    FOLD(max_##name, S, S, FOLD_SAME, FOLD_MAX, FOLD_KEEP)
/* uint16 times uint16 would be a signed int. */
#define FOLD_WRAPPED_PROD(a, b) (1u * (a) * (b))
#define FOLD_FLOAT(name, T)                                             \
    FOLD(sum_##name, T, T, FOLD_SAME, FOLD_SUM, FOLD_KEEP)              \
    FOLD(mean_##name, T, T, FOLD_SAME, FOLD_SUM, FOLD_MEAN)             \
    FOLD(prod_##name, T, T, FOLD_SAME, FOLD_PROD, FOLD_KEEP)            \
    FOLD(min_##name, T, T, FOLD_SAME, FOLD_MIN, FOLD_KEEP)              \
    FOLD(max_##name, T, T, FOLD_SAME, FOLD_MAX, FOLD_KEEP)
#define FOLD_HALVES(name, FROM, TO, TO_MEAN)                            \
    FOLD(sum_##name, uint16_t, float, FROM, FOLD_SUM, TO)               \
    FOLD(mean_##name, uint16_t, float, FROM, FOLD_SUM, TO_MEAN)         \
    FOLD(prod_##name, uint16_t, float, FROM, FOLD_PROD, TO)             \
    FOLD(min_##name, uint16_t, float, FROM, FOLD_MIN, TO)               \
    FOLD(max_##name, uint16_t, float, FROM, FOLD_MAX, TO)

/* Sums and means of complex numbers are those of twice as many floats. NumPy's product, not C's of Annex G. */
#define FOLD_COMPLEX(name, T, part)                                                                       \
    typedef struct {                                                                                      \
        T re, im;                                                                                         \
    } fold_##name;                                                                                        \
    static inline fold_##name fold_times_##name(fold_##name a, fold_##name b) {                           \
        return (fold_##name){a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};                       \
    }                                                                                                     \
    FOLD(prod_##name, fold_##name, fold_##name, FOLD_SAME, fold_times_##name, FOLD_KEEP)                  \
    static void sum_##name(void *out, const void *const *in, int ranks, long n) {                         \
        sum_##part(out, in, ranks, 2 * n);                                                                \
    }                                                                                                     \
    static void mean_##name(void *out, const void *const *in, int ranks, long n) {                        \
        mean_##part(out, in, ranks, 2 * n);                                                               \
    }

FOLD_INTEGER(i8, int8_t, uint8_t)
FOLD_INTEGER(i16, int16_t, uint16_t)
FOLD_INTEGER(i32, int32_t, uint32_t)
FOLD_INTEGER(i64, int64_t, uint64_t)
FOLD_INTEGER(u8, uint8_t, uint8_t)
FOLD_INTEGER(u16, uint16_t, uint16_t)
FOLD_INTEGER(u32, uint32_t, uint32_t)
FOLD_INTEGER(u64, uint64_t, uint64_t)
FOLD(and_bool, uint8_t, uint8_t, FOLD_TRUTH, FOLD_AND, FOLD_KEEP)
FOLD(or_bool, uint8_t, uint8_t, FOLD_TRUTH, FOLD_OR, FOLD_KEEP)
FOLD_FLOAT(f32, float)
FOLD_FLOAT(f64, double)
FOLD_FLOAT(g, long double)
FOLD_HALVES(f16, fold_from_half, FOLD_HALF, FOLD_HALF_MEAN)
FOLD_HALVES(bf16, fold_from_brain, FOLD_BRAIN, FOLD_BRAIN_MEAN)
FOLD_COMPLEX(c64, float, f32)
FOLD_COMPLEX(c128, double, f64)
FOLD_COMPLEX(c256, long double, g)

typedef struct {
    const char *operation, *dtype;
    void (*fold)(void *out, const void *const *in, int ranks, long n);
} FoldRow;

#define FOLD_ROWS(name) {"sum", #name, sum_##name}, {"prod", #name, prod_##name}
#define FOLD_ORDERED(name) FOLD_ROWS(name), {"min", #name, min_##name}, {"max", #name, max_##name}
#define FOLD_WITH_MEAN(name) FOLD_ORDERED(name), {"mean", #name, mean_##name}

/* Integers and bools have no mean, complex numbers no order. The sum of bools is NumPy's: whether any is true. */
static const FoldRow fold_table[] = {
    FOLD_ORDERED(i8), FOLD_ORDERED(i16), FOLD_ORDERED(i32), FOLD_ORDERED(i64),
    FOLD_ORDERED(u8), FOLD_ORDERED(u16), FOLD_ORDERED(u32), FOLD_ORDERED(u64),
    FOLD_WITH_MEAN(f16), FOLD_WITH_MEAN(bf16), FOLD_WITH_MEAN(f32), FOLD_WITH_MEAN(f64), FOLD_WITH_MEAN(g),
    FOLD_ROWS(c64), {"mean", "c64", mean_c64}, FOLD_ROWS(c128), {"mean", "c128", mean_c128},
    FOLD_ROWS(c256), {"mean", "c256", mean_c256},
    {"sum", "bool", or_bool}, {"max", "bool", or_bool}, {"or", "bool", or_bool},
    {"prod", "bool", and_bool}, {"min", "bool", and_bool}, {"and", "bool", and_bool},
    {0, 0, 0},
};

#endif
