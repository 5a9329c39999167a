"""Devices: protocols of devices, streams and their arrays; the host, and CUDA over CuPy."""
