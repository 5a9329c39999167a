// Set all elements to one ELEMENT.
#include "elements.cuh"
#include "runs.cuh"

struct Filling {
    ELEMENT *target;
    ELEMENT value;

    template <u32 N>
    __device__ void run(u64 start) const {
        Run<ELEMENT, N> run;
        UNROLL for (u32 i = 0; i < N; ++i) run.set(i, value);
        write(target + start, run);
    }
};

extern "C" __global__ void fill(ELEMENT *target, u64 count, ELEMENT value) {
    each_run<WIDE<ELEMENT>>(target, count, Filling{target, value});
}
KERNEL(fill)
