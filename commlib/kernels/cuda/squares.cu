// Sum squares of ELEMENT, or (SQUARE is 0) numbers, in float64: each BLOCK elements become one number.
//
// The host adds up 512 sums, which is too few for a GPU. The order here is another one, but fixed: a block is summed by
// one worker, and a lane has the same of its elements wherever they lie in memory and however many workers there are.
#include "elements.cuh"
#include "runs.cuh"

extern "C" __global__ void sum_blocks(const ELEMENT *x, u64 count, double *sums) {
    constexpr u32 N = WIDE<ELEMENT>;
    for (u64 block = worker(); block * BLOCK < count; block += workers()) {
        u64 start = block * BLOCK, length = count - start < BLOCK ? count - start : BLOCK;
        double sum = 0;
        for (u32 at = lane() * N; at < length; at += LANES * N) {
            Run<ELEMENT, N> run = {};
            if (at + N <= length) run = read<ELEMENT, N>(x + start + at);
            else
                UNROLL for (u32 i = 0; i < N; ++i)
                    if (at + i < length) run.set(i, x[start + at + i]);
            UNROLL for (u32 i = 0; i < N; ++i) {
                double value = widen(run.get(i));
                sum += SQUARE ? value * value : value;
            }
        }
        sum = all_sum(sum);
        if (lane() == 0) sums[block] = sum;
    }
}
KERNEL(sum_blocks)
