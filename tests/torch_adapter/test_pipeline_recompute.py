"""Recomputation in a backward of layers that work in place, and of recurrent layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from commlib_torch import pipeline

WIDTH = 4


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


class InPlace(nn.Module):
    """Changes the result of a product, a view of one, and a sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).transpose(0, 1).mul_(0.5).transpose(0, 1)
        h = F.silu(h.relu_() + x, inplace=True)
        h += x
        out: Tensor = self.b(h)
        return F.relu(out, inplace=True) + x


def model() -> nn.Sequential:
    torch.manual_seed(0)
    kinds: list[nn.Module] = [Recurrent(nn.LSTM), InPlace(), Recurrent(nn.GRU), nn.ReLU(inplace=True), InPlace()]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(copy.deepcopy(kind) for _ in range(2) for kind in kinds)).double()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@pytest.mark.parametrize("how", ["selective", "full"])
def test_layers_that_work_in_place(comm: Any, schedule: Any, how: Any) -> None:
    """Regression: torch's checkpointing refused a product that was kept and then changed in place."""
    whole = model()
    pipe = pipeline(model(), comm, schedule=schedule, microbatches=2, loss=F.mse_loss, checkpoint=how)
    x, y = torch.randn(2, 4, 3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(2):
        expected = F.mse_loss(whole(x), y)
        expected.backward()
        torch.testing.assert_close(pipe.step(x, y), expected.detach(), rtol=1e-12, atol=0)
    theirs = dict(whole.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-10, atol=1e-12)
    pipe.close()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_products_are_computed_once(comm: Any, schedule: Any) -> None:
    """With "full" they are computed once more. Regression: split backwards recomputed them for each weight."""
    flops = {}
    for how in ("none", "selective", "full"):
        layers = [nn.Linear(WIDTH, WIDTH) if n % 2 == 0 else nn.Tanh() for n in range(4 * comm.size)]
        pipe = pipeline(
            layers, comm, schedule=schedule, microbatches=3, loss=F.mse_loss, checkpoint=how, split=[4] * comm.size
        )
        x = torch.ones(6, WIDTH)
        with FlopCounterMode(display=False) as counter:
            pipe.step(x, x)
        flops[how] = counter.get_total_flops()
        pipe.close()
    forward = 3 * 2 * (2 * 2 * WIDTH * WIDTH)  # microbatches, layers, and the product of 2 rows with a weight
    assert flops["selective"] == flops["none"] and forward / 2 <= flops["full"] - flops["none"] <= forward
