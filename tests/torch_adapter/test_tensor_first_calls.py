"""Checks of the first call of each kind of a divided model; without them some computed wrong results."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from commlib.errors import MismatchError, UsageError
from commlib.tensor_parallel import Column, Row
from commlib_torch.tensor import parallelize, plan_check, verify

PLAN: Any = {"up": Column(), "down": Row()}
X: Any = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1)).double()


class Model(nn.Module):
    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.up, self.down, self.wrong = nn.Linear(8, 12), nn.Linear(12, 8), wrong

    def forward(self, x: Tensor, gate: Tensor | None = None, how: Any = "") -> Any:
        h = self.up(x)
        if how == "features":
            return h
        modes = {"always": True, "training": self.training, "evaluation": not self.training}
        if modes.get(self.wrong, False) or how is True or how == "softmax":
            h = h.softmax(-1)
        out: Tensor = self.down(h.relu() if gate is None else h * gate)
        return out

    def encode(self, x: Tensor) -> Any:
        return self.forward(x)


def build(comm: Any, wrong: str = "", **options: Any) -> tuple[Any, Any]:
    """Return a plain model and its divided copy."""
    torch.manual_seed(0)
    plain = Model(wrong).double()
    return plain, parallelize(copy.deepcopy(plain), comm, PLAN, **options)


@contextmanager
def warned(comm: Any, *texts: str) -> Iterator[None]:
    """Check that rank 0 gives these warnings, and no other rank warns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(one.message) for one in caught if "plan" in str(one.message)]
    assert len(messages) == (len(texts) if comm.rank == 0 and comm.size > 1 else 0), messages
    for text, got in zip(texts, messages, strict=False):
        assert text in got


AROUND: dict[str, Callable[[Any], Any]] = {
    "forward": lambda model: model.forward(X),
    "another method": lambda model: model.encode(X),
    "a layer": lambda model: model.down(model.up(X).relu()),
}


@pytest.mark.parametrize("way", AROUND)
def test_a_call_that_bypasses_the_model_is_reported(comm: Any, way: str) -> None:
    """Regression: it was silently not checked."""
    plain, model = build(comm)
    with warned(comm, "of Model is not checked: up is called before the model itself"):
        torch.testing.assert_close(AROUND[way](model), AROUND[way](plain), rtol=0, atol=1e-12)
        AROUND[way](model)
    with warned(comm):  # the model itself is still checked
        model(X)
    _, model = build(comm, "always")
    with warned(comm, "not checked"):
        AROUND[way](model)
    if way != "a layer" and comm.size > 1:
        with pytest.raises(UsageError, match="softmax"):
            model(X)


@pytest.mark.parametrize("around", [*AROUND, "verify"])
def test_calls_that_bypass_a_checked_model_are_reported(comm: Any, around: str) -> None:
    """Regression: layers returned parts to any caller, and only calls before the model's first one were reported."""
    plain, model = build(comm, example=X) if around != "verify" else build(comm)
    if around == "verify":
        with warned(comm):
            verify(model, plain, comm, X)
            model(X)
    copied = copy.deepcopy(model)
    with warned(comm, "up is called outside of Model", "down is called outside of Model"):
        AROUND.get(around, AROUND["a layer"])(model)
        model(X)
        model.up(X)
    with warned(comm, "up is called outside of Model, whose plan was checked: it returns this rank's shard"):
        copied(X)
        copied.up(X)


def test_calls_within_the_model_are_not_reported(comm: Any) -> None:
    _, model = build(comm)
    with warned(comm):
        for part in (copy.deepcopy(model), model):
            for _ in range(2):
                checkpoint(part, X, use_reentrant=False).sum().backward()
        with pytest.raises(RuntimeError):
            model(X, torch.ones(7).double())
        model(X)
    layer = parallelize(nn.Sequential(nn.Linear(8, 8)).double(), comm, {"0": Column()}, divided_output=True)
    with warned(comm):
        layer(X)
        layer[0](X)


def without_gradients(model: Any) -> Any:
    with torch.no_grad():
        return model(X)


KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "evaluation": ("evaluation", lambda model: model.eval()(X)),
    "evaluation without gradients": ("evaluation", lambda model: without_gradients(model.eval())),
    "a flag": ("", lambda model: model(X, how=True)),
    "a string": ("", lambda model: model(X, None, "softmax")),
    "another result": ("", lambda model: model(X, how="features")),
}


@pytest.mark.parametrize("looked_at", ["a call", "example"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_of_another_kind_is_checked(comm: Any, kind: str, looked_at: str) -> None:
    """Regression: it took a different path from the checked one, and returned wrong numbers, or a part."""
    wrong, call = KINDS[kind]
    plain, model = build(comm, wrong, **({"example": X} if looked_at == "example" else {}))
    for _ in range(2):
        torch.testing.assert_close(model(X), plain(X), rtol=0, atol=1e-12)
    for _ in range(2):
        if comm.size > 1:
            with pytest.raises(UsageError, match="divided_output" if kind == "another result" else "softmax"):
                call(model)
    torch.testing.assert_close(model.train()(X), plain(X), rtol=0, atol=1e-12)


def test_calls_of_one_kind_are_checked_once(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, keyword order and disabled gradients do not make another kind."""
    looks: list[Any] = []
    monkeypatch.setattr(plan_check, "check_first_call", lambda axis, model, call, **options: looks.append(call))
    _, model = build(comm)
    gate = torch.rand(4, 5, 1).double()
    for at in range(3):
        model(X, gate=gate, how=at)
        model(X, how=at, gate=gate[:, :, :])
        with torch.no_grad():
            model(X, how=at, gate=gate)
    assert len(looks) == 1
    for _ in range(2):
        model(X, how=1.0, gate=gate)
        model(X, how=1.0)
        model.eval()(X, how=1.0)
        model.train()
    assert len(looks) == 4


class How(Enum):
    PLAIN = 1
    SOFTMAX = 2


class Elsewhere(Model):
    """A model that depends on properties of single calls: gradients, or the mode of a submodule."""

    def __init__(self, goes: Callable[[Any, Tensor], bool]) -> None:
        super().__init__()
        self.goes, self.drop = goes, nn.Dropout(0.0)

    def forward(self, x: Tensor, gate: Tensor | None = None, how: Any = "") -> Any:
        h = self.up(x)
        if self.goes(self, h) or how in (How.SOFTMAX, torch.float16):
            h = h.softmax(-1)
        return self.down(self.drop(h))


def evaluated_within(model: Any) -> Any:
    model.drop.eval()
    try:
        return model(X)
    finally:
        model.drop.train()


ELSEWHERE: dict[str, tuple[Callable[[Any, Tensor], bool], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "with gradients": (lambda model, h: torch.is_grad_enabled(), without_gradients, lambda model: model(X)),
    "a value with a gradient": (lambda model, h: h.requires_grad, without_gradients, lambda model: model(X)),
    "what has made a value": (lambda model, h: h.grad_fn is not None, without_gradients, lambda model: model(X)),
    "without gradients": (lambda model, h: not torch.is_grad_enabled(), lambda model: model(X), without_gradients),
    "a module within": (lambda model, h: not model.drop.training, lambda model: model(X), evaluated_within),
    "an enumeration": (
        lambda model, h: False, lambda model: model(X, how=How.PLAIN), lambda model: model(X, how=How.SOFTMAX)
    ),
    "a dtype": (
        lambda model, h: False, lambda model: model(X, how=torch.float32), lambda model: model(X, how=torch.float16)
    ),
}  # fmt: skip


@pytest.mark.parametrize("looked_at", ["a call", "example", "verify"])
@pytest.mark.parametrize("where", ELSEWHERE)
def test_paths_of_single_calls_are_checked(comm: Any, where: str, looked_at: str) -> None:
    """Regression: checks ran without gradients, and ignored paths that depend on gradients or modes of submodules."""
    goes, right, wrong = ELSEWHERE[where]
    torch.manual_seed(0)
    plain = Elsewhere(goes).double()
    if looked_at != "a call" and where in ("with gradients", "a value with a gradient", "what has made a value"):
        if comm.size > 1:
            with pytest.raises(UsageError, match="softmax"):
                parallelize(copy.deepcopy(plain), comm, PLAN, **{looked_at: X})
        return
    if where == "a module within" and looked_at == "verify":
        return  # which evaluates, and therefore checks it
    model = parallelize(copy.deepcopy(plain), comm, PLAN, **({} if looked_at == "a call" else {looked_at: X}))
    for _ in range(2):
        torch.testing.assert_close(right(model), right(plain), rtol=0, atol=1e-12)
    for _ in range(2):
        if comm.size > 1:
            with pytest.raises(UsageError, match="softmax"):
                wrong(model)
    torch.testing.assert_close(right(model), right(plain), rtol=0, atol=1e-12)


def test_too_many_kinds_of_calls_are_reported(comm: Any) -> None:
    """Each check runs the model again, so calls that always change are not checked for ever."""
    _, model = build(comm)
    with warned(comm, "Model is called in more than 8 ways"):
        for at in range(11):
            model(X, how=f"number {at}")


def test_a_model_evaluated_first_is_checked_when_it_trains(comm: Any) -> None:
    """Regression: only the first call was checked, which was of another kind."""
    _, model = build(comm, "training")
    for mode in (False, False, True, True, False):
        model.train(mode)
        if mode:  # refused again
            with pytest.raises(UsageError, match="softmax"):
                model(X)
        else:
            with torch.set_grad_enabled(mode):
                model(X)


class Given(NamedTuple):
    x: Any
    mask: Any = None


@dataclass
class Options:
    flag: bool = False


class Other(Model):
    """A model that depends on arguments other than flags and strings."""

    def forward(self, x: Any, given: Any = None, how: Any = "") -> Any:
        h = self.up(x.x if isinstance(x, Given) else x).relu()
        wrong = (
            (isinstance(x, Given) and x.mask is not None)
            or (isinstance(given, Options) and given.flag)
            or (isinstance(given, set) and "norm" in given)
            or (isinstance(given, Tensor) and given.dtype == torch.bool)
            or (isinstance(given, list) and len(given) > 1)
            or (isinstance(given, np.bool_) and bool(given))
            or (isinstance(given, nn.Module) and not given.training)
            or torch.is_autocast_enabled("cpu")
            or h.dim() == 2
            or torch.is_inference_mode_enabled()
        )
        h = h.softmax(-1) if wrong else h
        return self.down(given(h) if callable(given) else h)


def _softmax(h: Tensor) -> Tensor:
    return h.softmax(-1)


@torch.inference_mode()
def _inferred(model: Any) -> None:
    model(X)


@torch.no_grad()
def _without(model: Any) -> None:
    model(X)


def _with_autocast(model: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model(X)


def _scaled(function: Any) -> Any:
    return lambda h: function(h)


OTHERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "autocast": (lambda model: model(X), _with_autocast),
    "flag of numpy": (lambda model: model(X, np.bool_(False)), lambda model: model(X, np.bool_(True))),
    "number of tensors": (lambda model: model(X, [X]), lambda model: model(X, [X, X])),
    "partial": (
        lambda model: model(X, partial(torch.mul, other=2)),
        lambda model: model(X, partial(torch.softmax, dim=-1)),
    ),
    "closure": (lambda model: model(X, _scaled(torch.relu)), lambda model: model(X, _scaled(_softmax))),
    "mode of a module": (lambda model: model(X, nn.ReLU()), lambda model: model(X, nn.ReLU().eval())),
    "named tuple": (lambda model: model(Given(X)), lambda model: model(Given(X, 1))),
    "dataclass": (lambda model: model(X, Options()), lambda model: model(X, Options(True))),
    "set": (lambda model: model(X, {"a"}), lambda model: model(X, {"norm"})),
    "function": (lambda model: model(X, torch.relu), lambda model: model(X, _softmax)),
    "dtype": (lambda model: model(X, torch.ones(2)), lambda model: model(X, torch.ones(2, dtype=torch.bool))),
    "dimensions": (lambda model: model(X), lambda model: model(X[0])),
    "inference": (_without, _inferred),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", OTHERS)
def test_kinds_of_calls_are_distinguished(comm: Any, name: str) -> None:
    """Regression: the second call silently gave a wrong result."""
    right, wrong = OTHERS[name]
    torch.manual_seed(0)
    model = parallelize(Other().double(), comm, PLAN)
    right(model)
    right(model)
    with pytest.raises(UsageError, match="softmax"):
        wrong(model)


class Failing(Model):
    """A model that fails until a flag is cleared, or only during a check."""

    fails: bool | str = True

    def forward(self, x: Tensor, gate: Tensor | None = None, how: Any = "") -> Any:
        check: Any = self.up.plan_check
        if self.fails is True or (self.fails == "looks" and check.is_checking):
            raise ValueError("not yet")
        return super().forward(x, gate, how)


def test_a_failed_call_is_no_check(comm: Any) -> None:
    """Regression: the next call of its kind was not checked."""
    torch.manual_seed(0)
    model: Any = parallelize(Failing("always").double(), comm, PLAN)
    with pytest.raises(ValueError, match="not yet"):
        model(X)
    model.fails = False
    for _ in range(2):
        if comm.size > 1:
            with pytest.raises(UsageError, match="softmax"):
                model(X)


def test_repeated_failures_are_reported(comm: Any) -> None:
    """Regression: checks stopped, and a later successful call silently passed."""
    torch.manual_seed(0)
    model: Any = parallelize(Failing("always").double(), comm, PLAN)
    with warned(comm, "Failing has failed 3 times in the check of such a call"):
        for _ in range(4):
            with pytest.raises(ValueError, match="not yet"):
                model(X)


def test_a_check_that_fails_alone_is_reported(comm: Any) -> None:
    torch.manual_seed(0)
    model: Any = parallelize(Failing().double(), comm, PLAN)
    model.fails = "looks"
    with warned(comm, "Failing failed in the check of its call, but not in the call itself"):
        for _ in range(6):
            model(X)
    model.fails = False
    model(X)


class Scaled(nn.Module):
    """Divides by the number of features, only in training, which no rule detects."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        out: Tensor = self.down(h / h.shape[-1] if self.training else h)
        return out


def test_verify_does_not_replace_the_check_of_training(comm: Any) -> None:
    """Regression: verify compares in evaluation mode, and errors only in training passed."""
    torch.manual_seed(0)
    plain = Scaled()
    model: Any = parallelize(copy.deepcopy(plain), comm, PLAN, verify=X)
    torch.testing.assert_close(model.eval()(X), plain.eval()(X), rtol=0, atol=1e-12)
    if comm.size > 1:
        with pytest.raises(UsageError, match="div in the model"):
            model.train()(X)


class Outer(nn.Module):
    """A model that computes a gate outside of its divided part."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.inner = nn.Linear(8, 1), Model()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, self.gate(x))
        return out


def test_a_partial_gradient_of_an_outer_value_is_refused(comm: Any) -> None:
    """Regression: weights outside of the divided model received a part of their gradient."""
    model = Outer()
    parallelize(model.inner, comm, PLAN)
    with torch.no_grad():
        model(X)  # without gradients
    with pytest.raises(UsageError, match=r"mul.*input 1.*partial gradient of it.*outside the sharded model"):
        model(X)


def test_an_outer_value_may_enter_a_column(comm: Any) -> None:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(8, 8), Model(), nn.Linear(8, 8)).double()
    model = copy.deepcopy(plain)
    parallelize(model[1], comm, PLAN)
    gate = torch.rand(4, 5, 1).double()  # not trained
    for one in (plain, model):
        one[2](one[1](one[0](X), gate)).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad, rtol=1e-11, atol=1e-11)


@pytest.fixture
def compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_checked(comm: Any, backend: str) -> None:
    """Regression: a model compiled before its first call was never checked."""
    plain, model = build(comm)
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        for one in (plain, compiled):
            one(X).square().sum().backward()
    torch.testing.assert_close(model.down.bias.grad, plain.down.bias.grad, rtol=1e-11, atol=1e-11)
    if comm.size > 1:
        with pytest.raises(UsageError, match="softmax"):
            compiled(X, how=True)  # another kind of call
        with pytest.raises(UsageError, match="softmax"):
            torch.compile(build(comm, "always")[1], backend=backend)(X)


@pytest.mark.usefixtures("compiler")
def test_one_graph_is_refused(comm: Any) -> None:
    """Regression: the error gave advice for developers of the compiler."""
    if comm.size > 1:
        with pytest.raises(Exception, match="leave out fullgraph=True"):
            torch.compile(build(comm, example=X)[1], backend="eager", fullgraph=True)(X)


@pytest.mark.ranks(min=2)
def test_a_rank_that_fails_before_communication(comm: Any) -> None:
    """It reports its error; the others receive the error and do not wait for ever."""

    def fail(layer: nn.Module, given: Any, out: Tensor) -> None:
        if comm.rank == 0 and out.shape[-1] != 12:
            raise ArithmeticError("of a part")

    model = Model()
    model.up.register_forward_hook(fail)
    with pytest.raises((UsageError, MismatchError)) as error:
        parallelize(model.double(), comm, PLAN, example=X)
    assert comm.rank or ("the sharded model fails" in str(error.value) and "of a part" in str(error.value))
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))


@pytest.mark.ranks(min=2)
def test_ranks_on_different_paths(comm: Any) -> None:
    """Regression: both paths were new kinds, so that all ranks checked, without comparing the paths."""

    class Ways(Model):
        def forward(self, x: Tensor, gate: Tensor | None = None, how: Any = "") -> Any:
            return self.down(self.up(x).tanh() if how == "tanh" else self.up(x).relu())

    model = parallelize(Ways().double(), comm, PLAN)
    model(X)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(X, how="tanh" if comm.rank else None)
    messages = [str(one.message) for one in caught if "run other operations in this call" in str(one.message)]
    assert len(messages) == (comm.rank == 0), messages


@pytest.mark.ranks(min=2)
def test_a_flag_given_on_one_rank_only(comm: Any) -> None:
    """The others continue without a check to their next call; the error names the call that is checked."""
    _, model = build(comm)
    model(X)
    with pytest.raises(MismatchError) as caught:
        for _ in range(3):
            model(X, how="other") if comm.rank == 0 else model(X)
    assert comm.rank or "has started to check the plan of a sharded model" in str(caught.value)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("option", ["example", "verify"])
def test_weights_cached_by_autocast(comm: Any, option: str) -> None:
    """Regression: the cache held whole weights, whose parameters had become parts: they were refused."""
    torch.manual_seed(0)
    plain, x = Model(), X.float()
    model = copy.deepcopy(plain)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
        divided = parallelize(model, comm, PLAN, **{option: x})
        torch.testing.assert_close(divided(x), plain(x), rtol=5e-2, atol=5e-2)
