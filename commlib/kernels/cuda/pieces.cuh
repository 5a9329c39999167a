// Pieces: an array consists of blocks of a fixed length, of which the last may be shorter. If a block is too long for
// one worker, each worker processes a piece of it at a time.
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

// The block of a worker's item, and the start of the item's piece in it.
struct Piece {
    u64 block;
    u32 from;
};

// Return the piece of an item, if each block has this many pieces.
__device__ inline Piece piece_of(u64 item, u32 pieces) {
    if (pieces == 1) return {item, 0};  // the usual case; a 64-bit division would take longer than the work
    return {item / pieces, (u32)(item % pieces) * PIECE};
}
