"""CUDA-aware MPI: query an MPI library whether it accepts GPU memory. `commlib.transport.cuda_probe` tests the claim.

The query depends on the library: some have a function for it, others depend on settings only.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA
_OFF = ("", "0", "no", "off", "false", "disable")


@dataclass(frozen=True, slots=True)
class Answer:
    """A library's claim, None if it cannot be queried, and a text with the source of the claim."""

    is_supported: bool | None
    how: str


def query_loaded(MPI: Any) -> Answer:
    """Query the library that mpi4py's module `MPI` has loaded. MPI must be started."""
    try:
        library = ctypes.CDLL(MPI.__file__)  # finds the symbols of its MPI library too, whatever its file name
    except OSError as error:
        return Answer(None, f"mpi4py's module cannot be opened: {error}")
    return query(library, MPI.Get_library_version())


def query(
    library: Any,
    version: str,
    environment: Mapping[str, str] = os.environ,
    mapped: Callable[[], str] = Path("/proc/self/maps").read_text,
) -> Answer:
    """Query a library.

    library: gives its functions as attributes, like a ctypes.CDLL. version: its version text. mapped: returns a text
    with the files of all libraries in this process.
    """
    answer = _by_settings(version, environment, mapped) or _by_functions(library)
    name = " ".join(version.split("\n")[0].split(",")[0].split())
    return Answer(answer.is_supported, f"{name}: {answer.how}")


def _by_settings(version: str, environment: Mapping[str, str], mapped: Callable[[], str]) -> Answer | None:
    """Return the answer for libraries that accept GPU memory only by a setting; None for others."""
    if "CRAY MPICH" in version.upper():
        if environment.get("MPICH_GPU_SUPPORT_ENABLED", "") in _OFF:
            return Answer(False, "MPICH_GPU_SUPPORT_ENABLED is not 1")
        if "libmpi_gtl_cuda" not in mapped():
            return Answer(False, "MPICH_GPU_SUPPORT_ENABLED is set, but libmpi_gtl_cuda is not loaded")
        return Answer(True, "MPICH_GPU_SUPPORT_ENABLED is set, and libmpi_gtl_cuda is loaded")
    if "INTEL(R) MPI" in version.upper():
        mode = environment.get("I_MPI_OFFLOAD_MODE", "auto")
        if environment.get("I_MPI_OFFLOAD", "").lower() in _OFF:
            return Answer(False, "I_MPI_OFFLOAD is not 1")
        if mode not in ("auto", "cuda"):
            return Answer(False, f"I_MPI_OFFLOAD_MODE is {mode}, not cuda")
        return Answer(True, f"I_MPI_OFFLOAD is set, I_MPI_OFFLOAD_MODE is {mode}")
    return None


def _by_functions(library: Any) -> Answer:
    # Open MPI: up to version 4 its function reports only the build, but this setting can turn the support off.
    if _flag(library, "opal_cuda_support") is False:
        return Answer(
            False, "opal_cuda_support is off: built without CUDA, or turned off by OMPI_MCA_opal_cuda_support"
        )
    if (query := getattr(library, "MPIX_GPU_query_support", None)) is not None:
        flag = ctypes.c_int()
        if query(ctypes.c_int(_CUDA), ctypes.byref(flag)) == 0:
            return Answer(bool(flag.value), f"MPIX_GPU_query_support returns {flag.value} for CUDA")
    if (query := getattr(library, "MPIX_Query_cuda_support", None)) is not None:
        reply = query()
        return Answer(bool(reply), f"MPIX_Query_cuda_support returns {reply}")
    return Answer(None, "it has neither MPIX_Query_cuda_support nor MPIX_GPU_query_support")


def _flag(library: Any, name: str) -> bool | None:
    """Return a bool variable of a library; None if it has none of this name."""
    try:
        return bool(ctypes.c_bool.in_dll(library, name).value)
    except (ValueError, TypeError):  # TypeError: not a library of ctypes'
        return None
