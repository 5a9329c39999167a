"""KernelLauncher: the interface that compiles and runs kernels, their arguments, and the text of their files.

CuPy implements it on a GPU, g++ in the tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from commlib.buffers.views import address_of

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


# numpy scalars of the exact widths that kernels declare
u64, i32, u32, f32 = np.uint64, np.int32, np.uint32, np.float32


def pointer_to(x: Any) -> np.uint64:
    """Return the address of an array; 0 for None."""
    if x is None:
        return np.uint64(0)
    return np.uint64(address_of(x) if isinstance(x, np.ndarray) else x.address)


FOLDER = Path(__file__).parent

# Operations are rounded one by one, as on the host.
OPTIONS = ("--std=c++17", "--fmad=false")

_INCLUDE = re.compile(r'^#include "(?P<name>[\w.]+)".*\n', re.MULTILINE)


@cache
def expand_source(name: str) -> str:
    """Return a file's text with its includes, each once, for a compiler without access to a folder.

    A cache with the text as its key thus covers all of them.
    """
    seen: set[str] = set()

    def text(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        written = (FOLDER / name).read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda found: text(found["name"]), written)

    return text(name)
