// Write what `quantise` has encoded as float32, or add it.
#include "codes.cuh"
#include "memory.cuh"
#include "pieces.cuh"

// Return four elements whose codes are each in a byte of a word, from its lowest bit, or from another, on.
__device__ inline Four four_decoded(u32 word, float unit) {
    Four v;
    UNROLL for (u32 k = 0; k < 4; ++k) v.at[k] = decoded(word >> (8 * k) & 255u, unit);
    return v;
}

extern "C" __global__ void restore(const u8 *payload, float *out, u64 count, u32 block, u32 add) {
    u32 pieces = pieces_of(bytes_of(block));
    u64 blocks = blocks_of(count, block);
    for (u64 item = worker(); item < blocks * pieces; item += workers()) {
        u64 number = item / pieces;
        u32 n = length_of(number, count, block), upper = bytes_of(n);  // the first element in the upper half of a byte
        u32 from = (u32)(item % pieces) * PIECE, to = piece_end(from, upper);
        const u8 *codes = payload + 4 * blocks + number * bytes_of(block);
        float *mine = out + number * block, unit = float_of(load<u32>(payload + 4 * number));
        if (aligned<u32>(codes) && aligned<Four>(mine) && (CODE != INT4 || n % 8 == 0)) {
            for (; from + 4 * LANES <= to; from += 4 * LANES) {
                u32 i = from + 4 * lane(), word = *(const u32 *)(codes + i);
                put((Four *)(mine + i), four_decoded(word, unit), add);
                if (CODE == INT4) put((Four *)(mine + upper + i), four_decoded(word >> 4, unit), add);
            }
        }
        for (u32 i = from + lane(); i < to; i += LANES) {
            put(mine + i, decoded(codes[i], unit), add);
            if (upper + i < n) put(mine + upper + i, decoded(codes[i] >> 4, unit), add);
        }
    }
}
KERNEL(restore)
