// Histograms of digits, and the digit of the k-th largest number.
#pragma once
#include "scan.cuh"

#define DIGITS 2048u  // possible values of a digit
#define DIGITS_PER_LANE (DIGITS / LANES)

// The layout of a table of counts lets all lanes read their consecutive digits with coalesced loads.
__device__ inline u32 place_of(u32 digit) { return digit % DIGITS_PER_LANE * LANES + digit / DIGITS_PER_LANE; }

#ifdef __CUDACC__
// A block counts in shared memory, because threads of all blocks would contend for the few digits that most numbers
// have. Every thread of a block must begin and end.
__device__ inline u32 *begin_counts(u32 *) {
    __shared__ u32 counts[DIGITS];
    for (u32 i = threadIdx.x; i < DIGITS; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    return counts;
}

__device__ inline void count_digit(u32 *counts, u32 digit) { atomicAdd(&counts[digit], 1u); }

__device__ inline void end_counts(const u32 *counts, u32 *table) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < DIGITS; i += blockDim.x) {
        if (counts[i]) atomicAdd(&table[place_of(i)], counts[i]);
    }
}

// Return a value that a block's first worker computes, to all threads of the block, which must all call it: if all
// workers read the table, this would take as long as reading the data.
template <class Compute>
__device__ inline auto once(Compute compute) {
    __shared__ decltype(compute()) result;
    if (threadIdx.x < LANES) {
        auto own = compute();
        if (threadIdx.x == 0) result = own;
    }
    __syncthreads();
    return result;
}
#else
template <class Compute>
inline auto once(Compute compute) { return compute(); }
inline u32 *begin_counts(u32 *table) { return table; }
inline void count_digit(u32 *table, u32 digit) { ++table[place_of(digit)]; }
inline void end_counts(const u32 *, u32 *) {}
#endif

struct Counted {
    u32 all, high;
};

// Return the number of all numbers, and the number of those with at least this digit, to all lanes.
__device__ inline Counted count_all(const u32 *table, u32 digit) {
    Counted own = {0, 0};
    for (u32 j = 0; j < DIGITS_PER_LANE; ++j) {
        u32 here = table[j * LANES + lane()];
        own.all += here;
        if (lane() * DIGITS_PER_LANE + j >= digit) own.high += here;
    }
    return {all_sum(own.all), all_sum(own.high)};
}

struct Choice {
    u32 digit;
    u32 rest;  // its rank among the numbers with this digit, from 1
};

// Return the digit of the k-th largest number, to all lanes; k is at least 1 and at most the number of numbers.
__device__ inline Choice choose(const u32 *table, u32 k) {
    u32 own = 0;
    for (u32 j = 0; j < DIGITS_PER_LANE; ++j) own += table[j * LANES + lane()];
    u32 above = all_sum(own) - all_before(own) - own;
    u32 digit = 0, rest = 0;
    if (above < k && k <= above + own) {
        u32 j = DIGITS_PER_LANE - 1;
        for (rest = k - above; rest > table[j * LANES + lane()]; --j) rest -= table[j * LANES + lane()];
        digit = lane() * DIGITS_PER_LANE + j;
    }
    return {all_max(digit), all_max(rest)};
}
