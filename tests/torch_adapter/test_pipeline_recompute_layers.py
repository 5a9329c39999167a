"""Recomputation of single layers, named by patterns or chosen by a function."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import PeerError, UsageError
from commlib_torch import pipeline

WIDTH = 4


class Block(nn.Module):
    """A block with statistics, and a layer that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 8), nn.SiLU(inplace=True), nn.Linear(8, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(self.down(self.act(self.up(x))))
        return out


class Tower(nn.Module):
    """A traced model."""

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks, self.scale = nn.ModuleList(blocks), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x


def blocks(number: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(number))).double()


def batch() -> Any:
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def check(pipe: Any, whole: nn.Module, parts: int = 2) -> None:
    """Compare steps with one process on the same microbatches, as batch norm requires."""
    x, y = batch()
    for _ in range(3):
        got = pipe.step(x, y)
        losses = [F.mse_loss(whole(a), b) / parts for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True)]
        torch.stack(losses).sum().backward()
        torch.testing.assert_close(got, torch.stack(losses).sum().detach(), rtol=1e-12, atol=0)
    theirs, state = dict(whole.named_parameters()), whole.state_dict()
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-10, atol=1e-12)
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-10, atol=1e-12)
    assert set(pipe.gather_state_dict()) == set(state)


HOWS: dict[str, Any] = {
    "blocks": {"*0": "full", "*1": "selective"},
    "within": {"*.act": "full", "*.up": "selective", "*norm": "full", "*1.norm": "full"},
    "all": {"*": "full"},
    "function": lambda name, layer: "selective" if isinstance(layer, Block) and name.endswith(("0", "2")) else "none",
}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("is_traced", [False, True], ids=["sequence", "traced"])
@pytest.mark.parametrize("how", HOWS)
def test_single_layers(comm: Any, how: str, is_traced: bool, schedule: Any) -> None:
    """Regression: only whole stages could be recomputed."""
    model: Any = blocks(2 * comm.size)
    model = Tower(model).double() if is_traced else model
    whole = copy.deepcopy(model)
    pipe = pipeline(model, comm, schedule=schedule, microbatches=2, loss=F.mse_loss, checkpoint=HOWS[how])
    check(pipe, whole)
    assert all("forward" not in vars(module) for module in pipe.modules())
    pipe.close()


def test_only_named_layers_are_recomputed(comm: Any) -> None:
    """Hooks of such a layer run once, layers within it twice, and all others once. evaluate recomputes nothing."""
    model = blocks(comm.size)
    calls: dict[str, int] = {}
    for name, module in model.named_modules():
        if name:
            module.register_forward_pre_hook(lambda *_, name=name: calls.update({name: calls.get(name, 0) + 1}))
    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss, checkpoint={"*.norm": "full", "0": "full"})
    x, y = batch()
    pipe.evaluate(x, y)
    assert set(calls.values()) == {2}
    calls.clear()
    pipe.step(x, y)
    own = f"{comm.rank}"
    expected = {own: 2} | {f"{own}.{name}": 4 if comm.rank == 0 else 2 for name in ("up", "act", "down", "norm")}
    assert calls == expected
    pipe.close()


class Changes(nn.Module):
    """Changes its input in place, appends to a list, and takes a tensor by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: list[Tensor], *, shift: Tensor) -> Tensor:
        x.mul_(0.5).add_(shift)
        seen.append(torch.tanh(self.linear(x)))
        out: Tensor = x.sin()
        return out


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.drop = nn.Linear(WIDTH, WIDTH), Changes(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        h = self.first(x)
        inner = self.inner(h, seen, shift=x)
        assert len(seen) == 1
        out: Tensor = self.drop(inner) + h + seen[0]
        return out


def test_layers_that_change_their_inputs(comm: Any) -> None:
    """Regression: recomputation started from the inputs that the first forward had changed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Around() for _ in range(comm.size))).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    whole = copy.deepcopy(model)
    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss, checkpoint={"*.inner": "full", "*.drop": "full"})
    check(pipe, whole)
    pipe.close()


class Shift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class ChangedLater(nn.Module):
    """Changes the input of a layer after it has computed; the layer keeps another value for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), nn.Sequential(Shift(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out: Tensor = self.inner(h)
        h.mul_(2)
        out += h
        return out


def test_inputs_changed_later_are_refused(comm: Any) -> None:
    """The layer would be recomputed from different numbers: torch raises an error."""
    model = nn.Sequential(*(ChangedLater() for _ in range(comm.size))).double()
    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss, checkpoint={"*.inner": "full"})
    x, y = batch()
    with pytest.raises((RuntimeError, PeerError)):
        for _ in range(2):
            pipe.step(x, y)
    pipe.close()


def test_random_numbers_are_reproduced(comm: Any) -> None:
    """Recomputation restores the generators: gradients match a pipeline that keeps all activations."""
    results = []
    how: Any
    for how in ("none", {"*.drop": "full"}, {"?": "full"}):
        torch.manual_seed(0)
        model = nn.Sequential(*(Around() for _ in range(comm.size))).double()
        pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss, checkpoint=how)
        x, y = batch()
        torch.manual_seed(comm.rank)
        losses = [float(pipe.step(x, y)) for _ in range(2)]
        results.append((losses, [parameter.grad for parameter in pipe.parameters()], torch.rand(1)))
        pipe.close()
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-12, atol=0)


def test_weights_of_their_own_versions(comm: Any) -> None:
    """Schedules that update weights while they run keep everything: recomputation would use later weights."""
    grads = []
    how: Any
    for how in ("none", {"*": "full"}):
        pipe = pipeline(
            blocks(comm.size), comm, schedule="pipedream", microbatches=4, loss=F.mse_loss, checkpoint=how,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.5),
        )  # fmt: skip
        x, y = batch()
        pipe.step(x, y)
        grads.append([parameter.detach().clone() for parameter in pipe.parameters()])
        pipe.close()
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"0.nrom": "full"}, r"no layer matches '0.nrom'; the layers are 0\.norm"),
        ({"*.norm": "all"}, r"of \*\.norm is 'all', expected one of none, selective, full"),
        ({"*.norm": "full", "0.*": "none"}, r"several modes for 0\.norm"),
        (lambda name, layer: None, "of 0 is None"),
        ("some", "is 'some', expected one of none, selective, full, or these by names of layers"),
    ],
)
def test_patterns_without_a_match_are_refused(comm: Any, how: Any, text: str) -> None:
    """So are patterns that match two layers, on all ranks and before communication."""
    with pytest.raises(UsageError, match=text):
        pipeline(blocks(comm.size), comm, microbatches=2, loss=F.mse_loss, checkpoint=how)


def test_cutting_within_a_recomputed_layer_is_refused(comm: Any) -> None:
    """A traced model cannot be cut within a layer that is recomputed as a whole: the error gives the reason."""
    model = Tower(blocks(comm.size))
    names = [f"blocks.{rank}.down" for rank in range(1, comm.size)] or ["blocks.0.down"]
    with pytest.raises(UsageError, match="modules named in checkpoint= are kept in one stage"):
        pipeline(
            model, comm, microbatches=2, loss=F.mse_loss, checkpoint={"blocks.?": "full"}, split=names,
            stages=len(names) + 1, schedule="1f1b" if comm.size > 1 else "interleaved",
        )  # fmt: skip
