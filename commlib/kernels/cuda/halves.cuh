// The sum by halves of kernels/host/blocks.py: the upper half is added to the lower half until one number is left. The
// order is the host's, so the bits are equal. No number may be -0: if an upper half is one shorter, a zero is added,
// which does not change other numbers.
#pragma once
#include "memory.cuh"

// Return how many of n numbers are left after this many halvings.
__device__ inline u32 halved(u32 n, u32 levels) { return (n + (1u << levels) - 1) >> levels; }

// Return one of the numbers left after some levels. leaf(i): the i-th of the n numbers, up to 2^20.
//
// It is the sum over 2^levels rows. The lowest bit of a row tells whether a number was in the upper half at first, the
// next bit whether it was after the first addition, and so on; in this order sums are completed one after another.
template <class Leaf>
__device__ inline float column_sum(u32 n, u32 levels, u32 column, Leaf leaf) {
    float lower[21];  // per level, the sum that waits for the sum of its upper half
    float sum = 0;
    for (u32 row = 0; row < 1u << levels; ++row) {
        u32 i = column;
        for (u32 level = levels; level > 0 && i < n; --level) {
            if (row >> (level - 1) & 1) {
                i += halved(n, level);
                if (i >= halved(n, level - 1)) i = n;  // the upper half is shorter
            }
        }
        sum = i < n ? leaf(i) : 0.0f;
        u32 level = 0;
        for (; row >> level & 1; ++level) sum = lower[level] + sum;
        lower[level] = sum;
    }
    return sum;
}

// Return the sum by halves of the first n lanes' values, to all lanes.
#ifdef __CUDACC__
__device__ inline float sum_of_lanes(float value, u32 n) {
    while (n > 1) {
        u32 half = (n + 1) / 2;
        float upper = __shfl_down_sync(EVERY_LANE, value, half);
        if (lane() < n - half) value += upper;
        n = half;
    }
    return __shfl_sync(EVERY_LANE, value, 0);
}
#else
inline float sum_of_lanes(float value, u32) { return value; }
#endif

// Return the sum of n numbers, at least one, to all lanes of a worker. leaf(i): the i-th number.
template <class Leaf>
__device__ inline float sum_by_halves(u32 n, Leaf leaf) {
    u32 levels = 0;
    while (halved(n, levels) > LANES) ++levels;
    u32 left = halved(n, levels);
    return sum_of_lanes(lane() < left ? column_sum(n, levels, lane(), leaf) : 0.0f, left);
}

// Return the sum of leaf(v) for all v that a worker's lanes hold: element 4 * (lane + LANES * group) + k of a block,
// whose length is a power of two, is that lane's v[group].at[k].
template <u32 GROUPS, class Leaf>
__device__ inline float sum_of_held(const Four (&v)[GROUPS], Leaf leaf) {
    Four sums[GROUPS / 2];
    UNROLL for (u32 g = 0; g < GROUPS / 2; ++g) {
        UNROLL for (u32 k = 0; k < 4; ++k) sums[g].at[k] = leaf(v[g].at[k]) + leaf(v[g + GROUPS / 2].at[k]);
    }
    UNROLL for (u32 half = GROUPS / 4; half > 0; half /= 2) {
        UNROLL for (u32 g = 0; g < half; ++g) {
            UNROLL for (u32 k = 0; k < 4; ++k) sums[g].at[k] += sums[g + half].at[k];
        }
    }
    UNROLL for (u32 k = 0; k < 4; ++k) sums[0].at[k] = all_sum(sums[0].at[k]);  // adds upper lanes to lower ones
    return (sums[0].at[0] + sums[0].at[2]) + (sums[0].at[1] + sums[0].at[3]);
}
