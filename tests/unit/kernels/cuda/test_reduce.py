"""Reductions on CUDA are the host's, to the last bit (but what kind of NaN one is)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commlib.dtypes import BITWISE, INTEGERS, NUMPY, kernel_operation
from commlib.kernels.cuda.table import CudaKernels
from commlib.kernels.host.table import HostKernels
from tests.cuda.hard import assert_same_bits, shifted, values
from tests.cuda.launcher import HostLauncher
from tests.oracles.oracle import REDUCIBLE

HOST = HostKernels()
PAIRS = [*REDUCIBLE, *((dtype, operation) for dtype in INTEGERS for operation in BITWISE)]
WORKERS = [1, 7, 1000]
LENGTHS = (0, 1, 2, 15, 16, 17, 33, 700)


def expected(dtype: str, op: str, operands: list[Any], divisor: int) -> Any:
    result = np.empty_like(operands[0])
    HOST.reduce(dtype, op, divisor, operands, result)
    return result


@pytest.mark.parametrize("dtype, op", PAIRS)
def test_reductions_match_the_host(dtype: str, op: str) -> None:
    op, launcher = kernel_operation(dtype, op), HostLauncher()
    for length in LENGTHS:
        for n in range(1, 7):
            launcher.most_workers = WORKERS[n % len(WORKERS)]
            # All at the same offset from a multiple of 16 bytes, or each at its own.
            for places in ([length % 3] * (n + 1), range(n, -1, -1)):
                operands = [shifted(values(dtype, length, n + k), places[k]) for k in range(n)]
                originals, divisor = [x.copy() for x in operands], n + length % 2
                target = shifted(values(dtype, length, 99), places[n])
                CudaKernels(launcher).reduce(dtype, op, divisor, operands, target)
                assert_same_bits(target, expected(dtype, op, originals, divisor))
                for x, before in zip(operands, originals, strict=True):
                    np.testing.assert_array_equal(x.view(np.uint8), before.view(np.uint8))
    assert len(launcher.launches) == 2 * 6 * (len(LENGTHS) - 1)


@pytest.mark.parametrize("dtype, op", PAIRS)
def test_reductions_into_operands_match_the_host(dtype: str, op: str) -> None:
    """Into one operand, into further arrays, and into all operands: each in one launch."""
    op, length = kernel_operation(dtype, op), 133
    for n in range(1, 5):
        for chosen in [*([k] for k in range(n)), range(n)]:
            operands = [shifted(values(dtype, length, n + k), k % 2) for k in range(n)]
            others = [shifted(values(dtype, length, 99), k) for k in range(3)]
            result = expected(dtype, op, [x.copy() for x in operands], n)
            targets, launcher = [*(operands[k] for k in chosen), *others], HostLauncher()
            CudaKernels(launcher).reduce_to(dtype, op, n, operands, targets)
            for target in targets:
                assert_same_bits(target, result)
            assert launcher.launches == ["reduce"]


@pytest.mark.parametrize("dtype, op", [("float16", "sum"), ("bfloat16", "mean"), ("int8", "prod"), ("float32", "sum")])
@pytest.mark.parametrize("n, launches", [(31, 1), (32, 2), (40, 2), (512, 3)])
def test_reductions_of_many_operands_match_the_host(dtype: str, op: str, n: int, launches: int) -> None:
    """Addresses that do not fit the arguments are in device memory. Still all is rounded once, into any operand."""
    random = np.random.default_rng(n)
    operands: list[Any] = [random.integers(-9, 9, 37).astype(NUMPY[dtype]) for _ in range(n)]
    operands[0][:] = 1 if dtype == "int8" else 0.1
    result = expected(dtype, op, [x.copy() for x in operands], n)
    launcher = HostLauncher()
    CudaKernels(launcher).reduce(dtype, op, n, operands, operands[-1])
    assert_same_bits(operands[-1], result)
    assert len(launcher.launches) == launches


@pytest.mark.parametrize("bits", [0x7FFF, 0xFFFF, 0x7F81, 0xFFC0])
def test_a_nan_of_any_payload_stays_nan(bits: int) -> None:
    """The NaN that a GPU makes has all bits set; rounded as a number to bfloat16, it would become -0."""
    x = np.full(9, bits, np.uint16).view(NUMPY["bfloat16"])
    for op in ("sum", "max"):
        for operands in ([x], [x, np.ones_like(x)], [np.ones_like(x), x]):
            target = np.zeros_like(x)
            CudaKernels(HostLauncher()).reduce("bfloat16", op, 1, operands, target)
            assert np.isnan(target.astype(np.float32)).all()
