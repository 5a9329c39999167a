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
# NVRTC's settings: each operation is rounded as written. Strict about everything that NVRTC would refuse, too.
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
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        pytest.skip("there is no C++ compiler, which runs the kernels of CUDA where there is no GPU: apt install g++")
    return path


@cache
def library(code: str, defines: tuple[str, ...], lanes: int = 1) -> ctypes.CDLL:
    """Return the library of a source's whole text, compiled with `-D` of each define; cached for other tests.

    lanes: of a worker: 1, or 32 as on a GPU, which is slow, and strict about alignment.
    """
    header = HERE / ("on_host.h" if lanes == 1 else "on_lanes.h")
    strict = () if lanes == 1 else ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
    options = [*OPTIONS, *strict, *(f"-D{define}" for define in defines)]
    key = "\0".join([code, *options, header.read_text(), (HERE / "words.h").read_text()])
    folder = Path(tempfile.gettempdir()) / f"commlib-cuda-on-host-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    target = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as own:  # another process may be building it: the last one wins
            source, built = Path(own, "kernel.cpp"), Path(own, "kernel.so")
            source.write_text(code)
            command = [compiler(), *options, "-include", str(header), str(source), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise AssertionError(f"g++ refuses this kernel ({', '.join(defines)}):\n{done.stderr}")
            built.rename(target)
    return ctypes.CDLL(str(target))


def as_options(defines: Mapping[str, object]) -> tuple[str, ...]:
    """Return defines as options of a compiler."""
    return tuple(f"{name}={value}" for name, value in sorted(defines.items()))


def sizes(built: ctypes.CDLL, kernel: str) -> list[int]:
    """Return how many bytes each of a kernel's arguments has."""
    sizes_of_arguments = (ctypes.c_int * 65)()
    getattr(built, f"sizes_{kernel}")(sizes_of_arguments)
    return list(sizes_of_arguments)[: list(sizes_of_arguments).index(0)]


def run(built: ctypes.CDLL, kernel: str, workers: int, values: list[np.ndarray]) -> None:
    """Run a launch; values: the arguments as 0-d arrays, each of the size that the kernel expects."""
    expected = sizes(built, kernel)
    actual = [value.nbytes for value in values]
    assert expected == actual, f"{kernel} has arguments of {expected} bytes, and was given {actual}"
    pointers = (ctypes.c_void_p * max(len(values), 1))(*(value.ctypes.data for value in values))
    launch = getattr(built, f"launch_{kernel}")
    launch.restype = None
    launch(ctypes.c_ulonglong(workers), pointers)
