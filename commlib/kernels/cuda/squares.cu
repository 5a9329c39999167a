// Sum squares of ELEMENT, or (SQUARE is 0) numbers, in float64: each `span` elements become one number.
//
// The host adds up 512 sums, which is too few for a GPU. The order here differs, but is fixed: one worker sums a span,
// and the elements of a lane do not depend on addresses or on the number of workers.
#include "elements.cuh"
#include "runs.cuh"

// Loads in flight per lane, each with a separate sum: there are few workers, to leave few sums for the next pass.
#define LOADS 4u

template <u32 N>
__device__ inline void add(double &sum, const Run<ELEMENT, N> &run) {
    UNROLL for (u32 i = 0; i < N; ++i) {
        double value = widen(run.get(i));
        sum += SQUARE ? value * value : value;
    }
}

extern "C" __global__ void sum_spans(const ELEMENT *x, u64 count, u64 span, double *sums) {
    constexpr u32 N = WIDE<ELEMENT>;
    const u64 step = LANES * N;
    for (u64 number = worker(); number * span < count; number += workers()) {
        u64 at = number * span + lane() * N, stop = count - number * span < span ? count : (number + 1) * span;
        double own[LOADS] = {};
        for (; at + (LOADS - 1) * step + N <= stop; at += LOADS * step) {
            Run<ELEMENT, N> runs[LOADS];
            UNROLL for (u32 k = 0; k < LOADS; ++k) runs[k] = read<ELEMENT, N>(x + at + k * step);
            UNROLL for (u32 k = 0; k < LOADS; ++k) add(own[k], runs[k]);
        }
        for (; at < stop; at += step) {
            Run<ELEMENT, N> run = {};
            UNROLL for (u32 i = 0; i < N; ++i)
                if (at + i < stop) run.set(i, x[at + i]);
            add(own[0], run);
        }
        double sum = 0;
        UNROLL for (u32 k = 0; k < LOADS; ++k) sum += own[k];
        sum = all_sum(sum);
        if (lane() == 0) sums[number] = sum;
    }
}
KERNEL(sum_spans)
