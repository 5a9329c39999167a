// Copy many arrays into one, or back. Each array is cut into items of ITEM bytes, and a worker copies items: however
// many arrays there are and however long one is, all workers have the same to do.
#include "runs.cuh"

struct Arrays {
    u64 at[ARRAYS];    // where each begins
    u64 ends[ARRAYS];  // where each ends in the packed array
    u32 items[ARRAYS]; // how many items there are up to its end
};

__device__ inline void copy(u8 *target, const u8 *source, u64 nbytes) {
    each_run<16>(target, nbytes, lane(), LANES, Copying<u8>{source, target});
}

// Call body(address, place in the packed array, bytes) for each item of this worker.
template <class Body>
__device__ inline void each_item(const Arrays &arrays, u32 count, Body body) {
    for (u64 item = worker(); item < arrays.items[count - 1]; item += workers()) {
        u32 low = 0, high = count - 1;
        while (low < high) {
            u32 middle = (low + high) / 2;
            if (item < arrays.items[middle]) high = middle;
            else low = middle + 1;
        }
        u64 start = low == 0 ? 0 : arrays.ends[low - 1];
        u64 skipped = (item - (low == 0 ? 0 : arrays.items[low - 1])) * ITEM;
        u64 left = arrays.ends[low] - start - skipped;
        body((u8 *)arrays.at[low] + skipped, start + skipped, left < ITEM ? left : ITEM);
    }
}

extern "C" __global__ void pack(const Arrays arrays, u32 count, u8 *packed) {
    each_item(arrays, count, [&](u8 *array, u64 place, u64 nbytes) { copy(packed + place, array, nbytes); });
}
KERNEL(pack)

extern "C" __global__ void unpack(const Arrays arrays, u32 count, const u8 *packed) {
    each_item(arrays, count, [&](u8 *array, u64 place, u64 nbytes) { copy(array, packed + place, nbytes); });
}
KERNEL(unpack)
