"""Blocks on CUDA: runs of elements from one order of dimensions to another, as numpy has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commlib.dtypes import DTYPES, NUMPY
from commlib.kernels.cuda.table import CudaKernels
from commlib.kernels.host.table import HostKernels
from commlib.kernels.protocol import BlockLayout
from tests.cuda.hard import assert_same_bits, shifted, values
from tests.cuda.launcher import HostLauncher

HOST = HostKernels()
RUNS = (1, 2, 15, 16, 31, 32, 33, 100)


def between_orders(rows: int, columns: int, run: int) -> BlockLayout:
    """Blocks of (rows, columns, run) of a source whose order is (columns, rows, run)."""
    return BlockLayout(rows, columns, run, run, rows * run, columns * run, run)


def copied(x: Any, target: Any, blocks: BlockLayout, workers: int = 1) -> Any:
    """Return the result of CUDA's kernel, which must equal the host's."""
    expected = target.copy()
    HOST.copy_blocks(x, expected, blocks)
    CudaKernels(HostLauncher(workers)).copy_blocks(x, target, blocks)
    assert_same_bits(target, expected)
    return target


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", [1, 10_000])
def test_dimensions_are_transposed(dtype: str, workers: int) -> None:
    for run in RUNS:
        for shift in (0, 1):
            x = shifted(values(dtype, 3 * 4 * run, run), shift)
            result = copied(x, shifted(np.zeros_like(x), 1 - shift), between_orders(4, 3, run), workers)
            assert_same_bits(result, np.ascontiguousarray(x.reshape(3, 4, run).swapaxes(0, 1)).reshape(-1))


@pytest.mark.parametrize("run", RUNS)
def test_gaps_between_blocks_do_not_change(run: int) -> None:
    x, target = values("float32", 5 * 40 * run, 1), values("float32", 5 * 60 * run, 2)
    expected = target.reshape(5, 60 * run).copy()
    expected[:, 7 : 7 + 3 * run] = x.reshape(5, 40 * run)[:, 2 * run : 5 * run]
    copied(x[2 * run :], target[7:], BlockLayout(5, 1, 3 * run, 40 * run, 0, 60 * run, 0))
    assert_same_bits(target, expected.reshape(-1))


def test_empty_arrays_are_copied() -> None:
    nothing = np.zeros(0, NUMPY["float32"])
    copied(nothing, nothing, between_orders(0, 3, 5))
    copied(nothing, nothing, between_orders(4, 3, 0))
