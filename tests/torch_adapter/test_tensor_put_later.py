"""Modules added later around or to a divided layer, as LoRA does, are correct or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row
from commlib.tensor_parallel.checks.plan_checks import check_first_call
from commlib_torch.tensor import gather_state_dict, parallelize, plan_check

PLAN: Any = {"up": Column(), "down": Row()}


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up: Any = nn.Linear(6, 8)
        self.down: Any = nn.Linear(8, 6)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class LoRA(nn.Module):
    """LoRA made of layers."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        torch.manual_seed(1)
        self.a = nn.Linear(base.in_features, 2, bias=False).double()
        self.b = nn.Linear(2, base.out_features, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))  # type: ignore[no-any-return]


class OfWeights(nn.Module):
    """LoRA made of parameters of the base's length, which is that of the part."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        outputs, inputs = base.weight.shape
        self.base, self.a = base, nn.Parameter(random(2, inputs))
        self.b = nn.Parameter(random(outputs, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T  # type: ignore[no-any-return]


class Merged(OfWeights):
    """LoRA merged into the base's weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + self.b @ self.a, self.base.bias)


class Instead(nn.Linear):
    """A layer that replaces the base, with its weights."""

    def __init__(self, base: Any) -> None:
        super().__init__(base.in_features, base.out_features)
        self.weight, self.bias = base.weight, base.bias


def onto(base: Any) -> Any:
    """Add LoRA's weights to a layer, and patch its forward."""
    own = base.forward
    base.a, base.b = nn.Parameter(random(2, base.in_features)), nn.Parameter(random(base.out_features, 2))
    base.forward = lambda x: own(x) + x @ base.a.T @ base.b.T
    return base


WAYS: dict[str, Callable[[Any], Any]] = {
    "the LoRA around": LoRA,
    "the OfWeights around": OfWeights,
    "the Merged around": Merged,
    "the Instead with the weight of a sharded layer": Instead,
    "a of": onto,
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", ["up", "down"])
@pytest.mark.parametrize("text", WAYS)
def test_later_additions_are_refused_by_name(comm: Any, text: str, name: str) -> None:
    """Regression: after the first call sizes did not match, or weights silently differed among ranks."""
    model = parallelize(MLP(), comm, PLAN)
    model(random(3, 6)).sum().backward()
    setattr(model, name, WAYS[text](getattr(model, name)))
    with pytest.raises(UsageError, match=f"^{text}.* was added after the model was sharded: .* Add it before"):
        model(random(3, 6))


@pytest.mark.parametrize("first", [True, False], ids=["called", "not called"])
def test_later_additions_can_be_divided(comm: Any, first: bool) -> None:
    """One more call divides them like earlier ones."""
    plain, model = MLP(), parallelize(MLP(), comm, PLAN)
    x = random(3, 6)
    if first:
        model(x)
    for one in (plain, model):
        one.up, one.down = LoRA(one.up), LoRA(one.down)
    parallelize(model, comm, {"up.b": Column(), "down.a": Row()})
    for one in (plain, model):
        optimizer = torch.optim.AdamW([w for n, w in one.named_parameters() if "base" not in n], 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(gather_state_dict(model), dict(plain.state_dict()), rtol=1e-10, atol=1e-10)


class Between(MLP):
    """An MLP with a module between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sequential(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("where", ["act", "act.0"])
def test_another_module_between(comm: Any, where: str) -> None:
    """Regression: it silently passed."""
    plain, model, x = Between(), parallelize(Between(), comm, PLAN), random(3, 6)
    model(x)
    for one in (plain, model):
        one.set_submodule(where, nn.ReLU())
    torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)
    model.set_submodule(where, nn.Softmax(-1))
    with pytest.raises(UsageError, match=r"the Softmax that is .* was added after the model was sharded"):
        model(x)


class Scaled(nn.Module):
    """A valid wrapper of a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base(x)  # type: ignore[no-any-return]


class Runs(nn.Module):
    """A model that puts its layers into a container in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.calls = MLP(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return nn.Sequential(self.mlp.up, nn.Tanh(), self.mlp.down)(x)  # type: ignore[no-any-return]


def test_valid_changes_are_checked_once(comm: Any, monkeypatch: Any) -> None:
    """Containers, lists of an optimizer, and containers built by the model are included."""
    looks = []

    def counted(*args: Any, **options: Any) -> None:
        looks.append(args)
        check_first_call(*args, **options)

    monkeypatch.setattr(plan_check, "check_first_call", counted)
    plain, model, x = MLP(), parallelize(MLP(), comm, PLAN), random(3, 6)
    model(x)
    for one in (plain, model):
        one.up = Scaled(one.up)
    kept = nn.ParameterList(model.parameters()), nn.ModuleList([model.down])
    for _ in range(3):
        torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)
    assert len(looks) == 2, kept
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    model(x)
    assert len(looks) == 2
    runs = parallelize(Runs(), comm, {"mlp.up": Column(), "mlp.down": Row()})
    for _ in range(3):
        runs(x)
    assert len(looks) == 3
