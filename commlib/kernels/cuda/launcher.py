"""Launcher: what the kernels' host side asks of whoever compiles and runs them. CuPy on a GPU, g++ in the tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

Defines = Mapping[str, object]
"""What a source is compiled with, as `-DNAME=value`: each combination is a module of its own, made when first used."""


class Launcher(Protocol):
    """Run kernels of the .cu files beside this one, queued on the current stream."""

    def launch(self, source: str, kernel: str, defines: Defines, workers: int, *args: Any) -> None:
        """Queue `kernel` of the file `source` with at least `workers` workers, but no more than fill the device:
        a kernel's loop does what is more.

        args: numpy scalars (or 0-d structured arrays), each of exactly the type that the kernel declares; an address is
        a numpy.uint64. With no workers nothing is queued.
        """
        ...

    def scratch(self, nbytes: int) -> Any:
        """Return memory of the device (uint8; in tests it is numpy's) for what follows on this stream."""
        ...

    def read(self, memory: Any, dtype: Any) -> Any:
        """Wait for the current stream, and return a scratch memory's contents as a 1-D numpy array on the host."""
        ...
