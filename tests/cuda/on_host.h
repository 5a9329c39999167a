// What CUDA's words are when g++ compiles a kernel: a launch is a loop over its threads, and a worker is one thread.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#include "words.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define LANES 1u

namespace launch {
inline thread_local unsigned long long number = 0, in_all = 1;

template <class... A, size_t... I>
void call(void (*kernel)(A...), void **args, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<A> *>(args[I])...);
}

template <class... A>
void run(void (*kernel)(A...), unsigned long long threads, void **args) {
    in_all = threads;
    for (number = 0; number < threads; ++number) call(kernel, args, std::index_sequence_for<A...>{});
}

template <class... A>
void sizes(void (*)(A...), int *out) {
    int at = 0;
    ((out[at++] = sizeof(A)), ...);
    out[at] = 0;
}
}  // namespace launch

// `launch_NAME(threads, args)` runs a kernel as cuLaunchKernel would; `sizes_NAME` tells how many bytes its arguments
// have, which the tests compare with what they are given.
#define KERNEL(name)                                                                                                  \
    extern "C" void launch_##name(unsigned long long threads, void **args) { launch::run(name, threads, args); }      \
    extern "C" void sizes_##name(int *out) { launch::sizes(name, out); }

inline unsigned long long thread() { return launch::number; }
inline unsigned long long threads() { return launch::in_all; }
inline unsigned int all_max(unsigned int value) { return value; }
template <class T>
inline T all_sum(T value) { return value; }
inline bool all_or(bool value) { return value; }
inline unsigned int bits_apart(unsigned int word, unsigned int) { return word; }

inline unsigned int bits_of(float value) {
    unsigned int bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float float_of(unsigned int bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
