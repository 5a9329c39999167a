// Prefix sums: over the lanes before a lane, and over the chunks before a chunk of the data.
//
// For ordered results, each chunk of the data belongs to one worker. A first kernel writes the sums of each chunk. In
// the next kernel, a chunk's worker adds up the sums of all earlier chunks, so no worker waits for another.
#pragma once
#include "common.cuh"

#ifdef __CUDACC__
// Return the sum of all lower lanes' values.
template <class T>
__device__ inline T all_before(T value) {
    T sum = value;
    for (u32 distance = 1; distance < LANES; distance *= 2) {
        T other = __shfl_up_sync(EVERY_LANE, sum, distance);
        if (lane() >= distance) sum += other;
    }
    return sum - value;
}

// Return a bit for each lane, to all lanes.
__device__ inline u32 all_bits(bool value) { return __ballot_sync(EVERY_LANE, value); }
__device__ inline u32 ones(u32 word) { return (u32)__popc(word); }
// Return the index of the lowest set bit of a nonzero word.
__device__ inline u32 lowest(u32 word) { return (u32)__ffs((int)word) - 1; }
#else
template <class T>
inline T all_before(T) { return 0; }
inline u32 all_bits(bool value) { return value; }
inline u32 ones(u32 word) { return (u32)__builtin_popcount(word); }
inline u32 lowest(u32 word) { return (u32)__builtin_ctz(word); }
#endif

struct Pair {
    u64 first, second;
};

// The sums of SUPER chunks each, initially zero, followed by the sums of the chunks.
#define SUPER 64u
#define SUPERS 128u

// Write a chunk's sums; for one lane.
__device__ inline void write_sums(Pair *sums, u64 chunk, Pair own) {
    sums[SUPERS + chunk] = own;
    atomicAdd(&sums[chunk / SUPER].first, own.first);
    atomicAdd(&sums[chunk / SUPER].second, own.second);
}

// Return the sums of all chunks before this one, to all lanes.
__device__ inline Pair sums_before(const Pair *sums, u64 chunk) {
    u64 first = 0, second = 0, supers = chunk / SUPER;
    for (u64 i = lane(); i < supers; i += LANES) first += sums[i].first, second += sums[i].second;
    for (u64 i = supers * SUPER + lane(); i < chunk; i += LANES) {
        first += sums[SUPERS + i].first;
        second += sums[SUPERS + i].second;
    }
    return {all_sum(first), all_sum(second)};
}
