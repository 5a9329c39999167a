// One code: how a number in units of its block is rounded, written and read. See kernels/host/quantise.py.
//
// CODE: one of the four below. AT_RANDOM: whether integers are rounded to one of both neighbours by chance.
#pragma once
#include "floats.cuh"
#include "noise.cuh"

#define INT8 0
#define INT4 1
#define E4M3 2
#define E5M2 3

#define CODE_BITS (CODE == INT4 ? 4u : 8u)

// Return how many bytes the codes of n elements of a block take.
__device__ inline u32 bytes_of(u32 n) { return CODE == INT4 ? (n + 1) / 2 : n; }

// Return 2^exponent.
__device__ inline float power_of_two(i32 exponent) { return float_of((u32)(exponent + 127) << 23); }

#if CODE == INT8 || CODE == INT4

// 1.5 * 2^23: a number below 2^22 that is added to it is rounded to an integer, to nearest even, in the lowest bits.
#define TO_INTEGER 12582912.0f

__device__ inline float least_unit() { return LEAST_NORMAL; }

__device__ inline float rounded(float wanted, float top, u32 index, Keys keys) {
    float near = (wanted + TO_INTEGER) - TO_INTEGER;
#if AT_RANDOM
    float rest = wanted - near;  // exact, at most a half: the chance of the neighbour on its side
    float step = float_of(bits_of(1.0f) | (bits_of(rest) & SIGN));
    float chosen = near + (uniform(index, keys) < float_of(magnitude_of(rest)) ? step : 0.0f);
    return lesser(greater(chosen, -top), top);
#else
    return near;
#endif
}

__device__ inline u32 code_of(float r) {
    return (bits_of(r + TO_INTEGER) - bits_of(TO_INTEGER)) & ((1u << CODE_BITS) - 1);
}

__device__ inline float decoded(u32 code, float unit) {
    return (float)((i32)(code << (32 - CODE_BITS)) >> (32 - CODE_BITS)) * unit;
}

#else

#define MANTISSA (CODE == E4M3 ? 3 : 2)
#define EXPONENT (CODE == E4M3 ? -6 : -14)  // of the least normal number
#define SHIFT (23 - MANTISSA)
#define BIAS ((u32)(126 + EXPONENT) << MANTISSA)

// Return what rounds to the least denormal code, to nearest even, what is added to it.
__device__ inline float to_denormal() { return power_of_two(EXPONENT - MANTISSA + 23); }

// Return the unit whose product with the least denormal code is the least normal float32.
__device__ inline float least_unit() { return power_of_two(MANTISSA - EXPONENT - 126); }

__device__ inline float rounded(float wanted, float, u32, Keys) {
    u32 size = magnitude_of(wanted);
    u32 normal = (size + ((1u << (SHIFT - 1)) - 1) + (size >> SHIFT & 1u)) & (0xFFFFFFFFu << SHIFT);
    u32 denormal = bits_of((float_of(size) + to_denormal()) - to_denormal());
    return float_of((float_of(size) < power_of_two(EXPONENT) ? denormal : normal) | (bits_of(wanted) & SIGN));
}

__device__ inline u32 code_of(float r) {
    u32 size = magnitude_of(r);
    u32 denormal = bits_of(float_of(size) + to_denormal()) - bits_of(to_denormal());
    return (float_of(size) < power_of_two(EXPONENT) ? denormal : (size >> SHIFT) - BIAS) | (bits_of(r) & SIGN) >> 24;
}

__device__ inline float decoded(u32 code, float unit) {
    u32 size = code & 127u;
    u32 normal = (size + BIAS) << SHIFT;
    u32 denormal = bits_of((float)(i32)size * power_of_two(EXPONENT - MANTISSA));
    return float_of((size < 1u << MANTISSA ? denormal : normal) | (code & 128u) << 24) * unit;
}

#endif
