// Values of sparse payloads. Their kinds are numbers, as in kernels/host/sparse.py.
#pragma once
#include "floats.cuh"
#include "memory.cuh"

#define FLOAT32 0u
#define FLOAT16 1u
#define HEADER 8u  // bytes

__device__ inline u32 value_bytes(u32 kind) { return kind == FLOAT32 ? 4 : 2; }

// Round to the bits of float16 or bfloat16. A float16 NaN equals the host CPU's.
__device__ inline u16 half_of(u32 kind, float value) {
    u32 bits = bits_of(value);
    if (kind != FLOAT16) return is_nan(value) ? 0x7FC0 : (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    if (is_nan(value)) return (u16)((bits & SIGN) >> 16 | 0x7E00 | (bits >> 13 & 0x3FF));
    return float_to_half(value);
}

__device__ inline float full_of(u32 kind, u16 bits) {
    return kind == FLOAT16 ? half_to_float(bits) : float_of((u32)bits << 16);
}

// Return a value minus its decoded value. Not finite if either is not.
__device__ inline float loss(u32 kind, float value) {
    return value - (kind == FLOAT32 ? value : full_of(kind, half_of(kind, value)));
}

__device__ inline void store_value(u8 *payload, u32 kind, u64 i, float value) {
    if (kind == FLOAT32) {
        store(payload + HEADER + 4 * i, bits_of(value));
    } else {
        store(payload + HEADER + 2 * i, half_of(kind, value));
    }
}

__device__ inline float load_value(const u8 *payload, u32 kind, u64 i) {
    if (kind == FLOAT32) return float_of(load<u32>(payload + HEADER + 4 * i));
    return full_of(kind, load<u16>(payload + HEADER + 2 * i));
}
