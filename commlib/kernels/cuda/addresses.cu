// Write up to COUNT addresses to device memory. Kernel arguments are the fastest path to it.
#include "common.cuh"

struct Addresses {
    u64 at[COUNT];
};

extern "C" __global__ void write_addresses(const Addresses addresses, u64 *target, u64 count) {
    for (u64 i = thread(); i < count; i += threads()) target[i] = addresses.at[i];
}
KERNEL(write_addresses)
