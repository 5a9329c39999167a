// Multiply all elements by one ELEMENT.
#include "operations.cuh"
#include "runs.cuh"

struct Scaling {
    ELEMENT *target;
    ELEMENT factor;

    template <u32 N>
    __device__ void run(u64 start) const {
        auto run = read<ELEMENT, N>(target + start);
        UNROLL for (u32 i = 0; i < N; ++i) run.set(i, (ELEMENT)times(widen(run.get(i)), widen(factor)));
        write(target + start, run);
    }
};

extern "C" __global__ void scale(ELEMENT *target, u64 count, ELEMENT factor) {
    each_run<WIDE<ELEMENT>>(target, count, Scaling{target, factor});
}
KERNEL(scale)
