"""Combine arrays in GPU memory, in place and asynchronously, and check the results.

    mpirun -n 2 python examples/gpu_arrays.py

Several ranks may share a GPU. PyTorch's GPU tensors use the same paths: `digits_torch.py --device cuda`.
"""

from __future__ import annotations

import sys

import cupy
import numpy as np

import commlib

COUNT = 1 << 20
STEPS = 10


def main() -> int:
    comm = commlib.init()
    cupy.cuda.Device(comm.node().rank % cupy.cuda.runtime.getDeviceCount()).use()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = comm.empty(COUNT, "float32", device="cuda")  # addressable by the other ranks' GPUs
        x.set(np.full(COUNT, comm.rank + 1, np.float32))
        mean = comm.plan_all_reduce(x, "mean", out=x)  # prepared once
        for _ in range(STEPS):
            mean()  # queued on this stream; nothing is copied
        work = comm.all_gather_async(x[:4])  # on commlib's stream
        everyone = work.wait()  # this stream waits for the result, the host does not
        result, gathered = x.get(), everyone.get()
    expected = (comm.size + 1) / 2
    right = (result == expected).all() and (gathered == expected).all() and len(gathered) == 4 * comm.size
    if comm.rank == 0:
        print(f"{comm.size} ranks, mean {result[0]}, {'right' if right else f'expected {expected}'}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
