// Decode the payload of `signs` as float32, or add the values.
//
// HELD: the length of the blocks if it is a power of two from 256 to 2048; else 0.
#include "floats.cuh"
#include "memory.cuh"
#include "pieces.cuh"

__device__ inline u32 bytes_of(u32 n) { return (n + 7) / 8; }

// Return a magnitude with the sign given by a bit of a word.
__device__ inline float signed_by(u32 word, u32 bit, u32 magnitude) {
    return float_of(magnitude ^ (word >> bit & 1u) << 31);
}

// Return four adjacent values, whose signs are the same bit of each byte of a word.
__device__ inline Four four_signed(u32 word, u32 bit, u32 magnitude) {
    Four v;
    UNROLL for (u32 byte = 0; byte < 4; ++byte) v.at[byte] = signed_by(word, 8 * byte + bit, magnitude);
    return v;
}

#if HELD
#define FOURS (HELD / 4)
#define WORDS (HELD / 32)  // words of signs

// Decode full blocks: two groups of four per thread, to have both in flight.
__device__ inline void unsign_held(const u32 *magnitudes, const u32 *signs, Four *out, u64 blocks, bool add) {
    for (u64 i = thread(), fours = blocks * FOURS; i < fours; i += 2 * threads()) {
        u64 next = i + threads();
        bool two = next < fours;
        u32 word = signs[i / FOURS * WORDS + i % WORDS], other = two ? signs[next / FOURS * WORDS + next % WORDS] : 0;
        u32 magnitude = magnitudes[i / FOURS], its = two ? magnitudes[next / FOURS] : 0;
        put(out + i, four_signed(word, i % FOURS / WORDS, magnitude), add);
        if (two) put(out + next, four_signed(other, next % FOURS / WORDS, its), add);
    }
}
#endif

extern "C" __global__ RESIDENT(8) void unsign(const u8 *payload, float *out, u64 count, u32 block, u32 add) {
    u32 pieces = pieces_of(bytes_of(block));
    u64 blocks = blocks_of(count, block), done = 0;
    const u8 *all = payload + 4 * blocks;
    bool wide = aligned<u32>(payload) && aligned<Four>(out);
#if HELD
    if (wide) {
        done = count / HELD;
        unsign_held((const u32 *)payload, (const u32 *)all, (Four *)out, done, add);
    }
#endif
    for (u64 item = done * pieces + worker(); item < blocks * pieces; item += workers()) {
        Piece piece = piece_of(item, pieces);
        u32 n = length_of(piece.block, count, block), eighth = bytes_of(n);
        u32 from = piece.from, to = piece_end(from, eighth);
        const u8 *signs = all + piece.block * bytes_of(block);
        float *mine = out + piece.block * block;
        u32 magnitude = load<u32>(payload + 4 * piece.block);
#if !HELD
        if (wide && block % 32 == 0 && n % 32 == 0) {
            for (u32 r = from / 4 + lane(); r < to / 4; r += LANES) {
                u32 word = ((const u32 *)signs)[r];
                UNROLL for (u32 k = 0; k < 8; ++k)
                    put((Four *)mine + k * (eighth / 4) + r, four_signed(word, k, magnitude), add);
            }
            continue;
        }
#endif
        for (u32 i = from + lane(); i < to; i += LANES) {
            for (u32 k = 0, at = i; k < 8 && at < n; ++k, at += eighth)
                put(mine + at, signed_by(signs[i], k, magnitude), add);
        }
    }
}
KERNEL(unsign)
