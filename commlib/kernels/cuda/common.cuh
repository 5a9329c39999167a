// The common include of all kernels. NVRTC compiles these files for a GPU; tests compile the same files with g++ and
// run a launch as a loop (tests/cuda/on_host.h and on_lanes.h define the names below for them).
//
// A kernel is written for *workers*: groups of LANES threads that process the data together, LANES adjacent elements at
// a time, and may combine their results (`all_max`, `all_sum`, `all_or`). On a GPU a worker is a warp. In the tests it
// is one thread, for which combining is a no-op, or 32 fibers; so no kernel may require a certain number of lanes. A
// kernel with independent items uses `thread()` and `threads()` instead, which number the lanes of all workers.
//
// Arithmetic follows IEEE 754, with one rounding per operation: no fused multiply-adds (compiled with --fmad=false), no
// flushing of denormal numbers. Results therefore equal the host kernels', bit for bit.
#pragma once

typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Used after __global__: limits registers to keep this many blocks of 8 workers resident on a multiprocessor. A launch
// has up to 8 blocks per multiprocessor. Blocks that are not resident begin when others end, and alone do not saturate
// the memory. The best value is therefore 8, else a number that divides 8.
#define RESIDENT(blocks) __launch_bounds__(256, blocks)

#ifdef __CUDACC__

#define LANES 32u
#define EVERY_LANE 0xffffffffu
#ifndef KERNEL
#define KERNEL(name)  // after each kernel: tests define the launch with it
#endif

__device__ inline u64 thread() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline u64 threads() { return (u64)gridDim.x * blockDim.x; }

// Return the greatest of all lanes' values, to all lanes.
__device__ inline u32 all_max(u32 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(EVERY_LANE, value);
#else
    for (u32 distance = LANES / 2; distance > 0; distance /= 2) {
        u32 other = __shfl_xor_sync(EVERY_LANE, value, distance);
        value = value > other ? value : other;
    }
    return value;
#endif
}

// Return the sum of all lanes' values, to all lanes; the order is fixed, but differs from the host's.
template <class T>
__device__ inline T all_sum(T value) {
    for (u32 distance = LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(EVERY_LANE, value, distance);
    return value;
}

// Return the bitwise or of the words of this lane and of all lanes at multiples of `distance`, a power of two.
__device__ inline u32 bits_apart(u32 word, u32 distance) {
    for (; distance < LANES; distance *= 2) word |= __shfl_xor_sync(EVERY_LANE, word, distance);
    return word;
}

// Return whether any lane's value is true, to all lanes.
__device__ inline bool all_or(bool value) { return __any_sync(EVERY_LANE, value); }

#ifdef __CUDA_ARCH__
__device__ inline float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ inline u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif
__device__ inline u32 bits_of(float value) { return __float_as_uint(value); }
__device__ inline float float_of(u32 bits) { return __uint_as_float(bits); }

#endif

__device__ inline u64 worker() { return thread() / LANES; }
__device__ inline u64 workers() { return threads() / LANES; }
__device__ inline u32 lane() { return (u32)(thread() % LANES); }
