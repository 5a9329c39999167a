// Half precision and atomics as g++ has them.
#pragma once
#include <cstring>

inline float half_to_float(unsigned short bits) {
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return static_cast<float>(half);
}
inline unsigned short float_to_half(float value) {
    _Float16 half = static_cast<_Float16>(value);
    unsigned short bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}

template <class T>
inline T atomicAdd(T *at, T value) {
    T before = *at;
    *at = before + value;
    return before;
}
