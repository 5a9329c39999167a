"""CUDA without a GPU: the kernels' own files compiled by g++ and run."""
