"""Every kernel on the GPU, or on the stand-in, against the host's: the same bits where it computes the same."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from commlib.devices.array import DeviceArray
from commlib.dtypes import NUMPY
from commlib.kernels.protocol import Kernels
from tests.cuda.hard import assert_same_bits
from tests.gpu.every_kernel import HOST, MAKERS

pytestmark = pytest.mark.any_ranks

FRONTS = (4, 1)  # elements before each array, which nothing may touch: it begins at an address for wide loads, or not


class GpuCopies:
    """The GPU's copies of host arrays: each array has one copy. Each copy is preceded by so many guard elements."""

    def __init__(self, gpu: Any, front: int = FRONTS[0]) -> None:
        self._gpu, self._front, self._copies = gpu, front, dict[int, tuple[Any, Any]]()

    def put(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.put(each) for each in value]
        if not isinstance(value, np.ndarray):
            return value
        if id(value) not in self._copies:
            front = np.full(self._front * value.itemsize, 99, np.uint8)
            self._copies[id(value)] = value, self._gpu.put(np.concatenate([front, value.view(np.uint8)]))
        whole = self._gpu.device.wrap(self._copies[id(value)][1], "test")
        return whole[self._front * value.itemsize :].view(value.dtype)

    def results(self) -> Iterator[tuple[Any, Any]]:
        """Yield each host array and the GPU's result in its copy."""
        for value, copy in self._copies.values():
            fetched = self._gpu.fetch(copy)
            nbytes = self._front * value.itemsize
            assert (fetched[:nbytes] == 99).all(), "memory before an array was written"
            yield value, fetched[nbytes:].copy().view(value.dtype)


def parts(name: str, arguments: tuple[Any, ...], array: Any) -> list[Any]:
    """Return the parts of an array by their meaning: a NaN in a payload may be another one on a GPU."""
    if array.dtype != np.uint8:
        return [array]
    if name == "narrow":
        return [array.view(NUMPY["bfloat16" if arguments[-1] else "float16"])]
    if name in ("quantise", "signs"):
        scales = 4 * -(-len(arguments[0]) // arguments[4])
        return [array[:scales].view(np.float32), array[scales:]]
    return [array]


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_kernel(gpu, name):
    host, cuda = getattr(HOST, name), getattr(gpu.device.kernels, name)
    for number, arguments in enumerate(MAKERS[name]()):
        if number % 5 and not gpu.is_real:
            continue  # for the stand-in, g++ is slow
        copies = GpuCopies(gpu, FRONTS[number % 2])
        answer = cuda(*map(copies.put, arguments))
        results = list(copies.results())
        with np.errstate(all="ignore"):
            assert answer == host(*arguments), number
        for expected, actual in results:
            if name == "orthonormalise":  # sums have another order: one rounding may go to the other neighbour
                np.testing.assert_allclose(actual, expected, rtol=0, atol=2.0**-23)
                continue
            for one, other in zip(*(parts(name, arguments, each) for each in (actual, expected)), strict=True):
                assert_same_bits(one, other)


def test_the_list_of_kernels_is_complete():
    named = {name for name, _ in inspect.getmembers(Kernels, inspect.isfunction) if not name.startswith("_")}
    assert set(MAKERS) == named


def test_a_difference_is_detected(gpu):
    """Otherwise this file could not fail."""
    copies, fill = GpuCopies(gpu), gpu.device.kernels.fill
    copy = copies.put(np.ones(100, np.float32))
    fill(copy[50:51], 2)
    ((expected, actual),) = copies.results()
    with pytest.raises(AssertionError):
        assert_same_bits(actual, expected)
    fill(DeviceArray(gpu.device, copy.address - 1, (1,), np.uint8, copy.owner), 1)
    with pytest.raises(AssertionError, match="before an array"):
        list(copies.results())
