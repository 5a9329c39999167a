// Replace a gradient, scaled, by its sum with the momentum. The new momentum stays finite.
#include "floats.cuh"
#include "runs.cuh"

struct Momentum {
    float *gradient;
    const float *u;
    float *u_after;
    float scale, momentum;
    u32 nesterov;

    template <u32 N>
    __device__ void run(u64 start) const {
        auto g = read<float, N>(gradient + start), old = read<float, N>(u + start), after = old;
        UNROLL for (u32 i = 0; i < N; ++i) {
            float scaled = g.of[i] * scale;
            float fresh = nesterov ? momentum * (old.of[i] + scaled) : momentum * old.of[i] + scaled;
            g.of[i] = nesterov ? fresh + scaled : fresh;
            if (is_finite(fresh)) after.of[i] = fresh;
        }
        write(gradient + start, g);
        write(u_after + start, after);
    }
};

extern "C" __global__ void add_momentum(
    float *gradient, const float *u, float *u_after, u64 count, float scale, float momentum, u32 nesterov) {
    each_run<WIDE<float>>(gradient, count, Momentum{gradient, u, u_after, scale, momentum, nesterov});
}
KERNEL(add_momentum)
