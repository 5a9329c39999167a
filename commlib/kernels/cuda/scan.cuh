// What puts things behind each other: sums of what is before a lane, and before a chunk of the data.
//
// Where order counts each chunk of the data is one worker's. A first kernel writes what each chunk has of something; in
// the next one whoever works on a chunk adds up what all before it have, so nobody waits for anybody.
#pragma once
#include "common.cuh"

#ifdef __CUDACC__
// Return the sum of all lower lanes' values.
template <class T>
__device__ inline T all_before(T value) {
    T sum = value;
    for (u32 apart = 1; apart < LANES; apart *= 2) {
        T other = __shfl_up_sync(EVERY_LANE, sum, apart);
        if (lane() >= apart) sum += other;
    }
    return sum - value;
}

// Return a bit for each lane, to all of them.
__device__ inline u32 all_bits(bool value) { return __ballot_sync(EVERY_LANE, value); }
__device__ inline u32 ones(u32 word) { return (u32)__popc(word); }
// Return the number of the lowest bit that is set; there must be one.
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

// Sums are those of SUPER chunks each, which are zero at first, and then those of the chunks.
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
