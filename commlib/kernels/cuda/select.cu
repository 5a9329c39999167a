// The largest elements of an array: found exactly, by the digits of the k-th magnitude (11, 10 and 10 bits).
//
//   total   y is computed, and the first digits are counted: for most steps the only pass over all arrays
//   mark    a bit for each element whose first digit is as large; the second digits of those that may be the k-th
//   refine  the third digits of those that still may
//   tally   how many each chunk of the bits has above the k-th magnitude, and how many as large
//   choose_marked  the values to the payload, the indices to a list, what is lost to the residual
//
// Behind `mark` only elements with a bit are read. Of equals the first ones are chosen; if some are not finite these
// alone, which are the largest magnitudes. Zeros are never chosen.
//
// SOURCE says what y is: 0: x; 1: x + before, the residual of error feedback; 2: what Deep Gradient Compression
// accumulates, with momentum u. Where y is not finite, `after` and `u_after` are `before` and u.
#include "digits.cuh"
#include "values.cuh"

#define FED 1
#define ACCUMULATED 2

struct Arrays {
    const float *x, *before, *u;
    float *after, *u_after;  // may be before and u; after is x where there is no residual
    u64 count;
    float scale, decay;
    u32 nesterov, kind;
};

struct State {
    u32 tables[3][DIGITS];  // of zeros at first
    Choice choices[3];
    u32 broken;  // how many are not finite
    u32 found;   // how many are chosen
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

// Return y of an element behind `total`. If any are broken only these are asked for.
__device__ inline float total_of(const Arrays &a, u64 i, bool broken) {
    float after = a.after[i];
    if (!SOURCE || !broken) return after;
    return sum_of(a, a.x[i], after, SOURCE == ACCUMULATED ? a.u_after[i] : 0).y;
}

// A worker's lanes go through a tile in steps, neighbours at neighbours: all loads come first, and so are under way
// together: as many bytes as wide loads would ask for, at any address.
#define TILE 256u
#define STEPS (TILE / LANES)
#define WORDS (TILE / 32)

// A tile's bits, one for each element.
struct Bits {
    u32 words[WORDS];

    __device__ inline void add(u32 step, bool value) {
        words[step * LANES / 32] |= all_bits(value) << (step * LANES % 32);
    }
    __device__ inline void write(u32 *mask, u64 start, u64 count) const {
        UNROLL for (u32 w = 0; w < WORDS; ++w) {
            if (lane() == w % LANES && start + 32 * w < count) mask[start / 32 + w] = words[w];
        }
    }
};

// mask: afterwards the elements that are not finite, where there is a residual
extern "C" __global__ void total(Arrays a, State *state, u32 *mask) {
    u32 *counts = begin_counts(state->tables[0]);
    for (u64 start = TILE * worker(); start < a.count; start += TILE * workers()) {
        float x[STEPS], before[STEPS], u[STEPS];
        UNROLL for (u32 step = 0; step < STEPS; ++step) {
            u64 i = start + step * LANES + lane();
            x[step] = i < a.count ? a.x[i] : 0;
            before[step] = SOURCE && i < a.count ? a.before[i] : 0;
            u[step] = SOURCE == ACCUMULATED && i < a.count ? a.u[i] : 0;
        }
        Bits broken = {};
        UNROLL for (u32 step = 0; step < STEPS; ++step) {
            u64 i = start + step * LANES + lane();
            Sum sum = sum_of(a, x[step], before[step], u[step]);
            bool finite = is_finite(sum.y);
            if (i < a.count) {
                if (SOURCE) a.after[i] = finite ? sum.y : before[step];
                if (SOURCE == ACCUMULATED) a.u_after[i] = finite ? sum.u : u[step];
                if (magnitude_of(sum.y)) count_digit(counts, magnitude_of(sum.y) >> 20);
            }
            if (SOURCE) broken.add(step, i < a.count && !finite);
        }
        if (SOURCE) broken.write(mask, start, a.count);
    }
    end_counts(counts, state->tables[0]);
}
KERNEL(total)

// mask: afterwards the elements that may be chosen
extern "C" __global__ void mark(Arrays a, u32 k, State *state, u32 *mask) {
    Counted counted = count_all(state->tables[0], INFINITY_BITS >> 20);
    u32 broken = counted.high, there = broken ? broken : counted.all, found = there < k ? there : k;
    Choice first = found ? choose(state->tables[0], found) : Choice{DIGITS, 0};  // no magnitude has such a digit
    if (thread() == 0) state->choices[0] = first, state->broken = broken, state->found = found;
    u32 *counts = begin_counts(state->tables[1]);
    for (u64 start = TILE * worker(); start < a.count; start += TILE * workers()) {
        float y[STEPS];
        UNROLL for (u32 step = 0; step < STEPS; ++step) {
            u64 i = start + step * LANES + lane();
            bool asked = i < a.count && (!SOURCE || !broken || mask[i / 32] >> i % 32 & 1);
            y[step] = asked ? total_of(a, i, broken) : 0;
        }
        Bits bits = {};
        UNROLL for (u32 step = 0; step < STEPS; ++step) {
            u32 magnitude = magnitude_of(y[step]), digit = magnitude >> 20;
            bits.add(step, magnitude && digit >= first.digit);
            if (magnitude && digit == first.digit) count_digit(counts, magnitude >> 10 & 0x3FF);
        }
        bits.write(mask, start, a.count);
    }
    end_counts(counts, state->tables[1]);
}
KERNEL(mark)

extern "C" __global__ void refine(Arrays a, State *state, const u32 *mask, u64 words) {
    Choice first = state->choices[0], second = choose(state->tables[1], first.rest);
    second.digit |= first.digit << 10;
    if (thread() == 0) state->choices[1] = second;
    bool broken = state->broken;
    u32 *counts = begin_counts(state->tables[2]);
    for (u64 w = thread(); w < words; w += threads()) {
        for (u32 word = mask[w]; word; word &= word - 1) {
            u32 magnitude = magnitude_of(total_of(a, 32 * w + lowest(word), broken));
            if (magnitude >> 10 == second.digit) count_digit(counts, magnitude & 0x3FF);
        }
    }
    end_counts(counts, state->tables[2]);
}
KERNEL(refine)

// Of the elements of a word, a bit for each that is larger than the k-th, and for each as large.
struct Compared {
    u32 larger, equal;
};

__device__ inline Compared compare(const Arrays &a, u64 w, u32 word, bool broken, u32 magnitude) {
    Compared found = {0, 0};
    for (; word; word &= word - 1) {
        u32 other = magnitude_of(total_of(a, 32 * w + lowest(word), broken)), bit = word & (0 - word);
        if (other > magnitude) found.larger |= bit;
        if (other == magnitude) found.equal |= bit;
    }
    return found;
}

// span: words of a chunk
extern "C" __global__ void tally(Arrays a, State *state, const u32 *mask, u64 words, u64 span, Pair *sums) {
    Choice second = state->choices[1], third = choose(state->tables[2], second.rest);
    third.digit |= second.digit << 10;
    if (thread() == 0) state->choices[2] = third;
    bool broken = state->broken;
    for (u64 chunk = worker(); chunk * span < words; chunk += workers()) {
        u64 stop = (chunk + 1) * span < words ? (chunk + 1) * span : words;
        u32 larger = 0, equal = 0;
        for (u64 w = chunk * span + lane(); w < stop; w += LANES) {
            Compared found = compare(a, w, mask[w], broken, third.digit);
            larger += ones(found.larger);
            equal += ones(found.equal);
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
        for (u64 start = chunk * span; start < stop; start += LANES) {
            u64 w = start + lane();
            Compared found = compare(a, w, w < stop ? mask[w] : 0, broken, last.digit);
            u64 rank = equals + all_before(ones(found.equal));
            equals += all_sum(ones(found.equal));
            u32 chosen = found.larger;
            for (; found.equal && rank < last.rest; ++rank, found.equal &= found.equal - 1) {
                chosen |= found.equal & (0 - found.equal);
            }
            u64 own = at + all_before(ones(chosen));
            at += all_sum(ones(chosen));
            for (; chosen; chosen &= chosen - 1, ++own) {
                u64 i = 32 * w + lowest(chosen);
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
KERNEL(choose_marked)
