"""KernelLauncher: the interface that compiles and runs kernels. CuPy implements it on a GPU, g++ in the tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from commlib.kernels.protocol import Kernels

Defines = Mapping[str, object]
"""Compiler definitions, as `-DNAME=value`. Each combination is a separate module, compiled on first use."""


class KernelLauncher(Protocol):
    """Runs kernels of the .cu files in this folder, queued on the current stream."""

    def launch(self, source: str, kernel: str, defines: Defines, workers: int, *args: Any) -> None:
        """Queue `kernel` of the file `source` with at least `workers` workers, at most as many as fill the device.

        A kernel's loop processes the rest. args: numpy scalars (or 0-d structured arrays), each of the exact type that
        the kernel declares; an address is a numpy.uint64. Without workers nothing is queued.
        """
        ...

    def scratch(self, nbytes: int) -> Any:
        """Return device memory (uint8; a numpy array in tests) for later work on this stream."""
        ...

    def read(self, memory: Any, dtype: Any) -> Any:
        """Wait for the current stream, and return a scratch memory's contents as a 1-D numpy array on the host."""
        ...


class LaunchedKernels(Kernels):
    """Kernels that a launcher runs: the base of each file's share of the table."""

    def __init__(self, launcher: KernelLauncher) -> None:
        self._launch, self._scratch, self._read = launcher.launch, launcher.scratch, launcher.read
