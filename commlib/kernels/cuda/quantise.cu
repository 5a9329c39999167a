// Quantize in blocks; kernels/host/quantise.py documents the payload. A block with the unit NaN is not encoded: its
// codes are 0, and its residual does not change.
//
// HELD: the length of a block that a worker's lanes hold, a power of two from 256; 0 if they hold none.
#include "codes.cuh"

#define SUMS BY_NORM

// A block's unit, from its greatest magnitude or its norm.
struct Scale {
    float size, top;
#if BY_NORM
    float inverse;

    // v is divided by the power of two below the greatest magnitude before it is squared, so no square overflows.
    __device__ Scale(u32 greatest, u32, float top) : top(top) {
        u32 exponent = greatest >> 23;
        exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
        size = float_of(exponent << 23);
        inverse = float_of((254 - exponent) << 23);
    }
    __device__ float leaf(float v) const { return (v * inverse) * (v * inverse); }
    __device__ float measure(float sum) const { return unit(lesser(size * sqrtf(sum), GREATEST)); }
#else
    __device__ Scale(u32 greatest, u32, float top) : size(float_of(greatest)), top(top) {}
    __device__ float measure(float) const { return unit(size); }
#endif

    // One bit less than the quotient of the greatest number keeps top * unit finite for any rounding.
    __device__ float unit(float size) const {
        float limit = float_of(bits_of(GREATEST / top) - 1);
        float unit = lesser(size / top, limit);
        return unit >= least_unit() ? unit : 0.0f;
    }
};

#include "measure.cuh"

// The conversion of a block's elements to codes, and its loss.
struct Rounding {
    float unit, inverse, top;
    u32 first;  // the index of the block's first element
    Keys keys;

    __device__ Rounding(float unit, float top, u64 first, Keys keys)
        : unit(unit), inverse(unit > 0 ? 1 / unit : 0.0f), top(top), first((u32)first), keys(keys) {}

    // Return the code of the block's i-th element.
    __device__ u32 code(float value, u32 i) const { return code_of(value * inverse, top, first + i, keys); }

    // Return the codes of four elements from the i-th on, one per byte of a word.
    __device__ u32 four_codes(Four v, u32 i) const {
#if CONVERTS
        return converted(v.at[0] * inverse, v.at[1] * inverse, v.at[2] * inverse, v.at[3] * inverse);
#else
        u32 word = 0;
        UNROLL for (u32 k = 0; k < 4; ++k) word |= code(v.at[k], i + k) << (8 * k);
        return word;
#endif
    }
};

// Encode a block's i-th element, and return its code.
__device__ inline u32 encoded(Values v, float *after, Rounding rounding, u32 i) {
    bool broken = is_nan(rounding.unit);
    float value = v[i];
    u32 code = rounding.code(value, i);
    if (after) after[i] = broken ? v.before[i] : value - decoded(code, rounding.unit);
    return broken ? 0 : code;
}

// Encode the elements with codes in the bytes `from` to `to` of a block with n elements.
__device__ inline void encode(Values v, float *after, u8 *codes, u32 n, Rounding rounding, u32 from, u32 to) {
    u32 upper = bytes_of(n);  // the first element in the upper half of a byte, for two codes per byte
    for (u32 i = from + lane(); i < to; i += LANES) {
        u32 code = encoded(v, after, rounding, i);
        if (upper + i < n) code |= encoded(v, after, rounding, upper + i) << 4;
        codes[i] = (u8)code;
    }
}

#if HELD
#define GROUPS (HELD / (4 * LANES))

// Encode a block that lanes hold: a word has four codes, or four pairs.
__device__ inline void encode_held(const Four (&v)[GROUPS], const Four *before, Four *after, u32 *codes,
                                   Rounding rounding) {
    const u32 groups = CODE == INT4 ? GROUPS / 2 : GROUPS;
    bool broken = is_nan(rounding.unit);
    u32 words[groups];
    UNROLL for (u32 g = 0; g < groups; ++g) {
        u32 i = 4 * (lane() + LANES * g);
        words[g] = rounding.four_codes(v[g], i);
#if CODE == INT4
        words[g] |= rounding.four_codes(v[g + groups], i + HELD / 2) << 4;
#endif
        codes[lane() + LANES * g] = broken ? 0 : words[g];
    }
    if (!after) return;
    UNROLL for (u32 g = 0; g < GROUPS; ++g) {
        Four known = four_decoded(words[g % groups] >> (g < groups ? 0 : 4), rounding.unit);
        UNROLL for (u32 k = 0; k < 4; ++k) known.at[k] = v[g].at[k] - known.at[k];
        after[lane() + LANES * g] = broken ? before[lane() + LANES * g] : known;
    }
}

__device__ inline void quantise_held(const float *x, const float *before, float *after, float *units, u32 *codes,
                                     u64 blocks, float top, Keys keys) {
    for (u64 number = worker(); number < blocks; number += workers()) {
        u64 first = number * HELD;
        Four v[GROUPS];
        Values(x, before, first).hold(v);
        float unit = measured(v, top);
        encode_held(v, (const Four *)(before + first), after ? (Four *)(after + first) : 0,
                    codes + number * (bytes_of(HELD) / 4), Rounding(unit, top, first, keys));
        if (lane() == 0) units[number] = unit;
    }
}
#endif

// A worker processes a block at a time: first it computes the unit, then the codes.
extern "C" __global__ RESIDENT(BLOCKS) void quantise(
    const float *x, const float *before, float *after, u8 *payload, u64 count, u32 block, float top, u64 seed) {
    Keys keys = keys_of(seed);
    u64 blocks = blocks_of(count, block), done = 0;
    u8 *all = payload + 4 * blocks;
#if HELD
    if (aligned<Four>(x) && aligned<Four>(before) && aligned<Four>(after) && aligned<u32>(payload)) {
        done = count / HELD;
        quantise_held(x, before, after, (float *)payload, (u32 *)all, done, top, keys);
    }
#endif
    for (u64 number = done + worker(); number < blocks; number += workers()) {
        u64 first = number * block;
        u32 n = length_of(number, count, block);
        Values v(x, before, first);
        float unit = measured(v, n, top);
        encode(v, after ? after + first : after, all + number * bytes_of(block), n, Rounding(unit, top, first, keys), 0,
               bytes_of(n));
        if (lane() == 0) store(payload + 4 * number, bits_of(unit));
    }
}
KERNEL(quantise)

// Encode long blocks, which were measured: a worker processes a piece at a time.
extern "C" __global__ void encode_pieces(const float *x, const float *before, float *after, u8 *payload, u64 count,
                                         u32 block, float top, u64 seed) {
    Keys keys = keys_of(seed);
    u32 pieces = pieces_of(bytes_of(block));
    u64 blocks = blocks_of(count, block);
    for (u64 item = worker(); item < blocks * pieces; item += workers()) {
        Piece piece = piece_of(item, pieces);
        u64 first = piece.block * block;
        u32 n = length_of(piece.block, count, block);
        float unit = float_of(load<u32>(payload + 4 * piece.block));
        u8 *codes = payload + 4 * blocks + piece.block * bytes_of(block);
        encode(Values(x, before, first), after ? after + first : after, codes, n, Rounding(unit, top, first, keys),
               piece.from, piece_end(piece.from, bytes_of(n)));
    }
}
KERNEL(encode_pieces)
