// Write 1 to `flag`, which was 0, if a float32 is infinite or NaN.
#include "floats.cuh"
#include "runs.cuh"

struct Search {
    const float *x;
    u32 *flag;

    template <u32 N>
    __device__ void run(u64 start) const {
        auto run = read<float, N>(x + start);
        bool any = false;
        UNROLL for (u32 i = 0; i < N; ++i) any |= !is_finite(run.get(i));
        if (any) *flag = 1;  // all writers write the same value
    }
};

extern "C" __global__ void find_not_finite(const float *x, u64 count, u32 *flag) {
    each_run<WIDE<float>>(x, count, Search{x, flag});
}
KERNEL(find_not_finite)
