"""Kinds of calls of a divided model: properties that distinguish them, and others that change with each call."""

from __future__ import annotations

import copy
import operator
import warnings
from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row
from commlib.tensor_parallel.checks.plan_checks import check_first_call
from commlib_torch.tensor import parallelize, plan_check

PLAN: Any = {"up": Column(), "down": Row()}
X: Any = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1)).double()


class Model(nn.Module):
    """A model that depends on a function of its hidden values, and on other arguments."""

    def __init__(self, goes: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.goes = nn.Linear(8, 12), nn.Linear(12, 8), goes

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        return self.down(self.goes(self.up(x), *args, **options))


def build(comm: Any, goes: Callable[..., Tensor], **options: Any) -> tuple[Any, Any]:
    """Return a plain model and its divided copy."""
    torch.manual_seed(0)
    plain = Model(goes).double()
    return plain, parallelize(copy.deepcopy(plain), comm, PLAN, **options)


def softmax(h: Tensor) -> Tensor:
    return h.softmax(-1)


def applied(h: Tensor, function: Any) -> Any:
    return function(h)


def gated(h: Tensor, function: Any) -> Any:
    return h * function(h)


def compose(*functions: Any) -> Any:
    def run(h: Tensor) -> Tensor:
        for one in functions:
            h = one(h)
        return h

    return run


def decorated(function: Any, times: int = 4) -> Any:
    @wraps(function)
    def wrapper(h: Tensor) -> Any:
        return function(h)

    return wrapper if times == 1 else decorated(wrapper, times - 1)


class Activation:
    function: Any = staticmethod(F.gelu)

    @classmethod
    def run(cls, h: Tensor) -> Any:
        return cls.function(h)


class Softmax(Activation):
    function = staticmethod(softmax)


class Callable_:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, h: Tensor) -> Any:
        return getattr(F, self.name)(h, -1) if self.name == "softmax" else getattr(F, self.name)(h)


class Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Whole(Power):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h - h.mean(-1, keepdim=True)


def by(condition: Callable[[Any], bool]) -> Callable[..., Tensor]:
    return lambda h, given: h.softmax(-1) if condition(given) else F.gelu(h)


Case = tuple[Callable[..., Any], Any, Any]
TWO: dict[str, Case] = {
    "composed": (applied, compose(F.gelu, torch.tanh), compose(F.gelu, softmax)),
    "decorated": (applied, decorated(F.gelu), decorated(softmax)),
    "class of a method": (applied, Activation.run, Softmax.run),
    "autograd function": (applied, Power.apply, Whole.apply),
    "method of tensors": (gated, torch.Tensor.sigmoid, torch.Tensor.mean),
    "operator": (gated, torch.ops.aten.sigmoid, torch.ops.aten.mean),
    "operator with a signature": (gated, torch.ops.aten.sigmoid.default, torch.ops.aten.mean.default),
    "methodcaller": (applied, operator.methodcaller("tanh"), operator.methodcaller("softmax", -1)),
    "callable object": (applied, Callable_("gelu"), Callable_("softmax")),
    "module": (applied, nn.Softmax(1), nn.Softmax(-1)),
    "table": (by(lambda given: "mask" in given), UserDict(x=X), UserDict(x=X, mask=X)),
    "contiguous": (by(lambda given: not given.is_contiguous()), X, X.transpose(0, 1)),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", TWO)
def test_kinds_of_calls_are_distinguished(comm: Any, name: str) -> None:
    """Regression: the second call silently gave a wrong result."""
    goes, right, wrong = TWO[name]
    plain, model = build(comm, goes)
    for _ in range(2):
        torch.testing.assert_close(model(X, right), plain(X, right), rtol=0, atol=1e-12)
    with pytest.raises(UsageError):
        model(X, wrong)
    torch.testing.assert_close(model(X, right), plain(X, right), rtol=0, atol=1e-12)


def _along(with_gradients: int, without: int) -> int:
    return with_gradients if torch.is_grad_enabled() else without


DIMENSIONS: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda h: h.softmax(_along(1, -1)),
    "sum": lambda h: h * h.sum(_along(1, 2), keepdim=True),
    "cumsum": lambda h: h.cumsum(_along(1, 2)),
    "roll": lambda h: h.roll(1, _along(1, 2)),
    "flip": lambda h: h.flip(_along(1, 2)),
    "normalize": lambda h: F.normalize(h, dim=_along(1, 2)),
    "einsum": lambda h: (
        h * torch.einsum("bsc->bc" if torch.is_grad_enabled() else "bsc->bs", h).unsqueeze(_along(1, 2))
    ),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("looked_at", ["a call", "example"])
@pytest.mark.parametrize("name", DIMENSIONS)
def test_another_dimension_is_another_kind(comm: Any, name: str, looked_at: str) -> None:
    """Regression: the same operations ran in a call without gradients, along the divided dimension."""
    plain, model = build(comm, DIMENSIONS[name], **({"example": X} if looked_at == "example" else {}))
    torch.testing.assert_close(model(X), plain(X), rtol=0, atol=1e-12)
    for context in (torch.no_grad, torch.inference_mode):
        with context(), pytest.raises(UsageError):
            model(X)


@pytest.mark.ranks(min=2, max=2)
def test_an_equal_path_is_not_checked_again(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []

    def checked(*args: Any, **options: Any) -> Any:
        looks.append(args)
        return check_first_call(*args, **options)

    monkeypatch.setattr(plan_check, "check_first_call", checked)

    def goes(h: Any) -> Any:
        h = F.gelu(h).unflatten(-1, (-1, 3)).transpose(1, 2).flatten(0, 1)
        return h[:, :-1].unflatten(0, (-1, h.shape[0] // 4)).transpose(1, 2).flatten(2)

    _, model = build(comm, goes)
    model(X)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(X)
    assert len(looks) == 1


@pytest.mark.ranks(min=2)
def test_autocast_dtypes_are_distinguished(comm: Any) -> None:
    _, model = build(comm, lambda h: h.softmax(-1) if h.dtype == torch.float16 else F.gelu(h))
    model.float()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype), pytest.raises(UsageError) if dtype == torch.float16 else nullcontext():
            model(X.float())


@pytest.mark.ranks(min=2)
def test_anomaly_detection_is_distinguished(comm: Any) -> None:
    _, model = build(comm, lambda h: h.softmax(-1) if torch.is_anomaly_enabled() else F.gelu(h))
    model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(True), pytest.raises(UsageError, match="softmax"):
            model(X)


class Late(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return F.gelu(h) if self.training else h.softmax(-1)


@pytest.mark.ranks(min=2)
def test_the_mode_of_a_module_added_later(comm: Any) -> None:
    _, model = build(comm, nn.Tanh())
    model(X)
    model.goes = Late()
    model(X)
    model.goes.eval()
    with pytest.raises(UsageError, match="softmax"):
        model(X)


class Words(Model):
    def __init__(self) -> None:
        super().__init__(lambda h: h.softmax(-1) if h.dtype == torch.float32 else F.gelu(h))
        self.words = nn.Embedding(9, 8)

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        return super().forward(self.words(x))


@pytest.mark.ranks(min=2)
def test_weight_dtypes_are_distinguished(comm: Any) -> None:
    torch.manual_seed(0)
    model: Any = parallelize(Words().double(), comm, PLAN)
    words = torch.arange(6).reshape(2, 3)
    model(words)
    model.float()
    with pytest.raises(UsageError, match="softmax"):
        model(words)


@dataclass(eq=False)
class Node:
    x: Any
    parent: Any = None
    children: list[Any] = field(default_factory=list)


def _tree() -> Node:
    root = Node(X)
    root.children.append(Node(X, root))
    return root


def _deep() -> Any:
    value: Any = X
    for _ in range(300):
        value = [value]
    return value


def _list() -> Any:
    value: Any = [X]
    value.append({"itself": value})
    return value


@pytest.mark.parametrize("given", [_tree, _deep, _list])
def test_a_cyclic_or_deep_argument(comm: Any, given: Any) -> None:
    """Regression: it raised RecursionError."""
    plain, model = build(comm, lambda h, given: F.gelu(h))
    torch.testing.assert_close(model(X, given()), plain(X, given()), rtol=0, atol=1e-12)


class Cache:
    """Stores its arguments, as caches of keys and values do."""

    def __init__(self, texts: Any) -> None:
        self.layers: list[dict[str, Any]] = []
        self.length, self.texts = 0, texts

    def update(self, h: Tensor) -> Tensor:
        self.layers.append({"keys": h.detach().new_ones(2), "length": len(self.layers)})
        self.length += 1
        return h.tanh()


def test_objects_that_change_with_each_call_are_one_kind(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check in each step of a loop, and then a warning, would help nobody."""
    looks: list[Any] = []
    monkeypatch.setattr(plan_check, "check_first_call", lambda axis, model, call, **options: looks.append(call))
    _, model = build(comm, lambda h, *given, **options: options["cache"].update(h) if options["cache"] else h)
    losses: list[float] = []
    cache = Cache(["a"])
    for step in range(12):
        batch = UserDict(ids=torch.ones(2 + step, 3), texts=["a", "b"] * step)
        losses.append(0.5 * step)
        model(X, batch, lambda h, step=step: h + step + len(losses), cache=Cache([f"{step}"]), step=step)
        model(X[:2], batch, lambda h, step=step: h + step + len(losses), cache=cache, step=float(step))
    assert len(looks) <= 5  # the second cache is empty, then has one layer, and then several
