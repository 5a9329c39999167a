// Block copies: copy rows x columns of runs of elements to another order of dimensions.
//
// ELEMENT is an unsigned integer of an element's size. For short runs, a thread copies single elements, in the target's
// order; otherwise a worker copies a run.
#include "runs.cuh"

struct Blocks {
    u64 rows, columns, run;
    u64 from_row, from_column;  // distances in elements in the source
    u64 to_row, to_column;      // and in the target

    __device__ u64 from(u64 block) const { return block / columns * from_row + block % columns * from_column; }
    __device__ u64 to(u64 block) const { return block / columns * to_row + block % columns * to_column; }
};

extern "C" __global__ void copy_blocks(const Blocks blocks, const ELEMENT *source, ELEMENT *target) {
    u64 count = blocks.rows * blocks.columns;
    for (u64 block = worker(); block < count; block += workers()) {
        ELEMENT *to = target + blocks.to(block);
        each_run<WIDE<ELEMENT>>(to, blocks.run, lane(), LANES, Copying<ELEMENT>{source + blocks.from(block), to});
    }
}
KERNEL(copy_blocks)

extern "C" __global__ void copy_elements(const Blocks blocks, const ELEMENT *source, ELEMENT *target) {
    u64 count = blocks.rows * blocks.columns * blocks.run;
    for (u64 i = thread(); i < count; i += threads()) {
        u64 block = i / blocks.run, at = i % blocks.run;
        target[blocks.to(block) + at] = source[blocks.from(block) + at];
    }
}
KERNEL(copy_elements)
