// Blocks: an array is cut in blocks of a fixed length, of which the last may be shorter. Where a block is too long for
// one worker, each does a piece of it at a time.
#pragma once
#include "common.cuh"

#define PIECE 1024u  // elements, or bytes of codes

__device__ inline u64 blocks_of(u64 count, u32 block) { return (count + block - 1) / block; }
__device__ inline u32 length_of(u64 number, u64 count, u32 block) {
    u64 left = count - number * block;
    return left < block ? (u32)left : block;
}
__device__ inline u32 pieces_of(u32 length) { return (length + PIECE - 1) / PIECE; }
__device__ inline u32 piece_end(u32 from, u32 length) { return from + PIECE < length ? from + PIECE : length; }

// The block that a worker's item is a piece of, and where in it the piece begins.
struct Piece {
    u64 block;
    u32 from;
};

// Return what an item is, where each block has so many pieces.
__device__ inline Piece piece_of(u64 item, u32 pieces) {
    if (pieces == 1) return {item, 0};  // mostly; a division of 64 bits would take longer than what is done there
    return {item / pieces, (u32)(item % pieces) * PIECE};
}
