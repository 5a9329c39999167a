// The largest elements of an array, found exactly by the digits of the k-th magnitude (11, 10 and 10 bits).
//
//   sample  counts the first digits of some tiles, to guess the first digit of the k-th magnitude
//   total   computes y, and sets a bit for each element whose first digit is not below the guess, and counts these
//           elements: the only pass over all arrays
//   again   if they are fewer than k: sets a bit for each nonzero element, and counts these
//   narrow  clears the bits of elements below the k-th's first digit; counts the second digits of those that have it
//   refine  counts the third digits of the elements that still may be the k-th
//   tally   counts the elements above the k-th magnitude, and those equal to it, in each chunk of the bits
//   choose_marked  writes the values to the payload, the indices to a list, and the loss to the residual
//
// After `total` only elements with a bit are read. Among equals the first ones are chosen. If some elements are not
// finite, only these are chosen, because they have the largest magnitudes. Zeros are never chosen.
//
// SOURCE determines y: 0: x; 1: x + before, the residual of error feedback; 2: the accumulated values of Deep Gradient
// Compression, with momentum u. If y is not finite, `after` and `u_after` are `before` and `u`.
#include "digits.cuh"
#include "values.cuh"

#define FED 1
#define ACCUMULATED 2

struct Arrays {
    const float *x, *before, *u;
    float *after, *u_after;  // may be before and u; after is x without a residual
    u64 count;
    float scale, decay;
    u32 nesterov, kind;
};

// Initially all zero.
struct State {
    u32 sampled[DIGITS], first[DIGITS], again[DIGITS], second[DIGITS], third[DIGITS];  // histograms of digits
    Choice choices[3];
    u32 guess;   // the lowest first digit for which `total` sets a bit
    u32 broken;  // number of elements that are not finite
    u32 found;   // number of chosen elements
    u32 unused;  // padding: sums of 8 bytes follow
};

struct Sum {
    float y, u;
};

__device__ inline Sum sum_of(const Arrays &a, float x, float before, float u) {
    if (SOURCE == FED) return {x + before, 0};
    if (SOURCE != ACCUMULATED) return {x, 0};
    float scaled = x * a.scale;
    if (!a.nesterov) {
        u = a.decay * u + scaled;
        return {before + u, u};
    }
    u = a.decay * (u + scaled);
    return {before + u + scaled, u};
}

// Return y of an element after `total`. If any are broken, only these are read.
__device__ inline float total_of(const Arrays &a, u64 i, bool broken) {
    float after = a.after[i];
    if (!SOURCE || !broken) return after;
    return sum_of(a, a.x[i], after, SOURCE == ACCUMULATED ? a.u_after[i] : 0).y;
}

// A worker's lanes go through a tile in steps, adjacent lanes at adjacent elements. All loads come first, to have as
// many bytes in flight as wide loads would have, at any address.
#define TILE 256u
#define STEPS (TILE / LANES)
#define WORDS (TILE / 32)

// A tile's bits, one per element.
struct Bits {
    u32 words[WORDS];

    __device__ inline void add(u32 step, bool value) {
        words[step * LANES / 32] |= all_bits(value) << (step * LANES % 32);
    }
    __device__ inline void write(u32 *mask, u64 start, u64 count) const {
        UNROLL for (u32 from = 0; from < WORDS; from += LANES) {  // each lane stores its own word
            u32 w = from + lane(), own = 0;
            UNROLL for (u32 k = 0; k < WORDS; ++k) own = k == w ? words[k] : own;
            if (w < WORDS && start + 32 * w < count) mask[start / 32 + w] = own;
        }
    }
};

// The elements of a tile that a lane has loaded.
struct Loaded {
    float x[STEPS], before[STEPS], u[STEPS];

    __device__ inline Loaded(const Arrays &a, u64 start) {
        UNROLL for (u32 step = 0; step < STEPS; ++step) {
            u64 i = start + step * LANES + lane();
            x[step] = i < a.count ? a.x[i] : 0;
            before[step] = SOURCE && i < a.count ? a.before[i] : 0;
            u[step] = SOURCE == ACCUMULATED && i < a.count ? a.u[i] : 0;
        }
    }
    __device__ inline Sum sum(const Arrays &a, u32 step) const { return sum_of(a, x[step], before[step], u[step]); }
};

// stride: one tile in `stride` is sampled
extern "C" __global__ void sample(Arrays a, u64 stride, State *state) {
    u32 *counts = begin_counts(state->sampled);
    for (u64 start = TILE * stride * worker(); start < a.count; start += TILE * stride * workers()) {
        Loaded loaded(a, start);
        UNROLL for (u32 step = 0; step < STEPS; ++step) {
            u32 magnitude = magnitude_of(loaded.sum(a, step).y);  // zero beyond the end
            if (magnitude) count_digit(counts, magnitude >> 20);
        }
    }
    end_counts(counts, state->sampled);
}
KERNEL(sample)

// rank: the rank of the sampled element whose digit is the guess. mask: the elements that may be chosen; with a
// residual, elements that are not finite are in `unfit` instead
extern "C" __global__ RESIDENT(SOURCE ? 4 : 8) void total(Arrays a, u32 rank, State *state, u32 *mask, u32 *unfit) {
    u32 guess = once([&] { return choose(state->sampled, rank).digit; });  // 0 if there are fewer
    if (guess > INFINITY_BITS >> 20) guess = INFINITY_BITS >> 20;  // elements that are not finite always have a bit
    if (thread() == 0) state->guess = guess;
    u32 *counts = begin_counts(state->first);
    for (u64 start = TILE * worker(); start < a.count; start += TILE * workers()) {
        Loaded loaded(a, start);
        Bits bits = {}, broken = {};
        UNROLL for (u32 step = 0; step < STEPS; ++step) {
            u64 i = start + step * LANES + lane();
            Sum sum = loaded.sum(a, step);
            u32 magnitude = magnitude_of(sum.y), digit = magnitude >> 20;
            bool finite = is_finite(sum.y), there = i < a.count, asked = there && magnitude && digit >= guess;
            if (SOURCE && there) a.after[i] = finite ? sum.y : loaded.before[step];
            if (SOURCE == ACCUMULATED && there) a.u_after[i] = finite ? sum.u : loaded.u[step];
            if (asked) count_digit(counts, digit);
            bits.add(step, asked && (!SOURCE || finite));
            if (SOURCE) broken.add(step, there && !finite);
        }
        bits.write(mask, start, a.count);
        if (SOURCE) broken.write(unfit, start, a.count);
    }
    end_counts(counts, state->first);
}
KERNEL(total)

// Return the number of elements in `first`, and the number of those that are not finite.
__device__ inline Counted marked(const State *state) { return count_all(state->first, INFINITY_BITS >> 20); }

// Return whether the elements with a bit after `total` include all that may be chosen.
__device__ inline bool enough(const State *state, Counted counted, u32 k) {
    return counted.high || counted.all >= k || !state->guess;
}

extern "C" __global__ void again(Arrays a, u32 k, State *state, u32 *mask) {
    if (once([&] { return enough(state, marked(state), k); })) return;
    u32 *counts = begin_counts(state->again);
    for (u64 start = TILE * worker(); start < a.count; start += TILE * workers()) {
        float y[STEPS];
        UNROLL for (u32 step = 0; step < STEPS; ++step) {
            u64 i = start + step * LANES + lane();
            y[step] = i < a.count ? a.after[i] : 0;  // all are finite
        }
        Bits bits = {};
        UNROLL for (u32 step = 0; step < STEPS; ++step) {
            u32 magnitude = magnitude_of(y[step]);
            bits.add(step, magnitude);
            if (magnitude) count_digit(counts, magnitude >> 20);
        }
        bits.write(mask, start, a.count);
    }
    end_counts(counts, state->again);
}
KERNEL(again)

// Words of bits per thread at a time, to overlap the loads of their elements.
#define AHEAD 4u

struct Words {
    u32 at[AHEAD];

    // Read words that are `step` apart, up to `end`.
    __device__ inline Words(const u32 *mask, u64 first, u64 step, u64 end) {
        UNROLL for (u32 k = 0; k < AHEAD; ++k) at[k] = first + k * step < end ? mask[first + k * step] : 0;
    }

    // Call each(k, bit, magnitude) for the elements with a bit in at[k].
    template <class Each>
    __device__ inline void each(const Arrays &a, u64 first, u64 step, bool broken, Each each) {
        while (at[0] | at[1] | at[2] | at[3]) {
            u32 magnitudes[AHEAD];
            UNROLL for (u32 k = 0; k < AHEAD; ++k) {
                u64 i = 32 * (first + k * step) + (at[k] ? lowest(at[k]) : 0);
                magnitudes[k] = at[k] ? magnitude_of(total_of(a, i, broken)) : 0;
            }
            UNROLL for (u32 k = 0; k < AHEAD; ++k) {
                u32 bit = at[k] & (0 - at[k]);
                if (bit) each(k, bit, magnitudes[k]);
                at[k] ^= bit;
            }
        }
    }
};

struct Beginning {
    Choice first;
    u32 broken, found;
};

__device__ inline Beginning begin(const State *state, u32 k) {
    Counted counted = marked(state);
    const u32 *table = enough(state, counted, k) ? state->first : state->again;
    u32 broken = counted.high, there = broken ? broken : count_all(table, 0).all, found = there < k ? there : k;
    return {found ? choose(table, found) : Choice{DIGITS, 0}, broken, found};  // no magnitude has this digit
}

extern "C" __global__ RESIDENT(8) void narrow(Arrays a, u32 k, State *state, u32 *mask, const u32 *unfit, u64 words) {
    Beginning beginning = once([&] { return begin(state, k); });
    Choice first = beginning.first;
    u32 broken = beginning.broken;
    if (thread() == 0) state->choices[0] = first, state->broken = broken, state->found = beginning.found;
    u32 *counts = begin_counts(state->second);
    for (u64 w = thread(), step = threads(); w < words; w += AHEAD * step) {
        u32 kept[AHEAD] = {};
        Words some(SOURCE && broken ? unfit : mask, w, step, words);
        some.each(a, w, step, broken, [&](u32 k, u32 bit, u32 magnitude) {
            u32 digit = magnitude >> 20;
            if (digit >= first.digit) kept[k] |= bit;
            if (digit == first.digit) count_digit(counts, magnitude >> 10 & 0x3FF);
        });
        UNROLL for (u32 k = 0; k < AHEAD; ++k)
            if (w + k * step < words) mask[w + k * step] = kept[k];
    }
    end_counts(counts, state->second);
}
KERNEL(narrow)

extern "C" __global__ RESIDENT(8) void refine(Arrays a, State *state, const u32 *mask, u64 words) {
    Choice first = state->choices[0], second = once([&] { return choose(state->second, first.rest); });
    second.digit |= first.digit << 10;
    if (thread() == 0) state->choices[1] = second;
    bool broken = state->broken;
    u32 *counts = begin_counts(state->third);
    for (u64 w = thread(), step = threads(); w < words; w += AHEAD * step) {
        Words some(mask, w, step, words);
        some.each(a, w, step, broken, [&](u32, u32, u32 magnitude) {
            if (magnitude >> 10 == second.digit) count_digit(counts, magnitude & 0x3FF);
        });
    }
    end_counts(counts, state->third);
}
KERNEL(refine)

// For words that are LANES apart: a bit for each element larger than the k-th, and for each equal to it.
struct Compared {
    u32 larger[AHEAD], equal[AHEAD];

    __device__ inline Compared(const Arrays &a, const u32 *mask, u64 w, u64 stop, bool broken, u32 kth)
        : larger(), equal() {
        Words some(mask, w, LANES, stop);
        some.each(a, w, LANES, broken, [&](u32 k, u32 bit, u32 magnitude) {
            if (magnitude > kth) larger[k] |= bit;
            if (magnitude == kth) equal[k] |= bit;
        });
    }
};

// span: words of a chunk
extern "C" __global__ void tally(Arrays a, State *state, const u32 *mask, u64 words, u64 span, Pair *sums) {
    Choice second = state->choices[1], third = once([&] { return choose(state->third, second.rest); });
    third.digit |= second.digit << 10;
    if (thread() == 0) state->choices[2] = third;
    bool broken = state->broken;
    for (u64 chunk = worker(); chunk * span < words; chunk += workers()) {
        u64 stop = (chunk + 1) * span < words ? (chunk + 1) * span : words;
        u32 larger = 0, equal = 0;
        for (u64 w = chunk * span + lane(); w < stop; w += AHEAD * LANES) {
            Compared found(a, mask, w, stop, broken, third.digit);
            UNROLL for (u32 k = 0; k < AHEAD; ++k) larger += ones(found.larger[k]), equal += ones(found.equal[k]);
        }
        larger = all_sum(larger);
        equal = all_sum(equal);
        if (lane() == 0) write_sums(sums, chunk, {larger, equal});
    }
}
KERNEL(tally)

extern "C" __global__ void choose_marked(
    Arrays a, State *state, const u32 *mask, u64 words, u64 span, const Pair *sums, u32 *indices, u8 *payload) {
    Choice last = state->choices[2];
    bool broken = state->broken;
    for (u64 chunk = worker(); chunk * span < words; chunk += workers()) {
        u64 stop = (chunk + 1) * span < words ? (chunk + 1) * span : words;
        Pair before = sums_before(sums, chunk);
        u64 equals = before.second, at = before.first + (equals < last.rest ? equals : last.rest);
        for (u64 start = chunk * span; start < stop; start += AHEAD * LANES) {
            u64 first = start + lane();
            Compared found(a, mask, first, stop, broken, last.digit);
            UNROLL for (u32 k = 0; k < AHEAD; ++k) {
                u32 chosen = found.larger[k], equal = found.equal[k];
                u64 rank = equals + all_before(ones(equal));
                equals += all_sum(ones(equal));
                for (; equal && rank < last.rest; ++rank, equal &= equal - 1) chosen |= equal & (0 - equal);
                u64 own = at + all_before(ones(chosen));
                at += all_sum(ones(chosen));
                for (; chosen; chosen &= chosen - 1, ++own) {
                    u64 i = 32 * (first + k * LANES) + lowest(chosen);
                    float y = total_of(a, i, broken), lost = loss(a.kind, y);
                    indices[own] = (u32)i;
                    store_value(payload, a.kind, own, y);
                    if (SOURCE && is_finite(lost)) {
                        a.after[i] = lost;
                        if (SOURCE == ACCUMULATED) a.u_after[i] = 0;
                    }
                }
            }
        }
    }
}
KERNEL(choose_marked)
