"""A pipeline of tensors on a device: values travel between stages from device to device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import commlib
import commlib_torch as ct
from commlib.communicator import Communicator
from commlib.config.settings import Config
from commlib.p2p.channels.device_channel import DeviceChannel
from commlib.runtime.process import Runtime
from commlib.transport.mpi import MpiTransport
from tests.late import LATE
from tests.torch_adapter.late import HostTensors, late

pytestmark = pytest.mark.ranks(min=2)


@pytest.fixture(scope="module", params=["off", "peers"])
def group(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    world = commlib.init()
    runtime = Runtime(Config(timeout=20, device_peers=request.param == "peers"), world.runtime.ranks_on_node)
    ranks = Communicator(MpiTransport(world.native.Dup()), runtime, f"late pipeline {request.param}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LATE, "has_signals", True)
        yield ranks
        ranks.close()


@pytest.fixture
def place() -> Iterator[HostTensors]:
    place, races = late(), LATE.races
    yield place
    place.close()
    assert LATE.races == races


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
@pytest.mark.parametrize("codec", [None, "bf16"])
def test_trains_as_on_the_host(
    group: Any, place: HostTensors, monkeypatch: pytest.MonkeyPatch, schedule: Any, codec: str | None
) -> None:
    opened: list[Any] = []
    channel = Communicator.channel

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        opened.append(channel(self, *args, **options))
        return opened[-1]

    monkeypatch.setattr(Communicator, "channel", noted)

    def run() -> tuple[Any, ...]:
        torch.manual_seed(4)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2 * group.size)))
        pipe = ct.pipeline(model, group, schedule=schedule, microbatches=4, loss=F.mse_loss, codec=codec)
        x = torch.arange(54.0).view(9, 6).cos()
        losses = [pipe.step(x, torch.ones(9, 6)) for _ in range(2)]
        losses.append(pipe.evaluate(x[:3], torch.ones(3, 6)))
        gradients = [weight.grad.clone() for weight in pipe.parameters() if weight.grad is not None]
        outputs = pipe.predict(x)
        pipe.close()
        return (*losses, *gradients, outputs)

    with place.host():
        expected = run()
    assert opened and not any(isinstance(one, DeviceChannel) for one in opened)
    opened.clear()
    result = run()
    assert opened and all(isinstance(one, DeviceChannel) for one in opened)
    assert len(result) == len(expected)
    for got, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
