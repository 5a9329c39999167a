"""CUDA kernels: the sources, their compilation, and the table of loops that devices call."""
