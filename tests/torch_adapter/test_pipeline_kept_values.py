"""Kept values: inputs of a stage that a layer, a hook or a loss keeps stay unchanged, at no cost for others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib_torch import pipeline

WIDTH, MICROBATCHES = 4, 4


def model(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))).double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, y


class Keeper:
    """Keeps the arguments of hooks and of a loss, in different ways."""

    def __init__(self) -> None:
        self.given: dict[str, list[Tensor]] = {}

    def watch(self, model: nn.Module, names: Any) -> None:
        layer: nn.Module
        for name, layer in model.named_modules():
            if name in names:
                self.register(name, layer)

    def register(self, name: str, layer: nn.Module) -> None:
        layer.register_forward_hook(lambda _, given, out: self.keep(f"{name} in", given[0].detach()))
        layer.register_full_backward_hook(lambda _, new, came: self.keep(f"{name} out", next(iter(came))))
        layer.register_forward_pre_hook(lambda _, given: self.keep(f"{name} part", given[0][:, 1:3]))

    def keep(self, name: str, value: Tensor) -> None:
        self.given.setdefault(name, []).append(value)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.keep("loss", output.detach().view(-1))
        return F.mse_loss(output, target)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@pytest.mark.parametrize("since", [0, 2], ids=["from the beginning", "later"])
def test_kept_values_do_not_change(comm: Any, schedule: Any, since: int) -> None:
    """Regression: they were in message memory, and changed with the next messages."""
    names = [str(number) for number in range(2 * comm.size)]
    whole, own = model(2 * comm.size), model(2 * comm.size)
    theirs, ours = Keeper(), Keeper()
    pipe = pipeline(
        own, comm, schedule=schedule, microbatches=MICROBATCHES, split=[1] * (2 * comm.size) if schedule == "zb_v"
        else [2] * comm.size, loss=lambda output, target: ours.loss(output, target),
    )  # fmt: skip
    for step in range(since + 3):
        if step == since:
            ours.given.clear()
            theirs.watch(whole, names)
            for stage in pipe.parts:
                ours.watch(stage, names)
        x, y = batch(step)
        pipe.step(x, y)
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            if step >= since:
                (theirs.loss(whole(part), target) / MICROBATCHES).backward()
        for other in range(2):  # later messages reuse the memory of earlier ones
            pipe.evaluate(*batch(100 + other))
            for values in ours.given.values():
                del values[MICROBATCHES * (max(0, step - since) + 1) :]
    for name, values in ours.given.items():
        expected = theirs.given[name]
        assert len(values) == len(expected) == 3 * MICROBATCHES or name == "loss"
        for value, wanted in zip(values[-3 * MICROBATCHES :], expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12, msg=name)
    pipe.close()


class Caching(nn.Module):
    """Keeps its last input, with its graph and as an array."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.arrays: list[Any] = []
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        self.arrays.append(x.detach().numpy())
        out: Tensor = self.inner(x)
        return out


def test_values_kept_by_a_layer_do_not_change(comm: Any) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(*(Caching() for _ in range(comm.size))).double()
    pipe = pipeline(copy.deepcopy(whole), comm, microbatches=MICROBATCHES, loss=F.mse_loss)
    for step in range(3):
        x, y = batch(step)
        pipe.step(x, y)
        for part in x.chunk(MICROBATCHES):
            whole(part)
    ours, theirs = next(pipe.parts[0].children()), whole[comm.rank]
    assert isinstance(ours, Caching) and isinstance(theirs, Caching)
    assert ours.last is not None and theirs.last is not None
    torch.testing.assert_close(ours.last, theirs.last, rtol=1e-10, atol=1e-12)
    for value, wanted in zip(ours.arrays, theirs.arrays, strict=True):
        torch.testing.assert_close(torch.from_numpy(value), torch.from_numpy(wanted), rtol=1e-10, atol=1e-12)
    pipe.close()


class Usual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.1)) + x
        return out


@pytest.mark.parametrize(
    ("schedule", "how"), [("1f1b", "none"), ("zb_v", "none"), ("interleaved", "full"), ("zb_h1", "selective")]
)
def test_nothing_is_copied_if_nothing_is_kept(comm: Any, schedule: Any, how: Any) -> None:
    layers: list[nn.Module] = [
        layer for _ in range(2 * comm.size) for layer in (nn.Identity(), Usual(), nn.ReLU(inplace=True), nn.Identity())
    ]
    pipe = pipeline(
        layers, comm, schedule=schedule, microbatches=4, loss=F.mse_loss, checkpoint=how, batch_norm="microbatch"
    )
    x = torch.ones(8, WIDTH)
    pipe.step(x, x)
    for _ in range(3):
        pipe.step(x, x)
        pipe.evaluate(x, x)
        assert pipe.pipe.runner.copied == 0
    pipe.close()
