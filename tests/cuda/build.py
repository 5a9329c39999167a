"""Build a kernel's source with g++, for tests on machines without a GPU. The result is a library that runs launches."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
# As NVRTC is told: each operation is rounded as it is written. Strict about what NVRTC would refuse, too.
OPTIONS = (
    "-std=c++17",
    "-O2",
    "-shared",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-Wall",
    "-Werror",
    "-Wno-unknown-pragmas",
)


def compiler() -> str:
    """Return g++, or skip the test."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        pytest.skip("there is no C++ compiler, which runs the kernels of CUDA where there is no GPU: apt install g++")
    return found


@cache
def library(code: str, defines: tuple[str, ...], lanes: int = 1) -> ctypes.CDLL:
    """Return the library of a source's whole text, compiled with `-D` of each define; kept for this user's other tests.

    lanes: of a worker: 1, or 32 as on a GPU, which is slow, and strict about alignment.
    """
    header = HERE / ("on_host.h" if lanes == 1 else "on_lanes.h")
    strict = () if lanes == 1 else ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
    options = [*OPTIONS, *strict, *(f"-D{define}" for define in defines)]
    told = "\0".join([code, *options, header.read_text(), (HERE / "words.h").read_text()])
    folder = Path(tempfile.gettempdir()) / f"commlib-cuda-on-host-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    target = folder / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as own:  # another process may be at it: the last one wins
            source, built = Path(own, "kernel.cpp"), Path(own, "kernel.so")
            source.write_text(code)
            command = [compiler(), *options, "-include", str(header), str(source), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise AssertionError(f"g++ refuses this kernel ({', '.join(defines)}):\n{done.stderr}")
            built.rename(target)
    return ctypes.CDLL(str(target))


def written(defines: Mapping[str, object]) -> tuple[str, ...]:
    """Return defines as a compiler is told them."""
    return tuple(f"{name}={value}" for name, value in sorted(defines.items()))


def sizes(built: ctypes.CDLL, kernel: str) -> list[int]:
    """Return how many bytes each of a kernel's arguments has."""
    found = (ctypes.c_int * 65)()
    getattr(built, f"sizes_{kernel}")(found)
    return list(found)[: list(found).index(0)]


def run(built: ctypes.CDLL, kernel: str, workers: int, values: list[np.ndarray]) -> None:
    """Run a launch; values: the arguments as 0-d arrays, of which the kernel must want as many bytes each."""
    wanted = sizes(built, kernel)
    given = [value.nbytes for value in values]
    assert wanted == given, f"{kernel} has arguments of {wanted} bytes, and was given {given}"
    pointers = (ctypes.c_void_p * max(len(values), 1))(*(value.ctypes.data for value in values))
    launch = getattr(built, f"launch_{kernel}")
    launch.restype = None
    launch(ctypes.c_ulonglong(workers), pointers)
