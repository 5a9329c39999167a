"""Torch's tensors on the late device: torch computes at once, and commlib's work is late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import commlib
from commlib.communicator import Communicator
from commlib.config.settings import Config
from commlib.devices.array import DeviceArray
from commlib.devices.waiting import wait_for
from commlib.errors import MismatchError
from commlib.runtime.process import Runtime
from commlib.transport.mpi import MpiTransport
from commlib_torch.tensor.context import attention
from tests.bodies.device_paths import kinds_gathered
from tests.late import LATE
from tests.torch_adapter import device_gradients, device_layers, device_training, device_verbs, values
from tests.torch_adapter.late import HostStream, HostTensors, late


@pytest.fixture(scope="module", params=["staged", "peers"])
def group(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    """A group of all ranks whose late streams wait for those of other ranks, or use the host."""
    world = commlib.init()
    settings = Config(timeout=20, device_slot_kib=64, device_peers=request.param == "peers")
    runtime = Runtime(settings, world.runtime.ranks_on_node)
    ranks = Communicator(MpiTransport(world.native.Dup()), runtime, f"late {request.param}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LATE, "has_signals", True)
        yield ranks
        ranks.close()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostTensors]:
    monkeypatch.setattr(LATE, "delay", 1e-3)
    place, races, queued = late(), LATE.races, LATE.queued
    yield place
    place.close()
    assert LATE.races == races
    assert LATE.queued > queued or commlib.world().size == 1  # all data took that path


@pytest.mark.parametrize("dtype", values.ALL, ids=str)
def test_verbs(group: Any, place: HostTensors, dtype: torch.dtype) -> None:
    device_verbs.reductions(group, place, dtype)
    device_verbs.movement(group, place, dtype)


def test_every_form_of_tensor(group: Any, place: HostTensors) -> None:
    for form in values.FORMS:
        device_verbs.reductions(group, place, torch.bfloat16, form)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("how", ["DistributedOptimizer", "DataParallel"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_trains_exactly(group: Any, place: HostTensors, how: str, overlap: bool, set_to_none: bool) -> None:
    device_training.trains_exactly(group, place, how, overlap=overlap, set_to_none=set_to_none)


@pytest.mark.ranks(min=2)
def test_the_host_waits_once_per_backward(group: Any, place: HostTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the flags that ranks exchange at the end, not for the gradients."""
    waits: list[Any] = []

    def waiting(event: Any, on_wait: Any) -> None:
        waits.append(event)
        wait_for(event, on_wait)

    monkeypatch.setattr("commlib.data_parallel.memory.wait_for", waiting)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    called, optimizer = device_training.wrapped(group, model, "DistributedOptimizer", overlap=True)
    for step in range(4):
        optimizer.zero_grad()
        called(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert len(waits) == step + 1


@pytest.mark.parametrize("compression", ["fp16", "int8", "sign", "topk:ratio=0.1", "powersgd:rank=2"])
def test_compresses(group: Any, place: HostTensors, compression: str) -> None:
    device_gradients.compresses(group, place, compression)


@pytest.mark.ranks(min=2)
def test_rows_stay_on_the_device(group: Any, place: HostTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = kinds_gathered(monkeypatch)
    device_gradients.gathers_rows(group, place)
    assert gathered == {DeviceArray}


def test_parameters_on_host_and_device(group: Any, place: HostTensors) -> None:
    place.is_there = lambda tensor: tensor.dtype != torch.float64
    device_training.host_and_device(group, place)


@pytest.mark.ranks(min=2)
def test_attention_uses_one_kind_of_device(group: Any, place: HostTensors) -> None:
    """If one rank sent host messages while others waited on channels, the ring would deadlock."""
    place.is_there = lambda tensor: group.rank == 0
    q = torch.ones(1, 2, 4, 6)
    with pytest.raises(MismatchError, match="device"):
        attention(q, q, q, group)
    place.is_there = lambda tensor: True
    torch.testing.assert_close(attention(q, q, q, group), q)


@pytest.mark.parametrize("body", [*device_verbs.BODIES, *device_training.BODIES, *device_gradients.BODIES])
def test_body(group: Any, place: HostTensors, body: Any) -> None:
    body(group, place)


@pytest.mark.parametrize("body", device_layers.BODIES)
def test_layers(group: Any, body: Any) -> None:
    """Some of these have no device work: exchanges of experts and stages use the host."""
    place = late()
    try:
        body(group, place)
    finally:
        place.close()


@pytest.mark.ranks(min=2)
def test_a_missing_wait_is_detected(group: Any, place: HostTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail."""
    monkeypatch.setattr(HostStream, "wait", lambda self, event: None)
    with LATE.careless(), pytest.raises(AssertionError):  # at the first result, on all ranks
        device_verbs.reductions(group, place, torch.float32)
    monkeypatch.undo()
    group.barrier()
