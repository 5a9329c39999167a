// Products of a matrix with a few vectors, for PowerSGD: one pass over the matrix for every RANKS vectors.
//
// A matrix is rows * cols float32 in row-major order. Its factors are stored vector by vector: `left` is rank x rows,
// `right` is rank x cols.
//
// A sum is the sum of its parts' sums, in order. The length of parts depends on the shape, but not on the device. The
// order within a part is fixed by this kernel. (The host's order is fixed by its compiler: only this rank sees these
// sums before they are reduced.) `expand`, which each rank computes separately, equals the host's bit for bit.
#include "memory.cuh"

#define ROWS 8u  // rows that a worker takes at a time, to use each number of a factor often
#define COLS 4u  // columns that a lane takes at a time

// Add `before` to the matrix, unless it is null, and write the sums of matrix * right over each part of the columns to
// `parts`: rank x rows for each. `part` is a multiple of LANES.
//
// A worker needs many registers for its sums, but two blocks of 8 workers must fit, or there are too few loads in
// flight.
extern "C" __global__ void __launch_bounds__(256, 2) project(
    float *matrix, const float *before, u64 rows, u64 cols, u64 part, const float *right, float *parts, u32 rank) {
    u64 bands = (rows + ROWS - 1) / ROWS, in_all = bands * ((cols + part - 1) / part);
    for (u64 item = worker(); item < in_all; item += workers()) {
        u64 number = item / bands, row = item % bands * ROWS;
        u64 stop = (number + 1) * part < cols ? (number + 1) * part : cols;
        for (u32 first = 0; first < rank; first += RANKS) {
            float sums[ROWS][RANKS] = {};
            for (u64 j = number * part + lane(); j < stop; j += LANES) {
                float x[ROWS], more[ROWS];
                UNROLL for (u32 i = 0; i < ROWS; ++i) x[i] = row + i < rows ? matrix[(row + i) * cols + j] : 0;
                if (before && first == 0) {
                    UNROLL for (u32 i = 0; i < ROWS; ++i) more[i] = row + i < rows ? before[(row + i) * cols + j] : 0;
                    UNROLL for (u32 i = 0; i < ROWS; ++i) {
                        x[i] += more[i];
                        if (row + i < rows) matrix[(row + i) * cols + j] = x[i];
                    }
                }
                float factor[RANKS];
                UNROLL for (u32 k = 0; k < RANKS; ++k) factor[k] = first + k < rank ? right[(first + k) * cols + j] : 0;
                UNROLL for (u32 k = 0; k < RANKS; ++k) {
                    UNROLL for (u32 i = 0; i < ROWS; ++i) sums[i][k] = fmaf(x[i], factor[k], sums[i][k]);
                }
            }
            UNROLL for (u32 k = 0; k < RANKS; ++k) {
                if (first + k < rank) {
                    UNROLL for (u32 i = 0; i < ROWS; ++i) {
                        float sum = all_sum(sums[i][k]);
                        if (lane() == 0 && row + i < rows) parts[(number * rank + first + k) * rows + row + i] = sum;
                    }
                }
            }
        }
    }
}
KERNEL(project)

// Write the sums of matrix^T * left over each part of the rows to `parts`: rank x cols for each.
extern "C" __global__ void project_back(
    const float *matrix, u64 rows, u64 cols, u64 part, const float *left, float *parts, u32 rank) {
    u64 bands = (cols + COLS * LANES - 1) / (COLS * LANES), in_all = bands * ((rows + part - 1) / part);
    for (u64 item = worker(); item < in_all; item += workers()) {
        u64 number = item / bands, col = item % bands * COLS * LANES + lane();
        u64 stop = (number + 1) * part < rows ? (number + 1) * part : rows;
        for (u32 first = 0; first < rank; first += RANKS) {
            float sums[COLS][RANKS] = {};
            for (u64 i = number * part; i < stop; ++i) {
                float x[COLS], factor[RANKS];
                UNROLL for (u32 k = 0; k < RANKS; ++k) factor[k] = first + k < rank ? left[(first + k) * rows + i] : 0;
                UNROLL for (u32 c = 0; c < COLS; ++c) {
                    x[c] = col + c * LANES < cols ? matrix[i * cols + col + c * LANES] : 0;
                }
                UNROLL for (u32 k = 0; k < RANKS; ++k) {
                    UNROLL for (u32 c = 0; c < COLS; ++c) sums[c][k] = fmaf(x[c], factor[k], sums[c][k]);
                }
            }
            UNROLL for (u32 k = 0; k < RANKS; ++k) {
                UNROLL for (u32 c = 0; c < COLS; ++c) {
                    u64 j = col + c * LANES;
                    if (first + k < rank && j < cols) parts[(number * rank + first + k) * cols + j] = sums[c][k];
                }
            }
        }
    }
}
KERNEL(project_back)

// Add up the parts' sums: `count` sums each.
extern "C" __global__ void add_up_parts(const float *parts, u64 number, float *out, u64 count) {
    for (u64 i = thread(); i < count; i += threads()) {
        float sum = parts[i];
        for (u64 part = 1; part < number; ++part) sum += parts[part * count + i];
        out[i] = sum;
    }
}
KERNEL(add_up_parts)

// Four numbers of a factor, from consecutive vectors, times a sign; zeros after the last vector.
struct Numbers {
    float at[4];
};

__device__ inline Numbers numbers_of(const float *factor, u64 length, u64 at, u32 first, u32 rank, float sign = 1) {
    Numbers numbers;
    UNROLL for (u32 k = 0; k < 4; ++k) numbers.at[k] = first + k < rank ? sign * factor[(first + k) * length + at] : 0;
    return numbers;
}

// Return their product, added up in the host's order.
__device__ inline float product(Numbers a, Numbers b) {
    float sum = a.at[0] * b.at[0];
    UNROLL for (u32 k = 1; k < 4; ++k) sum += a.at[k] * b.at[k];
    return sum;
}

// Write after = matrix - left^T own_right, unless it is null, then matrix = left^T right.
extern "C" __global__ void expand(
    float *matrix, float *after, u64 rows, u64 cols, const float *left, const float *right, const float *own_right,
    u32 rank) {
    u64 bands = (cols + LANES - 1) / LANES, in_all = bands * ((rows + ROWS - 1) / ROWS);
    for (u64 item = worker(); item < in_all; item += workers()) {
        u64 row = item / bands * ROWS, j = item % bands * LANES + lane();
        if (j >= cols) continue;
        float lost[ROWS], products[ROWS];
        UNROLL for (u32 i = 0; i < ROWS; ++i) lost[i] = after && row + i < rows ? matrix[(row + i) * cols + j] : 0;
        for (u32 first = 0; first < rank; first += 4) {
            Numbers shared = numbers_of(right, cols, j, first, rank), own = shared;
            if (after) own = numbers_of(own_right, cols, j, first, rank);
            UNROLL for (u32 i = 0; i < ROWS; ++i) {
                u64 at = row + i < rows ? row + i : 0;
                Numbers down = numbers_of(left, rows, at, first, rank);
                if (first == 0) {
                    lost[i] -= product(down, own);
                    products[i] = product(down, shared);
                } else {
                    lost[i] += product(numbers_of(left, rows, at, first, rank, -1), own);
                    products[i] += product(down, shared);
                }
            }
        }
        UNROLL for (u32 i = 0; i < ROWS; ++i) {
            if (row + i >= rows) continue;
            if (after) after[(row + i) * cols + j] = lost[i];
            matrix[(row + i) * cols + j] = products[i];
        }
    }
}
KERNEL(expand)
