"""CUDA as a device of commlib, over CuPy: arrays of any library on the GPU, streams, kernels, shared memory."""
