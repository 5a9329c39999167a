"""Layers without weights that use other positions: `Sequence` accepted them, and they silently saw only a part."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commlib
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Row, Sequence
from commlib_torch.tensor import parallelize, reduce

PLAN: Plan = {"own": Sequence(1), "up": Column(sequence=1), "down": Row(sequence=1)}
WRONG: dict[str, Any] = {
    "centering": lambda x: x - x.mean(1, keepdim=True),
    "a norm of all": lambda x: x / x.square().mean().sqrt(),
    "a running sum": lambda x: x.cumsum(1),
    "its number": lambda x: x + torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(-1),
    "a softmax": nn.Softmax(1),
    "a mean": lambda x: x.mean(1, keepdim=True).expand_as(x),
}
RIGHT: dict[str, Any] = {
    "features": lambda x: x - x.mean(-1, keepdim=True),
    "elements": lambda x: x * 2,
    "dropout": nn.Sequential(nn.GELU(), nn.Dropout(0.5)),
    "rows": lambda x: x.unflatten(-1, (2, -1)).softmax(-1).flatten(-2),
}


class Applied(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def build(function: Any) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential()
    model.add_module("own", copy.deepcopy(function) if isinstance(function, nn.Module) else Applied(function))
    model.add_module("up", nn.Linear(8, 12))
    model.add_module("down", nn.Linear(12, 8))
    return model.double()


def rows(tokens: int = 6) -> Tensor:
    return torch.randn(2, tokens, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def tp(comm: Any) -> Any:
    return commlib.Mesh(tp=comm.size)["tp"]


@pytest.mark.ranks(min=2, max=3)
@pytest.mark.parametrize("name", WRONG)
def test_layers_that_use_other_positions_are_refused(tp: Any, name: str) -> None:
    with pytest.raises(UsageError, match=r"own .*would see only a part of"):
        parallelize(build(WRONG[name]), tp, PLAN, example=rows())
    model = parallelize(build(WRONG[name]), tp, PLAN)
    with pytest.raises(UsageError, match=r"own .*would see only a part of"):
        model(rows().chunk(tp.size, 1)[tp.rank])


@pytest.mark.ranks(max=3)
@pytest.mark.parametrize("name", RIGHT)
def test_layers_on_single_positions_pass(tp: Any, name: str) -> None:
    model, plain = parallelize(build(RIGHT[name]), tp, PLAN), build(RIGHT[name])
    for one in (model, plain) if name != "dropout" else ():
        one.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = model(rows().chunk(tp.size, 1)[tp.rank])
    if name != "dropout":
        torch.testing.assert_close(own, plain(rows()).chunk(tp.size, 1)[tp.rank], rtol=0, atol=1e-10)


@pytest.mark.ranks(min=2, max=3)
def test_layers_with_their_own_moves_pass(tp: Any) -> None:
    """The mean of all matches the whole; parts of different lengths are not tried, which other ranks would wait for."""
    tokens = 2 * tp.size - 1
    own = lambda x: x - reduce(x.sum(1, keepdim=True), tp) / tokens  # noqa: E731
    model = parallelize(build(own), tp, PLAN)
    part = rows(tokens).chunk(tp.size, 1)[tp.rank]
    whole = build(lambda x: x - x.mean(1, keepdim=True))(rows(tokens))
    torch.testing.assert_close(model(part), whole.chunk(tp.size, 1)[tp.rank], rtol=0, atol=1e-10)


@pytest.mark.ranks(min=2, max=2)
@pytest.mark.parametrize("own", [nn.LayerNorm(8), nn.Dropout(0.5)])
def test_an_error_names_a_container_added_later(tp: Any, own: nn.Module) -> None:
    """Regression: it raised AttributeError."""
    model = parallelize(build(own), tp, PLAN)
    nn.Sequential(model.get_submodule("own"))
    x = torch.nn.functional.pad(rows().chunk(tp.size, 1)[tp.rank], (0, 1))
    with pytest.raises(Exception, match="the Sequential around own"):
        model(x)


class Keeping(nn.Module):
    """A layer that stores a value computed from its part."""

    def forward(self, x: Tensor) -> Tensor:
        self.aux = x.square().mean()
        return x * 1


@pytest.mark.ranks(min=2, max=3)
@pytest.mark.parametrize("own", [Keeping(), nn.Sequential(nn.GELU(), Keeping())])
def test_values_stored_by_such_a_layer_are_refused(tp: Any, own: nn.Module) -> None:
    """Regression: each rank silently stored the value of its part, with a gradient."""
    model = parallelize(build(own), tp, PLAN)
    with pytest.raises(UsageError, match="a value kept after"):
        model(rows().chunk(tp.size, 1)[tp.rank])
    layers = {"into": nn.Linear(8, 8), "out": nn.Linear(8, 8), "own": copy.deepcopy(own), "end": nn.Linear(8, 8)}
    plan: Plan = {"into": Column(), "out": Row(sequence=1), "own": Sequence(1), "end": Column(sequence=1, gather=True)}
    model = parallelize(nn.Sequential(OrderedDict(layers)).double(), tp, plan)
    with pytest.raises(UsageError, match="a value kept after"):
        model(rows())


class Weighted(nn.Module):
    """A layer that takes a weight or mask of each position together with features."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.own, self.up, self.down = Beside(function), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.down(self.up(self.own(x, mask)))


class Beside(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.function(x, mask.double().view(2, -1, 1))


def weighted(x: Tensor, weights: Tensor) -> Tensor:
    return x * weights


def shared_out(x: Tensor, weights: Tensor) -> Tensor:
    return x * weights / weights.sum(1, keepdim=True)


@pytest.mark.ranks(min=2, max=3)
@pytest.mark.parametrize("mask", ["weights", "flags"])
def test_several_inputs(tp: Any, mask: str) -> None:
    """Regression: nothing was tried unless all inputs were floats of one shape."""
    x = rows(2 * tp.size).chunk(tp.size, 1)[tp.rank]
    beside = x[..., :1].abs() if mask == "weights" else x[..., 0] > 0
    parallelize(Weighted(weighted).double(), tp, PLAN)(x, beside)
    model = parallelize(Weighted(shared_out).double(), tp, PLAN)
    with pytest.raises(UsageError, match=r"own .*would see only a part of"):
        model(x, beside)


@pytest.mark.ranks(min=2, max=3)
def test_a_layer_with_one_length_is_warned_of(tp: Any) -> None:
    model = parallelize(build(lambda x: x + torch.arange(16.0).double().view(2, 8)), tp, PLAN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(rows(2 * tp.size).chunk(tp.size, 1)[tp.rank])
    messages = [str(one.message) for one in caught if "accepts no other length" in str(one.message)]
    assert len(messages) == (tp.rank == 0)


@pytest.mark.ranks(min=2, max=3)
def test_a_layer_that_always_draws_is_warned_of(tp: Any) -> None:
    model = parallelize(build(lambda x: x + torch.rand_like(x) - x.mean(1, keepdim=True)), tp, PLAN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(rows().chunk(tp.size, 1)[tp.rank])
    messages = [str(one.message) for one in caught if "draws random numbers whenever it is called" in str(one.message)]
    assert len(messages) == (tp.rank == 0)


@pytest.mark.ranks(min=2, max=3)
def test_dropout_is_disabled_in_the_trial(tp: Any) -> None:
    with pytest.raises(UsageError, match=r"own .*would see only a part of"):
        parallelize(build(lambda x: F.dropout(x, 0.1, True) - x.mean(1, keepdim=True)), tp, PLAN, example=rows())


def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x) - x.mean(1, keepdim=True)


def by_rows(x: Tensor) -> Tensor:
    return x * F.dropout(torch.ones(len(x), 1, 1, dtype=x.dtype), 0.5)


class InTraining(Applied):
    def forward(self, x: Tensor) -> Any:
        return self.function(x) if self.training else x


@pytest.mark.ranks(min=2, max=3)
@pytest.mark.parametrize("function", [noisy, by_rows])
def test_a_layer_that_draws_in_training_is_warned_of(tp: Any, function: Any) -> None:
    """It is valid in evaluation, which proves nothing about training."""
    model = parallelize(build(InTraining(function)), tp, PLAN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(rows().chunk(tp.size, 1)[tp.rank])
    messages = [str(one.message) for one in caught if "draws random numbers whenever it is called" in str(one.message)]
    assert len(messages) == (tp.rank == 0)


def windows(x: Tensor) -> Tensor:
    return torch.cat([one - one.mean(1, keepdim=True) for one in x.split(2, 1)], 1)


@pytest.mark.ranks(min=2, max=3)
def test_windows(tp: Any) -> None:
    """Regression: they were correct for the first length, and silently wrong for another."""
    x = rows(4 * tp.size)
    model = parallelize(build(windows), tp, PLAN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = model(x.chunk(tp.size, 1)[tp.rank])
    messages = [str(one.message) for one in caught if "parts of other lengths" in str(one.message)]
    assert len(messages) == (tp.rank == 0)
    torch.testing.assert_close(got, build(windows)(x).chunk(tp.size, 1)[tp.rank], rtol=0, atol=1e-10)
    with pytest.raises(UsageError, match=r"own .*would see only a part of"):
        parallelize(build(windows), tp, PLAN)(rows(3 * tp.size).chunk(tp.size, 1)[tp.rank])


@pytest.mark.ranks(min=2, max=3)
@pytest.mark.parametrize("dropout", [nn.Dropout1d(0.5), nn.FeatureAlphaDropout(0.5)])
def test_dropout_of_whole_rows(tp: Any, dropout: nn.Module) -> None:
    """Regression: each rank dropped different rows of its features: a quarter was dropped as a whole, not half."""
    model = nn.Sequential(nn.Linear(8, 12), copy.deepcopy(dropout), nn.Linear(12, 8)).double()
    with pytest.raises(UsageError, match="would see only a part of"):
        parallelize(model, tp, {"0": Column(), "1": Sequence(-1), "2": Row()}, example=rows())


class Unpacking(nn.Module):
    """A norm that unpacks its number of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        assert width == 8, (batch, tokens)
        return x * self.weight


@pytest.mark.ranks(min=2, max=3)
def test_a_user_norm_of_three_dimensions(tp: Any) -> None:
    """Regression: it raised ValueError: too many values to unpack."""
    model = parallelize(build(Unpacking()), tp, PLAN)
    got = model(rows(2 * tp.size).chunk(tp.size, 1)[tp.rank])
    plain = build(Unpacking())(rows(2 * tp.size))
    torch.testing.assert_close(got, plain.chunk(tp.size, 1)[tp.rank], rtol=0, atol=1e-10)
