// The operations of commlib/kernels/host/reduce.py, one type each: the widened element type, the combination of two
// values, and the final step.
#pragma once
#include "elements.cuh"

// Integers wrap around: unsigned arithmetic, because signed overflow is undefined in C++.
template <class T>
__device__ inline T plus(T a, T b) {
    return (T)((u64)a + (u64)b);
}
template <class T>
__device__ inline T times(T a, T b) {
    return (T)((u64)a * (u64)b);
}
__device__ inline float plus(float a, float b) { return a + b; }
__device__ inline float times(float a, float b) { return a * b; }
__device__ inline double plus(double a, double b) { return a + b; }
__device__ inline double times(double a, double b) { return a * b; }
__device__ inline FourBytes plus(FourBytes a, FourBytes b) {  // the highest bits separately, to avoid carries
    u32 low = (a.bytes & 0x7f7f7f7fu) + (b.bytes & 0x7f7f7f7fu);
    return {low ^ ((a.bytes ^ b.bytes) & 0x80808080u)};
}
template <class Part>
__device__ inline Complex<Part> plus(Complex<Part> a, Complex<Part> b) {
    return {a.real + b.real, a.imaginary + b.imaginary};
}
template <class Part>
__device__ inline Complex<Part> times(Complex<Part> a, Complex<Part> b) {
    return {a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
}

// The sum of 64-bit integers, which may need more than 64 bits: the sum of their high halves, which include the sign,
// and the sum of their low halves, as in kernels/host/exact_mean.py.
template <bool SIGNED>
struct Halves {
    i64 high, low;
};
template <bool SIGNED>
__device__ inline Halves<SIGNED> plus(Halves<SIGNED> a, Halves<SIGNED> b) {
    return {a.high + b.high, a.low + b.low};
}

// The mean of integers needs 64 or 128 bits, because the sum must not wrap around before the division.
template <class T>
__device__ inline auto to_64_bits(T x) {
    if constexpr ((T)-1 < (T)0) return (i64)x;
    else return (u64)x;
}
__device__ inline Halves<true> to_64_bits(i64 x) { return {x >> 32, x & 0xffffffff}; }
__device__ inline Halves<false> to_64_bits(u64 x) { return {(i64)(x >> 32), (i64)(x & 0xffffffffu)}; }
__device__ inline float to_64_bits(float x) { return x; }
__device__ inline double to_64_bits(double x) { return x; }
template <class Part>
__device__ inline Complex<Part> to_64_bits(Complex<Part> x) {
    return x;
}

__device__ inline u64 divide(u64 total, i64 divisor) { return total / (u64)divisor; }
__device__ inline i64 divide(i64 total, i64 divisor) {
    // Truncated toward zero. Magnitudes mostly fit 32 bits, which a GPU divides several times as fast.
    u64 quotient = (total < 0 ? 0 - (u64)total : (u64)total) / (u64)divisor;
    return (i64)(total < 0 ? 0 - quotient : quotient);
}
template <bool SIGNED>
__device__ inline auto divide(Halves<SIGNED> total, i64 divisor) {
    i64 first = total.high / divisor;
    if (first * divisor > total.high) --first;  // round down
    i64 rest = (i64)((u64)(total.high - first * divisor) << 32) + total.low, second = rest / divisor;
    u64 mean = ((u64)first << 32) + (u64)second;
    if constexpr (SIGNED) return (i64)mean + ((i64)mean < 0 && second * divisor != rest);
    else return mean;
}
__device__ inline float divide(float total, i64 divisor) { return total / (float)divisor; }
__device__ inline double divide(double total, i64 divisor) { return total / (double)divisor; }
template <class Part>
__device__ inline Complex<Part> divide(Complex<Part> total, i64 divisor) {
    // Python's division by a complex number without imaginary part: infinity * 0 makes the other part NaN.
    Part none = 0, by = (Part)divisor;
    return {(total.real + total.imaginary * none) / by, (total.imaginary - total.real * none) / by};
}

struct Sum {
    template <class T>
    static __device__ auto widen(T x) {
        return ::widen(x);
    }
    template <class Wide>
    static __device__ Wide combine(Wide a, Wide b) {
        return plus(a, b);
    }
    template <class Wide>
    static __device__ Wide finish(Wide total, i64) {
        return total;
    }
};

struct Mean : Sum {
    template <class T>
    static __device__ auto widen(T x) {
        return to_64_bits(::widen(x));
    }
    template <class Wide>
    static __device__ auto finish(Wide total, i64 divisor) {
        return divide(total, divisor);
    }
};

struct Prod : Sum {
    template <class Wide>
    static __device__ Wide combine(Wide a, Wide b) {
        return times(a, b);
    }
};

// NaN wins a minimum or maximum, as in numpy: "not a <= b and not a != a" selects b, which may be NaN.
struct Min : Sum {
    template <class Wide>
    static __device__ Wide combine(Wide a, Wide b) {
        return a <= b || a != a ? a : b;
    }
};

struct Max : Sum {
    template <class Wide>
    static __device__ Wide combine(Wide a, Wide b) {
        return a >= b || a != a ? a : b;
    }
};

struct And : Sum {
    template <class Wide>
    static __device__ Wide combine(Wide a, Wide b) {
        return a & b;
    }
};

struct Or : Sum {
    template <class Wide>
    static __device__ Wide combine(Wide a, Wide b) {
        return a | b;
    }
};

// The unit of a combination: mostly one element, but four elements in a WORD for some one-byte types.
template <class Operation, class T, bool WORD>
struct Part {
    typedef T Type;
    static constexpr u32 COUNT = 1;
};
template <class Word>
struct FourAtOnce {
    typedef Word Type;
    static constexpr u32 COUNT = 4;
};
template <>
struct Part<Sum, Int8, true> : FourAtOnce<FourBytes> {};
template <>
struct Part<Sum, Uint8, true> : FourAtOnce<FourBytes> {};
template <>
struct Part<And, Bool, true> : FourAtOnce<FourBools> {};
template <>
struct Part<Or, Bool, true> : FourAtOnce<FourBools> {};
