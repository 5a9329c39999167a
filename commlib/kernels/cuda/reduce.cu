// Combine arrays of ELEMENT by OPERATION, and write the result to one or more arrays, in one pass over all of them.
#include "operations.cuh"
#include "runs.cuh"

// Operands that are loaded before the first of them is used, to overlap the loads of a thread.
#define BATCH 4u

// Addresses of the operands, followed by those of the targets: the first NEAR of them.
struct Addresses {
    u64 at[NEAR];
};

struct Reduction {
    const Addresses &near;
    const u64 *far;  // addresses that are not in `near`
    u32 operands, targets;
    i64 divisor;

    __device__ ELEMENT *array(u32 k) const { return (ELEMENT *)(k < NEAR ? near.at[k] : far[k - NEAR]); }

    // A target may be one of the operands: a thread writes where it has read.
    template <u32 N>
    __device__ void run(u64 start) const {
        typedef Part<OPERATION, ELEMENT, N % 4 == 0> Taken;
        typedef typename Taken::Type Type;
        constexpr u32 M = N / Taken::COUNT;
        decltype(OPERATION::widen(Type())) total[M] = {};
        Run<Type, M> some[BATCH];
        for (u32 k = 0; k < operands; k += BATCH) {
            UNROLL for (u32 j = 0; j < BATCH; ++j)
                if (k + j < operands) some[j] = taken_as<Run<Type, M>>(read<ELEMENT, N>(array(k + j) + start));
            UNROLL for (u32 j = 0; j < BATCH; ++j)
                if (k + j < operands) add(total, some[j], k + j == 0);
        }
        Run<Type, M> combined;
        UNROLL for (u32 i = 0; i < M; ++i) combined.set(i, (Type)OPERATION::finish(total[i], divisor));
        auto result = taken_as<Run<ELEMENT, N>>(combined);
        for (u32 k = 0; k < targets; ++k) write(array(operands + k) + start, result);
    }

    template <class Wide, class Type, u32 M>
    static __device__ void add(Wide (&total)[M], const Run<Type, M> &run, bool first) {
        UNROLL for (u32 i = 0; i < M; ++i) {
            Wide value = OPERATION::widen(run.get(i));
            total[i] = first ? value : OPERATION::combine(total[i], value);
        }
    }
};

extern "C" __global__ void reduce(
    const Addresses near, const u64 *far, u32 operands, u32 targets, u64 count, i64 divisor) {
    Reduction reduction = {near, far, operands, targets, divisor};
    each_run<WIDE<ELEMENT>>(reduction.array(operands), count, reduction);
}
KERNEL(reduce)
