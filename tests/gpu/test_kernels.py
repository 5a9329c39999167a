"""Every kernel on the GPU, or on the stand-in, does what the host's does: the same bits where it computes the same."""

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

FRONTS = (4, 1)  # elements before each array, which nothing may touch: it begins where wide loads can, or not


class There:
    """The GPU's copies of host arrays: the same array is the same copy. All lie behind a front of so many elements."""

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
        """Yield each host array and what the GPU has made of its copy."""
        for value, copy in self._copies.values():
            found = self._gpu.fetch(copy)
            nbytes = self._front * value.itemsize
            assert (found[:nbytes] == 99).all(), "what lies before an array was written"
            yield value, found[nbytes:].copy().view(value.dtype)


def parts(name: str, arguments: tuple[Any, ...], array: Any) -> list[Any]:
    """Return the parts of an array as what they are: a NaN in a payload may be another one on a GPU."""
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
            continue  # for the stand-in g++ takes its time
        there = There(gpu, FRONTS[number % 2])
        answer = cuda(*map(there.put, arguments))
        found = list(there.results())
        with np.errstate(all="ignore"):
            assert answer == host(*arguments), number
        for expected, made in found:
            if name == "orthonormalise":  # sums have another order: one rounding may go to the other neighbour
                np.testing.assert_allclose(made, expected, rtol=0, atol=2.0**-23)
                continue
            for one, other in zip(*(parts(name, arguments, each) for each in (made, expected)), strict=True):
                assert_same_bits(one, other)


def test_all_kernels_are_here():
    named = {name for name, _ in inspect.getmembers(Kernels, inspect.isfunction) if not name.startswith("_")}
    assert set(MAKERS) == named


def test_a_difference_is_seen(gpu):
    """Else this file could not fail."""
    there, fill = There(gpu), gpu.device.kernels.fill
    copy = there.put(np.ones(100, np.float32))
    fill(copy[50:51], 2)
    ((expected, made),) = there.results()
    with pytest.raises(AssertionError):
        assert_same_bits(made, expected)
    fill(DeviceArray(gpu.device, copy.address - 1, (1,), np.uint8, copy.owner), 1)
    with pytest.raises(AssertionError, match="before an array"):
        list(there.results())
