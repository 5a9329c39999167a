"""Compile kernels as on a GPU, without one: NVRTC from NVIDIA's wheels, which need no driver."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest

from commlib.kernels.cuda.sources import OPTIONS, expand_source

WHEELS = "cuda-bindings==12.9.* nvidia-cuda-nvrtc-cu12==12.9.*"


def compiled(source: str, defines: Sequence[str], arch: str) -> tuple[bytes, str]:
    """Return a source's machine code for "sm_90", or another; PTX for "compute_90"; and the compiler's output.

    Skips the test where there is no NVRTC, or one that does not support the architecture. Raises AssertionError with
    the compiler's message if it refuses the source.
    """
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()  # loads the library
    except Exception as missing:  # a missing library raises an error of its own
        pytest.skip(f"there is no NVRTC here ({missing}): pip install {WHEELS}")
    (architectures,) = _answer(nvrtc.nvrtcGetSupportedArchs())
    if int(arch.split("_")[1]) not in architectures:
        pytest.skip(f"this NVRTC compiles for {architectures}, not for {arch}: pip install {WHEELS}")
    (program,) = _answer(nvrtc.nvrtcCreateProgram(expand_source(source).encode(), source.encode(), 0, [], []))
    try:
        options = [f"-arch={arch}", *OPTIONS, *(f"-D{define}" for define in defines)]
        (refused,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytearray(_answer(nvrtc.nvrtcGetProgramLogSize(program))[0])
        _answer(nvrtc.nvrtcGetProgramLog(program, log))
        output = log.decode().rstrip("\0")
        assert not refused, f"NVRTC refuses {source} ({' '.join(options)}):\n{output}"
        kind = "PTX" if arch.startswith("compute") else "CUBIN"
        code = bytearray(_answer(getattr(nvrtc, f"nvrtcGet{kind}Size")(program))[0])
        _answer(getattr(nvrtc, f"nvrtcGet{kind}")(program, code))
        return bytes(code), output
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _answer(returned: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a function's result without its status."""
    error, *answer = returned
    assert not error, error
    return tuple(answer)
