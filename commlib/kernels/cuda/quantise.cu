// Quantise in blocks; payloads are laid out as kernels/host/quantise.py says. What is encoded with the unit NaN is lost
// to nothing: its codes are 0, and its residual stays.
//
// HELD: the length of a block that a worker's lanes hold, a power of two from 256; 0 if they hold none.
#include "codes.cuh"

#define SUMS BY_NORM

// A block's unit, from its greatest magnitude or its norm.
struct Scale {
    float size, top;
#if BY_NORM
    float inverse;

    // Squares are taken of v divided by the power of two below the greatest, so that none overflows.
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

    // One bit less than the quotient of the greatest number, so that top * unit is finite however it is rounded.
    __device__ float unit(float size) const {
        float limit = float_of(bits_of(GREATEST / top) - 1);
        float unit = lesser(size / top, limit);
        return unit >= least_unit() ? unit : 0.0f;
    }
};

#include "measure.cuh"

// How a block's elements become codes, and what is lost.
struct Rounding {
    float unit, inverse, top;
    u32 first;  // the index of the block's first element
    Keys keys;

    __device__ Rounding(float unit, float top, u64 first, Keys keys)
        : unit(unit), inverse(unit > 0 ? 1 / unit : 0.0f), top(top), first((u32)first), keys(keys) {}

    // Return the code of the block's i-th element, of which only what is lost is left.
    __device__ u32 operator()(float &value, u32 i) const {
        float r = rounded(value * inverse, top, first + i, keys);
        value = value - r * unit;
        return code_of(r);
    }
};

// Encode a block's i-th element, and return its code.
__device__ inline u32 encoded(Values v, float *after, Rounding rounding, u32 i) {
    bool broken = is_nan(rounding.unit);
    float value = v[i];
    u32 code = rounding(value, i);
    if (after) after[i] = broken ? v.before[i] : value;
    return broken ? 0 : code;
}

// Encode the elements whose codes are in the bytes `from` to `to` of a block with n elements.
__device__ inline void encode(Values v, float *after, u8 *codes, u32 n, Rounding rounding, u32 from, u32 to) {
    u32 upper = bytes_of(n);  // the first element in the upper half of a byte, if there are two in one
    for (u32 i = from + lane(); i < to; i += LANES) {
        u32 code = encoded(v, after, rounding, i);
        if (upper + i < n) code |= encoded(v, after, rounding, upper + i) << 4;
        codes[i] = (u8)code;
    }
}

#if HELD
#define GROUPS (HELD / (4 * LANES))

// Encode a block that lanes hold: four codes, or pairs of them, are a word.
__device__ inline void encode_held(Four (&v)[GROUPS], float *after, u8 *codes, Rounding rounding) {
    const u32 groups = CODE == INT4 ? GROUPS / 2 : GROUPS;
    UNROLL for (u32 g = 0; g < groups; ++g) {
        u32 word = 0;
        UNROLL for (u32 k = 0; k < 4; ++k) {
            u32 i = 4 * (lane() + LANES * g) + k;
            word |= rounding(v[g].at[k], i) << (8 * k);
#if CODE == INT4
            word |= rounding(v[g + groups].at[k], i + HELD / 2) << (8 * k + 4);
#endif
        }
        ((u32 *)codes)[lane() + LANES * g] = word;
    }
    if (!after) return;
    UNROLL for (u32 g = 0; g < GROUPS; ++g) ((Four *)after)[lane() + LANES * g] = v[g];
}
#endif

// A worker does a block at a time: first it finds the unit, then the codes.
extern "C" __global__ void quantise(const float *x, const float *before, float *after, u8 *payload, u64 count,
                                    u32 block, float top, u64 seed) {
    Keys keys = keys_of(seed);
    u64 blocks = blocks_of(count, block);
    for (u64 number = worker(); number < blocks; number += workers()) {
        u64 first = number * block;
        u32 n = length_of(number, count, block);
        Values v(x, before, first);
        float *lost = after ? after + first : after;
        u8 *codes = payload + 4 * blocks + number * bytes_of(block);
        float unit;
#if HELD
        if (n == HELD && aligned<Four>(x) && aligned<Four>(before) && aligned<Four>(after) && aligned<u32>(codes)) {
            Four held[GROUPS];
            v.hold(held);
            unit = measured(held, top);
            if (is_nan(unit)) encode(v, lost, codes, n, Rounding(unit, top, first, keys), 0, bytes_of(n));
            else encode_held(held, lost, codes, Rounding(unit, top, first, keys));
        } else
#endif
        {
            unit = measured(v, n, top);
            encode(v, lost, codes, n, Rounding(unit, top, first, keys), 0, bytes_of(n));
        }
        if (lane() == 0) store(payload + 4 * number, bits_of(unit));
    }
}
KERNEL(quantise)

// Encode long blocks, which were measured: a worker does a piece at a time.
extern "C" __global__ void encode_pieces(const float *x, const float *before, float *after, u8 *payload, u64 count,
                                         u32 block, float top, u64 seed) {
    Keys keys = keys_of(seed);
    u32 pieces = pieces_of(bytes_of(block));
    u64 blocks = blocks_of(count, block);
    for (u64 item = worker(); item < blocks * pieces; item += workers()) {
        u64 number = item / pieces, first = number * block;
        u32 n = length_of(number, count, block), from = (u32)(item % pieces) * PIECE, to = bytes_of(n);
        float unit = float_of(load<u32>(payload + 4 * number));
        u8 *codes = payload + 4 * blocks + number * bytes_of(block);
        encode(Values(x, before, first), after ? after + first : after, codes, n, Rounding(unit, top, first, keys),
               from, piece_end(from, to));
    }
}
KERNEL(encode_pieces)
