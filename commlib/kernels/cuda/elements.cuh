// Element types: one for each dtype of commlib/dtypes.py, with the capitalized name, such as Bfloat16. `widen` converts
// an element to the type of the computation. The conversion back, as in `(Bfloat16)value`, rounds to nearest even.
#pragma once
#include "common.cuh"

typedef i8 Int8;
typedef i16 Int16;
typedef i32 Int32;
typedef i64 Int64;
typedef u8 Uint8;
typedef u16 Uint16;
typedef u32 Uint32;
typedef u64 Uint64;
typedef float Float32;
typedef double Float64;

// Round float64 to float32 such that a second rounding equals a single one: a nonzero loss sets the last bit.
__device__ inline float to_odd(double value) {
    float rounded = (float)value;
    u32 bits = bits_of(rounded);
    if ((rounded < 0 ? -rounded : rounded) > (value < 0 ? -value : value)) bits -= 1;
    if (float_of(bits) != value) bits |= 1;
    return float_of(bits);
}

struct Float16 {
    u16 bits;

    Float16() = default;
    __device__ explicit Float16(float value) : bits(float_to_half(value)) {}
    __device__ explicit Float16(double value) : Float16(to_odd(value)) {}
    template <class Integer>
    __device__ explicit Float16(Integer value) : Float16((float)value) {}  // rounded twice, as in numpy
};

struct Bfloat16 {
    u16 bits;

    Bfloat16() = default;
    __device__ explicit Bfloat16(float value) {  // other types convert to float32 first, as on the host
        u32 wide = bits_of(value);
        // The GPU's NaN has all bits set: rounding would turn it into -0.
        if (value != value) bits = (u16)(wide >> 16 | 0x40);
        else bits = (u16)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    }
};

struct Bool {
    u8 byte;

    Bool() = default;
    template <class Wide>
    __device__ explicit Bool(Wide value) : byte(value != 0) {}
};

// A word of four integers of either signedness, or of four booleans.
struct FourBytes {
    u32 bytes;
};

struct FourBools {
    u32 bytes;

    FourBools() = default;
    __device__ explicit FourBools(u32 ones) : bytes(ones) {}
};

template <class Part>
struct Complex {
    Part real, imaginary;
};
typedef Complex<float> Complex64;
typedef Complex<double> Complex128;

__device__ inline float widen(Float16 x) { return half_to_float(x.bits); }
__device__ inline float widen(Bfloat16 x) { return float_of((u32)x.bits << 16); }
__device__ inline u8 widen(Bool x) { return x.byte != 0; }  // any nonzero byte is true
__device__ inline u32 widen(FourBools x) {
    u32 low = (x.bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu;  // sets the highest bit of a byte if another bit is set
    return (low | x.bytes) >> 7 & 0x01010101u;
}
template <class T>
__device__ inline T widen(T x) {
    return x;
}
