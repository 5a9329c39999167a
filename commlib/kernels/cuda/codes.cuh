// Codes: round a number in units of its block to a code, and read and write codes. See kernels/host/quantise.py.
//
// CODE: one of the four below. AT_RANDOM: whether integers are rounded at random to one of the two neighbors.
#pragma once
#include "floats.cuh"
#include "memory.cuh"
#include "noise.cuh"

#define INT8 0
#define INT4 1
#define E4M3 2
#define E5M2 3

#define CODE_BITS (CODE == INT4 ? 4u : 8u)

// Whether the GPU has instructions for small floats, as from sm_89 on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && CODE >= E4M3
#define CONVERTS 1
#else
#define CONVERTS 0
#endif

// Return the number of bytes of the codes of n elements of a block.
__device__ inline u32 bytes_of(u32 n) { return CODE == INT4 ? (n + 1) / 2 : n; }

// Return 2^exponent.
__device__ inline float power_of_two(i32 exponent) { return float_of((u32)(exponent + 127) << 23); }

#if CODE == INT8 || CODE == INT4

// 1.5 * 2^23: adding a number below 2^22 rounds it to an integer, to nearest even, in the lowest bits.
#define TO_INTEGER 12582912.0f

__device__ inline float least_unit() { return LEAST_NORMAL; }

// Return the code of a number, given in units: its integer in the lowest bits.
__device__ inline u32 code_of(float wanted, float top, u32 index, Keys keys) {
    float nearest = wanted + TO_INTEGER;
#if AT_RANDOM
    float near = nearest - TO_INTEGER;
    float rest = wanted - near;  // exact, at most a half: the probability of the neighbor on its side
    float step = float_of(bits_of(1.0f) | (bits_of(rest) & SIGN));
    float chosen = near + (uniform(index, keys) < float_of(magnitude_of(rest)) ? step : 0.0f);
    nearest = lesser(greater(chosen, -top), top) + TO_INTEGER;
#endif
    return (bits_of(nearest) - bits_of(TO_INTEGER)) & ((1u << CODE_BITS) - 1);
}

__device__ inline float decoded(u32 code, float unit) {
    return (float)((i32)(code << (32 - CODE_BITS)) >> (32 - CODE_BITS)) * unit;
}

#else

#define MANTISSA (CODE == E4M3 ? 3 : 2)
#define EXPONENT (CODE == E4M3 ? -6 : -14)  // of the least normal number
#define SHIFT (23 - MANTISSA)
#define BIAS ((u32)(126 + EXPONENT) << MANTISSA)

// Return the number whose addition rounds to the least denormal code, to nearest even.
__device__ inline float to_denormal() { return power_of_two(EXPONENT - MANTISSA + 23); }

// Return the unit whose product with the least denormal code is the least normal float32.
__device__ inline float least_unit() { return power_of_two(MANTISSA - EXPONENT - 126); }

// Return the code of a number, given in units.
__device__ inline u32 code_of(float wanted, float, u32, Keys) {
    u32 size = magnitude_of(wanted);
    u32 normal = ((size + ((1u << (SHIFT - 1)) - 1) + (size >> SHIFT & 1u)) >> SHIFT) - BIAS;
    u32 denormal = bits_of(float_of(size) + to_denormal()) - bits_of(to_denormal());
    return (float_of(size) < power_of_two(EXPONENT) ? denormal : normal) | (bits_of(wanted) & SIGN) >> 24;
}

// A code's bits at the position of a float32's bits, normal or denormal, are the number up to the exponent's bias.
__device__ inline float decoded(u32 code, float unit) {
    float small = float_of((code & 127u) << SHIFT | (code & 128u) << 24);
    return small * power_of_two(126 + EXPONENT) * unit;
}

#if CONVERTS
#if CODE == E4M3
#define CONVERT "cvt.rn.satfinite.e4m3x2.f32 "
#else
#define CONVERT "cvt.rn.satfinite.e5m2x2.f32 "
#endif

// Return the codes of four numbers, given in units, one per byte from the lowest on. The same as `code_of` for all
// numbers except NaN and numbers that round above the greatest code.
__device__ inline u32 converted(float a, float b, float c, float d) {
    u32 word;
    asm("{.reg .b16 low, high; " CONVERT "low, %2, %1; " CONVERT "high, %4, %3; mov.b32 %0, {low, high};}"
        : "=r"(word)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return word;
}
#endif

#endif

// Return four elements with one code per byte of a word, starting at its lowest bit or at another one.
__device__ inline Four four_decoded(u32 word, float unit) {
    Four v;
    UNROLL for (u32 k = 0; k < 4; ++k) v.at[k] = decoded(word >> (8 * k) & 255u, unit);
    return v;
}
