// The measure of a block: the number by which all its elements are encoded.
//
// An includer first defines SUMS (0 or 1: whether measures need a sum) and a struct Scale:
//
//     Scale(u32 greatest, u32 n, float top)  from the bits of the greatest |v| of n elements
//     float leaf(float v)                    the summand of an element
//     float measure(float sum)               the block's unit or magnitude, from the sum of all leaves (0 without SUMS)
//
// A block with an infinity or NaN measures NaN. HELD: the length of blocks that a worker's lanes hold, or 0.
#pragma once
#include "floats.cuh"
#include "halves.cuh"
#include "pieces.cuh"

// Blocks of threads on a multiprocessor (see common.cuh), limited by the registers for blocks of HELD elements.
#define BLOCKS (HELD == 256 ? 8 : HELD == 512 ? 4 : 2)

// The elements to encode, of one block: x, or x + before.
struct Values {
    const float *x, *before;

    __device__ Values(const float *x, const float *before, u64 first)
        : x(x + first), before(before ? before + first : before) {}

    __device__ float operator[](u32 i) const { return before ? x[i] + before[i] : x[i]; }

    // Read an entire block whose length is a power of two; `sum_of_held` documents which lane has which element.
    template <u32 GROUPS>
    __device__ void hold(Four (&v)[GROUPS]) const {
        UNROLL for (u32 g = 0; g < GROUPS; ++g) v[g] = ((const Four *)x)[lane() + LANES * g];
        if (!before) return;
        UNROLL for (u32 g = 0; g < GROUPS; ++g) {
            Four old = ((const Four *)before)[lane() + LANES * g];
            UNROLL for (u32 k = 0; k < 4; ++k) v[g].at[k] += old.at[k];
        }
    }
};

// Return the bits of the greatest |v| between two indices, to all lanes.
__device__ inline u32 greatest_of(Values v, u32 from, u32 to) {
    u32 maximum = 0;
    for (u32 i = from + lane(); i < to; i += LANES) {
        u32 magnitude = magnitude_of(v[i]);
        maximum = magnitude > maximum ? magnitude : maximum;
    }
    return all_max(maximum);
}

// Return a block's measure, to all lanes. The block is read twice if there is a sum.
__device__ inline float measured(Values v, u32 n, float top) {
    u32 greatest = greatest_of(v, 0, n);
    if (greatest >= INFINITY_BITS) return NOT_A_NUMBER;
    Scale scale(greatest, n, top);
#if SUMS
    return scale.measure(sum_by_halves(n, [&](u32 i) { return scale.leaf(v[i]); }));
#else
    return scale.measure(0);
#endif
}

// Return the measure of a block that lanes hold, to all lanes.
template <u32 GROUPS>
__device__ inline float measured(const Four (&v)[GROUPS], float top) {
    u32 maximum = 0;
    UNROLL for (u32 g = 0; g < GROUPS; ++g) {
        UNROLL for (u32 k = 0; k < 4; ++k) {
            u32 magnitude = magnitude_of(v[g].at[k]);
            maximum = magnitude > maximum ? magnitude : maximum;
        }
    }
    u32 greatest = all_max(maximum);
    if (greatest >= INFINITY_BITS) return NOT_A_NUMBER;
    Scale scale(greatest, 4 * GROUPS * LANES, top);
#if SUMS
    return scale.measure(sum_of_held(v, [&](float value) { return scale.leaf(value); }));
#else
    return scale.measure(0);
#endif
}

// Several workers measure a long block: first the greatest value of each piece, then sums of columns, then the rest.

extern "C" __global__ void greatest(const float *x, const float *before, u64 count, u32 block, u32 *maximum) {
    u32 pieces = pieces_of(block);
    u64 blocks = blocks_of(count, block);
    for (u64 item = worker(); item < blocks * pieces; item += workers()) {
        Piece piece = piece_of(item, pieces);
        u32 n = length_of(piece.block, count, block);
        u32 most = greatest_of(Values(x, before, piece.block * block), piece.from, piece_end(piece.from, n));
        if (lane() == 0) maximum[item] = most;
    }
}
KERNEL(greatest)

// Return the greatest value of a block's pieces, to all lanes.
__device__ inline u32 greatest_found(const u32 *maximum, u32 pieces) {
    u32 most = 0;
    for (u32 i = lane(); i < pieces; i += LANES) most = maximum[i] > most ? maximum[i] : most;
    return all_max(most);
}

#if SUMS
// levels: number of halvings that reduce a block to a row of sums. A worker computes one column per lane.
extern "C" __global__ void columns(const float *x, const float *before, u64 count, u32 block, float top,
                                   const u32 *maximum, u32 levels, float *sums) {
    u32 pieces = pieces_of(block), row = halved(block, levels), parts = (row + LANES - 1) / LANES;
    u64 blocks = blocks_of(count, block);
    for (u64 item = worker(); item < blocks * parts; item += workers()) {
        u64 number = item / parts;
        u32 column = (u32)(item % parts) * LANES + lane(), n = length_of(number, count, block);
        Values v(x, before, number * block);
        Scale scale(greatest_found(maximum + number * pieces, pieces), n, top);
        if (column < halved(n, levels))
            sums[number * row + column] = column_sum(n, levels, column, [&](u32 i) { return scale.leaf(v[i]); });
    }
}
KERNEL(columns)
#endif

extern "C" __global__ void measure(u8 *payload, u64 count, u32 block, float top, const u32 *maximum, u32 levels,
                                   const float *sums) {
    u32 pieces = pieces_of(block);
    u64 blocks = blocks_of(count, block);
    for (u64 number = worker(); number < blocks; number += workers()) {
        u32 n = length_of(number, count, block), most = greatest_found(maximum + number * pieces, pieces);
        float sum = 0;
#if SUMS
        const float *mine = sums + number * halved(block, levels);
        sum = sum_by_halves(halved(n, levels), [&](u32 i) { return mine[i]; });
#endif
        float size = most < INFINITY_BITS ? Scale(most, n, top).measure(sum) : NOT_A_NUMBER;
        if (lane() == 0) store(payload + 4 * number, bits_of(size));
    }
}
KERNEL(measure)
