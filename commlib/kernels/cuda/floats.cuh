// Float bits: float32 operations for the codecs.
#pragma once
#include "common.cuh"

#define INFINITY_BITS 0x7F800000u
#define MAGNITUDE 0x7FFFFFFFu
#define SIGN 0x80000000u
#define LEAST_NORMAL float_of(0x00800000u)
#define GREATEST float_of(0x7F7FFFFFu)
#define NOT_A_NUMBER float_of(0x7FC00000u)

// Return the bits of |value|. They compare like the numbers, with infinities and NaN last.
__device__ inline u32 magnitude_of(float value) { return bits_of(value) & MAGNITUDE; }
__device__ inline bool is_finite(float value) { return magnitude_of(value) < INFINITY_BITS; }
__device__ inline bool is_nan(float value) { return magnitude_of(value) > INFINITY_BITS; }
__device__ inline float lesser(float a, float b) { return a < b ? a : b; }
__device__ inline float greater(float a, float b) { return a > b ? a : b; }
