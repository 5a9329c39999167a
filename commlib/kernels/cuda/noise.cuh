// Counter-based random numbers, as in kernels/host/noise.py: element i of an array has its own.
#pragma once
#include "common.cuh"

// Scatter the bits of a counter over a word: the finalizer of SplitMix64 (Steele, Lea and Flood 2014).
__device__ inline u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

#define STEP 0x9E3779B97F4A7C15ull  // the step between counters, and the first counter

struct Keys {
    u32 first, second;
};

// Return two 32-bit keys made from a seed. Neighboring seeds give unrelated keys.
__device__ inline Keys keys_of(u64 seed) {
    u64 mixed = mix(seed + STEP);
    return {(u32)mixed, (u32)(mixed >> 32)};
}

// Return the random number of an element: a multiple of 2^-24, at least 0 and less than 1. Wellons' "lowbias32" with
// keys.
__device__ inline float uniform(u32 index, Keys keys) {
    u32 h = index ^ keys.first;
    h = (h ^ (h >> 16)) * 0x7FEB352Du;
    h = h ^ keys.second;
    h = (h ^ (h >> 15)) * 0x846CA68Bu;
    h = h ^ (h >> 16);
    return (float)(i32)(h >> 8) * 0x1p-24f;
}
