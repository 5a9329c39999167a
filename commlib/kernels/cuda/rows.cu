// Rows of floats: take them, add them up by token, and multiply them by numbers.
//
// Rows come from two arrays, `there` and `here`: place p >= 0 is row p of `there`, and p < 0 is row ~p of `here`, which
// is multiplied by factors[~p] unless `factors` is null. Arithmetic is as in kernels/host/rows.py: in float32 (in
// float64 for float64), in the order of the places, rounded once.
//
// A worker processes a row at a time.
#include "elements.cuh"
#include "runs.cuh"

struct Rows {
    const ELEMENT *here, *there;
    const float *factors;
    u64 width;

    __device__ const ELEMENT *at(i32 place) const {
        return place < 0 ? here + (u64)~place * width : there + (u64)place * width;
    }
    __device__ float factor(i32 place) const { return place < 0 && factors ? factors[~place] : 1.0f; }
};

extern "C" __global__ void take_rows(Rows rows, const i32 *places, u64 count, ELEMENT *target) {
    for (u64 i = worker(); i < count; i += workers()) {
        ELEMENT *to = target + i * rows.width;
        each_run<WIDE<ELEMENT>>(to, rows.width, lane(), LANES, Copying<ELEMENT>{rows.at(places[i]), to});
    }
}
KERNEL(take_rows)

struct Adding {
    Rows rows;
    const i32 *places;
    u64 count;
    ELEMENT *target;

    template <u32 N>
    __device__ void run(u64 start) const {
        decltype(widen(ELEMENT())) sums[N] = {};
        for (u64 i = 0; i < count; ++i) {
            i32 place = places[i];
            auto values = read<ELEMENT, N>(rows.at(place) + start);
            float factor = rows.factor(place);
            UNROLL for (u32 k = 0; k < N; ++k) {
                auto product = widen(values.get(k)) * factor;
                sums[k] = i == 0 ? product : sums[k] + product;  // adding a zero would change -0
            }
        }
        Run<ELEMENT, N> result;
        UNROLL for (u32 k = 0; k < N; ++k) result.set(k, (ELEMENT)sums[k]);
        write(target + start, result);
    }
};

// Set row t of the target to the sum of the rows at places[starts[t]] to places[starts[t + 1]], 0 if there are none;
// without starts, to the row at places[t].
extern "C" __global__ void sum_rows(Rows rows, const i32 *starts, const i32 *places, u64 count, ELEMENT *target) {
    for (u64 t = worker(); t < count; t += workers()) {
        u64 first = starts ? starts[t] : t, last = starts ? starts[t + 1] : t + 1;
        ELEMENT *to = target + t * rows.width;
        each_run<WIDE<ELEMENT>>(to, rows.width, lane(), LANES, Adding{rows, places + first, last - first, to});
    }
}
KERNEL(sum_rows)

#define BLOCK 64u  // products are added up separately for each position in it, as on the host
#define HELD (BLOCK / LANES)

#ifdef __CUDACC__
__device__ inline float from_lane(float value, u32 which) { return __shfl_sync(EVERY_LANE, value, which); }
__device__ inline float from_above(float value, u32 distance) { return __shfl_down_sync(EVERY_LANE, value, distance); }
#else
inline float from_lane(float value, u32) { return value; }
inline float from_above(float, u32) { return 0; }
#endif

// Return the sum of a block's sums. Lane l has the sums of the positions l, l + LANES and so on.
__device__ inline float sum_of_block(float (&sums)[HELD]) {
    UNROLL for (u32 half = BLOCK / 2; half >= 8; half /= 2) {
        if (half >= LANES) {
            UNROLL for (u32 k = 0; k < half / LANES; ++k) sums[k] += sums[k + half / LANES];
        } else {
            sums[0] += from_above(sums[0], half);
        }
    }
    float total = 0;
    UNROLL for (u32 place = 0; place < 8; ++place) total += from_lane(sums[place / LANES], place % LANES);
    return total;
}

// Set `scaled`, which may be `rows`, to rows times factors, and `products` to the dot products of `rows` and `others`.
extern "C" __global__ void multiply_rows(
    const ELEMENT *rows, const ELEMENT *others, const float *factors, u64 count, u64 width, ELEMENT *scaled,
    float *products) {
    for (u64 i = worker(); i < count; i += workers()) {
        const ELEMENT *row = rows + i * width, *other = others + i * width;
        ELEMENT *to = scaled + i * width;
        float factor = factors[i], sums[HELD] = {};
        u64 whole = width / BLOCK * BLOCK;
        for (u64 start = lane(); start < whole; start += BLOCK) {
            UNROLL for (u32 k = 0; k < HELD; ++k) {
                u64 j = start + k * LANES;
                auto value = widen(row[j]);
                sums[k] += (float)(value * widen(other[j]));
                to[j] = (ELEMENT)(value * factor);
            }
        }
        float total = sum_of_block(sums);
        for (u64 start = whole; start < width; start += LANES) {  // the rest, which fills no block, in order
            u64 j = start + lane();
            float product = 0;
            if (j < width) {
                auto value = widen(row[j]);
                product = (float)(value * widen(other[j]));
                to[j] = (ELEMENT)(value * factor);
            }
            for (u32 k = 0; k < LANES && start + k < width; ++k) total += from_lane(product, k);
        }
        if (lane() == 0) products[i] = total;
    }
}
KERNEL(multiply_rows)
