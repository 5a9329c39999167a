// Copy many arrays into one, or back. Each array is cut into items of ITEM bytes, and workers copy items. The load is
// balanced for any number of arrays of any length.
#include "runs.cuh"

struct Arrays {
    u64 at[ARRAYS];    // start of each
    u64 ends[ARRAYS];  // end of each in the packed array
    u32 items[ARRAYS]; // number of items up to its end
};

__device__ inline void copy(u8 *target, const u8 *source, u64 nbytes) {
    each_run<16>(target, nbytes, lane(), LANES, Copying<u8>{source, target});
}

// Call body(address, position in the packed array, bytes) for each item of this worker.
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
