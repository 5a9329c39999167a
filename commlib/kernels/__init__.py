"""Compiled loops over array elements: one protocol, for hosts (numba) and for CUDA devices (NVRTC)."""
