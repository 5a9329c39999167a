"""Devices: the adapter finds the places of torch's tensors and streams."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import commlib_torch as ct
from commlib.devices.array import DeviceArray
from commlib.devices.cuda import foreign_arrays
from commlib.errors import UsageError
from commlib_torch import devices
from tests.late import LATE
from tests.torch_adapter.late import HostTensors, late


@pytest.fixture
def place() -> Iterator[HostTensors]:
    place = late()
    yield place
    place.close()


def test_torch_accepts_an_array_interface_of_gpu_memory() -> None:
    """The array consists of bytes, has an interface that others read, too, and keeps the memory alive."""
    owner = object()
    gpu: Any = SimpleNamespace(name="cuda", index=1)
    array = DeviceArray(gpu, 0x1000, (3, 5), ml_dtypes.bfloat16, owner, stream="a stream")
    there = foreign_arrays.describe_interface(devices.Cuda().lend(array).__cuda_array_interface__)
    assert (there.address, there.shape, there.dtype) == (0x1000, (30,), np.dtype(np.uint8))
    assert there.contiguous and not there.read_only and there.stream is None


def test_a_tensor_over_an_array_shares_its_memory(place: HostTensors) -> None:
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int64):
        x = torch.arange(6).reshape(2, 3).to(dtype)
        array = devices.array_over(x, LATE)
        assert devices.tensor_over(array) is x
        row = devices.tensor_over(array[1:])
        assert row.dtype == dtype and row.shape == (1, 3) and row.data_ptr() == x[1:].data_ptr()
        assert torch.equal(row, x[1:])


@pytest.mark.usefixtures("place")
def test_new_work_waits_for_earlier_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LATE, "delay", 0.05)
    follow = devices.StreamOrder()
    first, second = LATE.stream(), LATE.stream()
    with LATE.using(first):
        follow()
        x = LATE.put(np.ones(3))  # late
        follow()
    with LATE.using(second):
        follow()
        LATE.synchronise()
        np.testing.assert_array_equal(x.peek(), np.ones(3))


def test_tensors_of_one_group_are_on_one_device(place: HostTensors) -> None:
    place.is_there = lambda tensor: tensor.dtype == torch.float32
    with pytest.raises(UsageError, match="must all be on the host or all on GPUs"):
        ct.grouped_allreduce([torch.zeros(2), torch.zeros(2, dtype=torch.float64)])


def test_a_device_unknown_to_the_core_is_named() -> None:
    with pytest.raises(UsageError, match="device meta has no values"):
        ct.all_reduce(torch.zeros(2, device="meta"))
