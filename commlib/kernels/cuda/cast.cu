// Convert SOURCE to TARGET, both type names of elements.cuh.
#include "elements.cuh"
#include "runs.cuh"

struct Casting {
    const SOURCE *source;
    TARGET *target;

    template <u32 N>
    __device__ void run(u64 start) const {
        auto values = read<SOURCE, N>(source + start);
        Run<TARGET, N> result;
        UNROLL for (u32 i = 0; i < N; ++i) result.set(i, (TARGET)widen(values.get(i)));
        write(target + start, result);
    }
};

extern "C" __global__ void cast(const SOURCE *source, TARGET *target, u64 count) {
    // The wider type has runs of 16 bytes.
    if constexpr (sizeof(TARGET) > sizeof(SOURCE)) each_run<WIDE<TARGET>>(target, count, Casting{source, target});
    else each_run<WIDE<SOURCE>>(source, count, Casting{source, target});
}
KERNEL(cast)
