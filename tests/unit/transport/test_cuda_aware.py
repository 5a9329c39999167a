"""GPU support reported by MPI libraries: libraries that gcc builds here, and settings."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from commlib.transport.cuda_aware import Answer, query

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: ..."
OPEN_MPI = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.29.27 (ANL base 3.4a2)\nMPI BUILD INFO : ..."
INTEL = "Intel(R) MPI Library 2021.14 for Linux* OS\n"
GTL = "7f0-7f1 r-xp 0 0 0 /opt/cray/pe/lib64/libmpi_gtl_cuda.so.0"


def built(folder: Path, code: str) -> ctypes.CDLL:
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        pytest.skip("there is no C compiler to build libraries with: apt install gcc")
    source, target = folder / "mpi.c", folder / "libmpi.so"
    source.write_text(code)
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


QUERY = "int MPIX_Query_cuda_support(void) {{ return {}; }}\n"
GPU_QUERY = "int MPIX_GPU_query_support(int kind, int *found) {{ *found = {} && kind == 0; return {}; }}\n"
FLAG = "#include <stdbool.h>\nbool opal_cuda_support = {};\n"


@pytest.mark.parametrize(
    "version, code, says, how",
    [
        (OPEN_MPI, QUERY.format(1), True, "MPIX_Query_cuda_support returns 1"),
        (OPEN_MPI, QUERY.format(0), False, "MPIX_Query_cuda_support returns 0"),
        (OPEN_MPI, QUERY.format(1) + FLAG.format("true"), True, "MPIX_Query_cuda_support returns 1"),
        (OPEN_MPI, QUERY.format(1) + FLAG.format("false"), False, "opal_cuda_support is off"),
        (MPICH, GPU_QUERY.format(1, 0), True, "MPIX_GPU_query_support returns 1 for CUDA"),
        (MPICH, GPU_QUERY.format(0, 0) + QUERY.format(1), False, "MPIX_GPU_query_support returns 0 for CUDA"),
        (
            MPICH,
            GPU_QUERY.format(1, 16) + QUERY.format(0),
            False,
            "MPIX_Query_cuda_support returns 0",
        ),  # the query failed
        (MPICH, "int MPI_Init(void) { return 0; }", None, "it has neither"),
    ],
)
def test_query_functions_are_called(tmp_path, version, code, says, how):
    answer = query(built(tmp_path, code), version, {}, lambda: "")
    assert answer.is_supported is says
    assert answer.how.startswith(version.split("\n")[0].split(",")[0][:8]) and how in answer.how


@pytest.mark.parametrize(
    "version, environment, mapped, expected",
    [
        (CRAY, {}, GTL, (False, "MPICH_GPU_SUPPORT_ENABLED is not 1")),
        (CRAY, {"MPICH_GPU_SUPPORT_ENABLED": "0"}, GTL, (False, "MPICH_GPU_SUPPORT_ENABLED is not 1")),
        (CRAY, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, "", (False, "libmpi_gtl_cuda is not loaded")),
        (CRAY, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, GTL, (True, "libmpi_gtl_cuda is loaded")),
        (INTEL, {}, "", (False, "I_MPI_OFFLOAD is not 1")),
        (INTEL, {"I_MPI_OFFLOAD": "0"}, "", (False, "I_MPI_OFFLOAD is not 1")),
        (INTEL, {"I_MPI_OFFLOAD": "1"}, "", (True, "I_MPI_OFFLOAD is set")),
        (INTEL, {"I_MPI_OFFLOAD": "1", "I_MPI_OFFLOAD_MODE": "level_zero"}, "", (False, "is level_zero, not cuda")),
    ],
)
def test_settings_decide_for_libraries_that_follow_them(tmp_path, version, environment, mapped, expected):
    answer = query(built(tmp_path, QUERY.format(1 - expected[0])), version, environment, lambda: mapped)
    assert answer.is_supported is expected[0] and expected[1] in answer.how


def test_a_library_is_named_in_one_line():
    assert query(object(), CRAY, {}, lambda: "") == Answer(
        False, "MPI VERSION : CRAY MPICH version 8.1.29.27 (ANL base 3.4a2): MPICH_GPU_SUPPORT_ENABLED is not 1"
    )
