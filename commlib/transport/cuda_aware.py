"""CUDA-aware MPI: ask an MPI library whether it takes memory of GPUs. A claim: `commlib.transport.cuda_probe` tries it.

Each library is asked in its own words: some have a function for it, and others go by settings alone.
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
    """Say what a library claims, None where it cannot be asked, and in words how that was found out."""

    says: bool | None
    how: str


def ask_loaded(MPI: Any) -> Answer:
    """Ask the library that mpi4py's module `MPI` has loaded. MPI must have been started."""
    try:
        library = ctypes.CDLL(MPI.__file__)  # and what it is linked with: that very MPI, whatever its name
    except OSError as error:
        return Answer(None, f"mpi4py's module cannot be opened: {error}")
    return ask(library, MPI.Get_library_version())


def ask(
    library: Any,
    version: str,
    environment: Mapping[str, str] = os.environ,
    mapped: Callable[[], str] = Path("/proc/self/maps").read_text,
) -> Answer:
    """Ask a library.

    library: finds its functions, as a ctypes.CDLL does. version: what it calls itself. mapped: returns text that names
    the files of all libraries in this process.
    """
    answer = _by_settings(version, environment, mapped) or _by_functions(library)
    name = " ".join(version.split("\n")[0].split(",")[0].split())
    return Answer(answer.says, f"{name}: {answer.how}")


def _by_settings(version: str, environment: Mapping[str, str], mapped: Callable[[], str]) -> Answer | None:
    """Answer for libraries that take memory of GPUs only if they are told to; None for others."""
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
    # Open MPI, whose function says only how it was built up to version 4: the setting can turn it off.
    if _flag(library, "opal_cuda_support") is False:
        return Answer(
            False, "opal_cuda_support is off: built without CUDA, or turned off by OMPI_MCA_opal_cuda_support"
        )
    if (query := getattr(library, "MPIX_GPU_query_support", None)) is not None:
        found = ctypes.c_int()
        if query(ctypes.c_int(_CUDA), ctypes.byref(found)) == 0:
            return Answer(bool(found.value), f"MPIX_GPU_query_support says {found.value} for CUDA")
    if (query := getattr(library, "MPIX_Query_cuda_support", None)) is not None:
        said = query()
        return Answer(bool(said), f"MPIX_Query_cuda_support says {said}")
    return Answer(None, "it has neither MPIX_Query_cuda_support nor MPIX_GPU_query_support")


def _flag(library: Any, name: str) -> bool | None:
    """Return a truth value that a library holds; None if it has none of this name."""
    try:
        return bool(ctypes.c_bool.in_dll(library, name).value)
    except (ValueError, TypeError):  # TypeError: not a library of ctypes'
        return None
