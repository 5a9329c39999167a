// Signs and mean magnitudes in blocks; kernels/host/signs.py documents the payload. A block with the magnitude NaN is
// not encoded: its bits are 0, and its residual does not change.
//
// HELD: the length of a block that a worker's lanes hold, a power of two from 256; 0 if they hold none.
#include "floats.cuh"

#define SUMS 1

// A block's mean magnitude. Shares are added up, so it cannot overflow.
struct Scale {
    float share;

    __device__ Scale(u32, u32 n, float) : share(1 / (float)n) {}
    __device__ float leaf(float v) const { return float_of(magnitude_of(v)) * share; }
    __device__ float measure(float sum) const {
        float mean = lesser(sum, GREATEST);
        return mean >= LEAST_NORMAL ? mean : 0.0f;
    }
};

#include "measure.cuh"

__device__ inline u32 bytes_of(u32 n) { return (n + 7) / 8; }

__device__ inline u32 sign_of(float value) { return bits_of(value) >> 31; }

// Return the loss of an element.
__device__ inline float loss(float value, float magnitude) {
    return value - float_of(bits_of(magnitude) | (bits_of(value) & SIGN));
}

// Encode the elements with signs in the bytes `from` to `to` of a block with n elements.
__device__ inline void encode(Values v, float *after, u8 *signs, u32 n, float magnitude, u32 from, u32 to) {
    bool broken = is_nan(magnitude);
    for (u32 i = from + lane(); i < to; i += LANES) {
        u32 byte = 0;
        for (u32 k = 0, at = i; k < 8 && at < n; ++k, at += bytes_of(n)) {
            float value = v[at];
            byte |= sign_of(value) << k;
            if (after) after[at] = broken ? v.before[at] : loss(value, magnitude);
        }
        signs[i] = (u8)(broken ? 0 : byte);
    }
}

#if HELD
#define GROUPS (HELD / (4 * LANES))
#define WORDS (HELD / 32u)  // words of signs

// Encode a block that lanes hold. Four adjacent elements have a bit in each byte of a word; their position gives the
// bit and the word. If there are fewer words than lanes, several lanes have parts of the same word.
__device__ inline void encode_held(const Four (&v)[GROUPS], const Four *before, Four *after, u32 *signs,
                                   float magnitude) {
    const u32 own = WORDS > LANES ? WORDS / LANES : 1;
    bool broken = is_nan(magnitude);
    UNROLL for (u32 j = 0; j < own; ++j) {
        u32 word = 0;
        UNROLL for (u32 g = j; g < GROUPS; g += own) {
            u32 four = 0;
            UNROLL for (u32 byte = 0; byte < 4; ++byte) four |= sign_of(v[g].at[byte]) << (8 * byte);
            word |= four << (lane() + LANES * g) / WORDS;
        }
        word = bits_apart(word, WORDS);
        if (lane() < WORDS) signs[lane() + LANES * j] = broken ? 0 : word;
    }
    if (!after) return;
    UNROLL for (u32 g = 0; g < GROUPS; ++g) {
        Four lost;
        UNROLL for (u32 k = 0; k < 4; ++k) lost.at[k] = loss(v[g].at[k], magnitude);
        after[lane() + LANES * g] = broken ? before[lane() + LANES * g] : lost;
    }
}

__device__ inline void signs_held(const float *x, const float *before, float *after, float *magnitudes, u32 *signs,
                                  u64 blocks) {
    for (u64 number = worker(); number < blocks; number += workers()) {
        u64 first = number * HELD;
        Four v[GROUPS];
        Values(x, before, first).hold(v);
        float magnitude = measured(v, 0);
        encode_held(v, (const Four *)(before + first), after ? (Four *)(after + first) : 0, signs + number * WORDS,
                    magnitude);
        if (lane() == 0) magnitudes[number] = magnitude;
    }
}
#endif

// A worker processes a block at a time: first it computes the magnitude, then the signs.
extern "C" __global__ RESIDENT(BLOCKS) void signs(
    const float *x, const float *before, float *after, u8 *payload, u64 count, u32 block) {
    u64 blocks = blocks_of(count, block), done = 0;
    u8 *all = payload + 4 * blocks;
#if HELD
    if (aligned<Four>(x) && aligned<Four>(before) && aligned<Four>(after) && aligned<u32>(payload)) {
        done = count / HELD;
        signs_held(x, before, after, (float *)payload, (u32 *)all, done);
    }
#endif
    for (u64 number = done + worker(); number < blocks; number += workers()) {
        u64 first = number * block;
        u32 n = length_of(number, count, block);
        Values v(x, before, first);
        float magnitude = measured(v, n, 0);
        encode(v, after ? after + first : after, all + number * bytes_of(block), n, magnitude, 0, bytes_of(n));
        if (lane() == 0) store(payload + 4 * number, bits_of(magnitude));
    }
}
KERNEL(signs)

// Encode long blocks, which were measured: a worker processes a piece at a time.
extern "C" __global__ void encode_pieces(const float *x, const float *before, float *after, u8 *payload, u64 count,
                                         u32 block) {
    u32 pieces = pieces_of(bytes_of(block));
    u64 blocks = blocks_of(count, block);
    for (u64 item = worker(); item < blocks * pieces; item += workers()) {
        Piece piece = piece_of(item, pieces);
        u64 first = piece.block * block;
        u32 n = length_of(piece.block, count, block);
        u8 *mine = payload + 4 * blocks + piece.block * bytes_of(block);
        float magnitude = float_of(load<u32>(payload + 4 * piece.block));
        encode(Values(x, before, first), after ? after + first : after, mine, n, magnitude, piece.from,
               piece_end(piece.from, bytes_of(n)));
    }
}
KERNEL(encode_pieces)
