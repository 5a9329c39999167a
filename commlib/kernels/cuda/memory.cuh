// Memory: access four floats at once at aligned addresses, and numbers at any address, because payloads are bytes.
#pragma once
#include "common.cuh"

#ifdef __CUDACC__
#define UNROLL _Pragma("unroll")  // arrays stay in registers only if all their indices are known
#else
#define UNROLL
#endif

struct alignas(16) Four {
    float at[4];
};

struct alignas(8) FourHalves {
    u16 at[4];
};

// Return whether a T can be accessed at this address at once; true for null, too.
template <class T>
__device__ inline bool aligned(const void *at) { return (u64)at % alignof(T) == 0; }

// Write the bytes of a number to any address.
template <class T>
__device__ inline void store(u8 *at, T value) {
    if (aligned<T>(at)) {
        *(T *)at = value;
    } else {
        for (u32 i = 0; i < sizeof(T); ++i) at[i] = (u8)(value >> (8 * i));
    }
}

// Return the number whose bytes are at any address.
template <class T>
__device__ inline T load(const u8 *at) {
    if (aligned<T>(at)) return *(const T *)at;
    T value = 0;
    for (u32 i = 0; i < sizeof(T); ++i) value |= (T)((T)at[i] << (8 * i));
    return value;
}

// Write a value, or add it to the current one.
__device__ inline void put(float *at, float value, bool add) { *at = add ? *at + value : value; }
__device__ inline void put(Four *at, Four value, bool add) {
    if (add) {
        Four old = *at;
        UNROLL for (u32 k = 0; k < 4; ++k) value.at[k] = old.at[k] + value.at[k];
    }
    *at = value;
}
