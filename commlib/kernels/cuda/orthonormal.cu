// Gram-Schmidt in float64, in one launch. Each step needs a complete sum before the next step begins. Therefore one
// team does the work: the threads of a block, which can wait for each other. Tests have a team of one.
//
// Each member of the team has its own elements of all vectors, which no other member reads or writes. A sum is the sum
// of the members' sums, in an order that depends on the block size. The host's order differs; both use float64, and the
// result is float32.
#include "memory.cuh"

#ifdef __CUDACC__
__device__ inline u32 member() { return threadIdx.x; }
__device__ inline u32 team() { return blockDim.x; }
__device__ inline bool plays() { return blockIdx.x == 0; }

__device__ inline double team_sum(double value) {
    __shared__ double sums[32];  // one per worker
    value = all_sum(value);
    __syncthreads();  // the previous sums have been read
    if (lane() == 0) sums[threadIdx.x / LANES] = value;
    __syncthreads();
    return all_sum(lane() < blockDim.x / LANES ? sums[lane()] : 0.0);
}
#else
inline u32 member() { return 0; }
inline u32 team() { return 1; }
inline bool plays() { return thread() == 0; }
inline double team_sum(double value) { return value; }
#endif

#define AT_ONCE 8u  // elements in flight per thread, because a team is too small to hide the latency of memory

// Subtract `factor` times y from x, and return the dot product of the remainder with z; z may be x.
__device__ inline double subtract_and_multiply(double *x, double factor, const double *y, const double *z, u64 n) {
    double sum = 0;
    for (u64 start = member(); start < n; start += AT_ONCE * team()) {
        double old[AT_ONCE], less[AT_ONCE], with[AT_ONCE];
        UNROLL for (u32 i = 0; i < AT_ONCE; ++i) {
            u64 j = start + i * team();
            old[i] = j < n ? x[j] : 0;
            less[i] = j < n ? y[j] : 0;
            with[i] = j < n ? z[j] : 0;
        }
        UNROLL for (u32 i = 0; i < AT_ONCE; ++i) {
            u64 j = start + i * team();
            double left = old[i] - factor * less[i];
            if (j < n) x[j] = left;
            sum += left * (z == x ? left : with[i]);
        }
    }
    return team_sum(sum);
}

// Make `rank` vectors of n numbers, which are stored consecutively, orthonormal in place. See
// kernels/host/orthonormal.py. work: as many float64. dropped: how many became zero; -1, without changes to the
// vectors, if not all numbers are finite.
extern "C" __global__ void orthonormalise(
    float *vectors, u64 n, u32 rank, double epsilon, double *work, i32 *dropped) {
    if (!plays()) return;
    i32 zeros = 0;
    for (u32 k = 0; k < rank; ++k) {
        double *x = work + k * n, sum = 0;
        for (u64 j = member(); j < n; j += team()) {
            x[j] = vectors[k * n + j];
            sum += x[j] * x[j];
        }
        double length = sqrt(team_sum(sum));
        if (!(length <= 1.7976931348623157e308)) {
            if (member() == 0) *dropped = -1;
            return;
        }
        // Twice, because the first pass leaves errors that are large relative to a small remainder. The subtraction
        // from x is combined with the previous dot product, so each vector is read once for it.
        double factor = -0.0;  // initially neutral, even for the sign of a zero
        const double *other = x;
        for (u32 step = 0; step < 2 * k; ++step) {
            const double *next = work + step % k * n;
            factor = subtract_and_multiply(x, factor, other, next, n);
            other = next;
        }
        double rest = sqrt(subtract_and_multiply(x, factor, other, x, n));
        bool drop = rest <= epsilon * length;
        for (u64 j = member(); j < n; j += team()) x[j] = drop ? 0 : x[j] / rest;
        zeros += drop;
    }
    for (u32 k = 0; k < rank; ++k) {
        for (u64 j = member(); j < n; j += team()) vectors[k * n + j] = (float)work[k * n + j];
    }
    if (member() == 0) *dropped = zeros;
}
KERNEL(orthonormalise)
