// Write what `signs` has encoded as float32, or add it.
#include "floats.cuh"
#include "memory.cuh"
#include "pieces.cuh"

__device__ inline u32 bytes_of(u32 n) { return (n + 7) / 8; }

// Return a magnitude with the sign that is bit k of a byte.
__device__ inline float signed_by(u32 byte, u32 k, u32 magnitude) {
    return float_of(magnitude ^ (byte >> k & 1u) << 31);
}

extern "C" __global__ void unsign(const u8 *payload, float *out, u64 count, u32 block, u32 add) {
    u32 pieces = pieces_of(bytes_of(block));
    u64 blocks = blocks_of(count, block);
    for (u64 item = worker(); item < blocks * pieces; item += workers()) {
        u64 number = item / pieces;
        u32 n = length_of(number, count, block), eighth = bytes_of(n);
        u32 from = (u32)(item % pieces) * PIECE, to = piece_end(from, eighth);
        const u8 *signs = payload + 4 * blocks + number * bytes_of(block);
        float *mine = out + number * block;
        u32 magnitude = load<u32>(payload + 4 * number);
        if (aligned<u32>(signs) && aligned<Four>(mine) && n % 32 == 0) {
            for (; from + 4 * LANES <= to; from += 4 * LANES) {
                u32 i = from + 4 * lane(), word = *(const u32 *)(signs + i);
                UNROLL for (u32 k = 0; k < 8; ++k) {
                    Four v;
                    UNROLL for (u32 b = 0; b < 4; ++b) v.at[b] = signed_by(word >> (8 * b), k, magnitude);
                    put((Four *)(mine + k * eighth + i), v, add);
                }
            }
        }
        for (u32 i = from + lane(); i < to; i += LANES) {
            for (u32 k = 0, at = i; k < 8 && at < n; ++k, at += eighth)
                put(mine + at, signed_by(signs[i], k, magnitude), add);
        }
    }
}
KERNEL(unsign)
