// Decode the codes of `quantise` as float32, or add the values.
//
// HELD: the length of the blocks if it is a power of two from 256 to 2048; else 0.
#include "codes.cuh"
#include "pieces.cuh"

// Decode the r-th word of codes of a block.
__device__ inline void restore_word(float *block, u32 n, u32 r, u32 word, float unit, bool add) {
    Four *to = (Four *)block + r;
    put(to, four_decoded(word, unit), add);
    if (CODE == INT4) put(to + n / 8, four_decoded(word >> 4, unit), add);
}

#if HELD
#define WORDS (bytes_of(HELD) / 4)

// Decode full blocks with consecutive words of codes: two words per thread, to have both in flight.
__device__ inline void restore_held(const float *units, const u32 *codes, float *out, u64 blocks, bool add) {
    for (u64 i = thread(), words = blocks * WORDS; i < words; i += 2 * threads()) {
        u64 next = i + threads();
        bool two = next < words;
        u32 word = codes[i], other = two ? codes[next] : 0;
        float unit = units[i / WORDS], its = two ? units[next / WORDS] : 0;
        restore_word(out + i / WORDS * HELD, HELD, i % WORDS, word, unit, add);
        if (two) restore_word(out + next / WORDS * HELD, HELD, next % WORDS, other, its, add);
    }
}
#endif

extern "C" __global__ RESIDENT(CODE == INT4 ? 4 : 8) void restore(
    const u8 *payload, float *out, u64 count, u32 block, u32 add) {
    u32 pieces = pieces_of(bytes_of(block));
    u64 blocks = blocks_of(count, block), done = 0;
    const u8 *all = payload + 4 * blocks;
    bool wide = aligned<u32>(payload) && aligned<Four>(out);
#if HELD
    if (wide) {
        done = count / HELD;
        restore_held((const float *)payload, (const u32 *)all, out, done, add);
    }
#endif
    for (u64 item = done * pieces + worker(); item < blocks * pieces; item += workers()) {
        Piece piece = piece_of(item, pieces);
        u32 n = length_of(piece.block, count, block), upper = bytes_of(n);  // the first element in a byte's upper half
        u32 to = piece_end(piece.from, upper);
        const u8 *codes = all + piece.block * bytes_of(block);
        float *mine = out + piece.block * block, unit = float_of(load<u32>(payload + 4 * piece.block));
#if !HELD
        if (wide && block % 8 == 0 && n % 8 == 0) {
            for (u32 r = piece.from / 4 + lane(); r < to / 4; r += LANES)
                restore_word(mine, n, r, ((const u32 *)codes)[r], unit, add);
            continue;
        }
#endif
        for (u32 i = piece.from + lane(); i < to; i += LANES) {
            put(mine + i, decoded(codes[i], unit), add);
            if (upper + i < n) put(mine + upper + i, decoded(codes[i] >> 4, unit), add);
        }
    }
}
KERNEL(restore)
