/* Arithmetic: n arrays into one, element by element, in the order of the ranks. */
/* Vectorize the loops over a block; with the sanitizers only compiling would be slow.
 */
#if defined(__OPTIMIZE__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#pragma GCC optimize("O3")
#endif

#include <string.h>

#include "emulator.h"

enum { BLOCK = 512 }; /* elements that stay in the first cache while ranks are added */

size_t type_bytes(int type)
{
    static const size_t bytes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return bytes[type];
}

static inline float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_half(uint16_t half)
{
    const uint32_t magnitude = half & 0x7fffu, sign = (uint32_t)(half & 0x8000u) << 16;
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    const uint32_t subnormal = as_bits((float)magnitude * 0x1p-24f);
    const uint32_t special = (magnitude << 13) | 0x7f800000u;
    uint32_t bits = magnitude < 0x0400u ? subnormal : normal;
    bits = magnitude >= 0x7c00u ? special : bits;
    return as_float(bits | sign);
}

static inline uint16_t to_half(float value)
{
    const uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffffu;
    /* To nearest even: the bits that fall off are rounded by an addition, which may
     * carry into the exponent, up to infinity. */
    const uint32_t normal =
        (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    /* Below 2^-14 the addition of 0.5 does the same: its unit is 2^-24. */
    const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x47800000u ? special : half;
    return (uint16_t)(half | ((bits >> 16) & 0x8000u));
}

static inline float from_bfloat16(uint16_t value)
{
    return as_float((uint32_t)value << 16);
}

static inline uint16_t to_bfloat16(float value)
{
    const uint32_t bits = as_bits(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

/* Signed integers wrap around as unsigned ones do, which C leaves undefined for them:
 * W is the type of sums and products. A NaN loses against a number in max and min. */
#define SUM(T, W, a, b) (T)((W)(a) + (W)(b))
#define PROD(T, W, a, b) (T)((W)(a) * (W)(b))
#define MAX(T, W, a, b) ((b) > (a) || (a) != (a) ? (b) : (a))
#define MIN(T, W, a, b) ((b) < (a) || (a) != (a) ? (b) : (a))
#define SAME(value, n) (value)
#define MEAN(value, n) ((value) / (n))

/* T: stored, A: accumulated, W: see above. */
#define DEFINE_LOOP(NAME, T, A, W, LOAD, STORE, COMBINE, FINISH)            \
    static void NAME(T *out, const T *const *in, int n_ranks, size_t count) \
    {                                                                       \
        A total[BLOCK];                                                     \
        const A divisor = (A)n_ranks;                                       \
        (void)divisor;                                                      \
        for (size_t start = 0; start < count; start += BLOCK) {             \
            const size_t n = count - start < BLOCK ? count - start : BLOCK; \
            for (size_t i = 0; i < n; i++)                                  \
                total[i] = LOAD(in[0][start + i]);                          \
            for (int rank = 1; rank < n_ranks; rank++) {                    \
                const T *values = in[rank] + start;                         \
                for (size_t i = 0; i < n; i++) {                            \
                    const A value = LOAD(values[i]);                        \
                    total[i] = COMBINE(A, W, total[i], value);              \
                }                                                           \
            }                                                               \
            for (size_t i = 0; i < n; i++)                                  \
                out[start + i] = STORE(FINISH(total[i], divisor));          \
        }                                                                   \
    }

#define DEFINE_TYPE(NAME, T, A, W, LOAD, STORE)                              \
    DEFINE_LOOP(NAME##_sum, T, A, W, LOAD, STORE, SUM, SAME)                 \
    DEFINE_LOOP(NAME##_prod, T, A, W, LOAD, STORE, PROD, SAME)               \
    DEFINE_LOOP(NAME##_max, T, A, W, LOAD, STORE, MAX, SAME)                 \
    DEFINE_LOOP(NAME##_min, T, A, W, LOAD, STORE, MIN, SAME)                 \
    DEFINE_LOOP(NAME##_avg, T, A, W, LOAD, STORE, SUM, MEAN)                 \
    static void reduce_##NAME(void *out, const void *const *in, int n_ranks, \
                              size_t count, int op)                          \
    {                                                                        \
        const T *const *arrays = (const T *const *)in;                       \
        switch (op) {                                                        \
        case ncclSum: NAME##_sum(out, arrays, n_ranks, count); break;        \
        case ncclProd: NAME##_prod(out, arrays, n_ranks, count); break;      \
        case ncclMax: NAME##_max(out, arrays, n_ranks, count); break;        \
        case ncclMin: NAME##_min(out, arrays, n_ranks, count); break;        \
        default: NAME##_avg(out, arrays, n_ranks, count); break;             \
        }                                                                    \
    }

#define AS_IS(value) (value)

DEFINE_TYPE(int8, int8_t, int8_t, uint32_t, AS_IS, AS_IS)
DEFINE_TYPE(uint8, uint8_t, uint8_t, uint32_t, AS_IS, AS_IS)
DEFINE_TYPE(int32, int32_t, int32_t, uint32_t, AS_IS, AS_IS)
DEFINE_TYPE(uint32, uint32_t, uint32_t, uint32_t, AS_IS, AS_IS)
DEFINE_TYPE(int64, int64_t, int64_t, uint64_t, AS_IS, AS_IS)
DEFINE_TYPE(uint64, uint64_t, uint64_t, uint64_t, AS_IS, AS_IS)
DEFINE_TYPE(float16, uint16_t, float, float, from_half, to_half)
DEFINE_TYPE(float32, float, float, float, AS_IS, AS_IS)
DEFINE_TYPE(float64, double, double, double, AS_IS, AS_IS)
DEFINE_TYPE(bfloat16, uint16_t, float, float, from_bfloat16, to_bfloat16)

void reduce(void *out, const void *const *in, int n, size_t count, int type, int op)
{
    static void (*const functions[ncclNumTypes])(void *, const void *const *, int,
                                                 size_t, int) = {
        reduce_int8,   reduce_uint8,   reduce_int32,   reduce_uint32,  reduce_int64,
        reduce_uint64, reduce_float16, reduce_float32, reduce_float64, reduce_bfloat16,
    };
    functions[type](out, in, n, count, op);
}
