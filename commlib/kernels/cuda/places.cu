// Random places in an array: draw them, and read and write elements there. See kernels/host/draw.py.
#include "floats.cuh"
#include "memory.cuh"
#include "noise.cuh"

// Map a random word to 0 .. limit - 1, for limits up to 2^32.
__device__ inline u64 below(u64 limit, u64 number) { return ((number >> 32) * limit) >> 32; }

// k stretches of `count` elements on a circle, with one drawn place each.
struct Draw {
    u64 count, k, state, shift;

    __device__ Draw(u64 count, u64 k, u64 seed)
        : count(count), k(k), state(mix(seed + STEP)), shift(below(count, state)) {}

    __device__ u64 start(u64 j) const { return j * count / k; }

    // Return the j-th place; it is beyond the last element if it wrapped around.
    __device__ u64 place(u64 j) const {
        return start(j) + shift + below(start(j + 1) - start(j), mix(state + (j + 1) * STEP));
    }

    // Return the number of the first place that wrapped around, k without one. Places ascend, so all later ones
    // wrapped, too. Only in the stretch j with the element that becomes the first, start(j) <= count - shift < start(j
    // + 1), it is random.
    __device__ u64 first_turned() const {
        u64 j = ((count - shift + 1) * k - 1) / count;
        return j < k && place(j) < count ? j + 1 : j;
    }
};

extern "C" __global__ void draw(u64 count, u64 seed, u32 *places, u64 k) {
    Draw chance(count, k, seed);
    u64 turned = k - chance.first_turned();
    for (u64 i = thread(); i < k; i += threads())
        places[i] = (u32)(i < turned ? chance.place(k - turned + i) - count : chance.place(i - turned));
}
KERNEL(draw)

extern "C" __global__ void begin(u32 *broken) {
    if (thread() == 0) *broken = 0;
}
KERNEL(begin)

// Add the previous loss to an element; the sum is the new loss if it is finite. Return whether it is not finite.
__device__ inline bool feed(float x, float &lost) {
    float sum = x + lost;
    bool finite = is_finite(sum);
    lost = finite ? sum : lost;
    return !finite;
}

// Write x + before to `after` if it is finite, else `before`; record whether any sum is not finite. Both may be null.
extern "C" __global__ void feed_back(const float *x, const float *before, float *after, u64 count, u32 *broken) {
    bool found = false;
    u64 fours = aligned<Four>(x) && aligned<Four>(before) && aligned<Four>(after) ? count / 4 : 0;
    for (u64 i = thread(); i < fours; i += threads()) {
        Four v = ((const Four *)x)[i], lost = {};
        if (before) lost = ((const Four *)before)[i];
        UNROLL for (u32 k = 0; k < 4; ++k) found |= feed(v.at[k], lost.at[k]);
        if (before) ((Four *)after)[i] = lost;
    }
    for (u64 i = 4 * fours + thread(); i < count; i += threads()) {
        float lost = before ? before[i] : 0.0f;
        found |= feed(x[i], lost);
        if (before) after[i] = lost;
    }
    if (found) *broken = 1;  // a harmless race: all write the same value
}
KERNEL(feed_back)

// Write the elements of x at the places to `values`, times a factor. With a residual, x is the sum and keeps the loss.
extern "C" __global__ void take(float *x, const u32 *places, u64 k, float factor, float *values, const u32 *broken,
                                u32 with_residual) {
    for (u64 i = thread(); i < k; i += threads()) {
        float value = x[places[i]];
        float taken = *broken ? NOT_A_NUMBER : value * factor;
        values[i] = taken;
        if (with_residual && is_finite(value - taken)) x[places[i]] = value - taken;
    }
}
KERNEL(take)

extern "C" __global__ void place(const u32 *values, const u32 *places, u64 k, u32 *out) {
    for (u64 i = thread(); i < k; i += threads()) out[places[i]] = values[i];
}
KERNEL(place)
