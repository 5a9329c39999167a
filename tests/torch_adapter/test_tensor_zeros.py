"""Zero weights hide errors: a plan was accepted, and became wrong once the weight changed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row
from commlib_torch.tensor import gather_state_dict, parallelize

PLAN: Any = {"up": Column(), "down": Row()}
X: Any = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)).double()
LOOKED_AT = ["a call", "example", "verify"]


class Gated(nn.Module):
    """Adds a value to the features or to the result by a gate that is zero at first."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], gate: Tensor) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8)
        self.gate, self.after = nn.Parameter(gate), nn.Parameter(torch.zeros(8))
        self.between = between
        nn.init.zeros_(self.norm.weight)
        nn.init.zeros_(self.down.bias)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(x) + self.after * self.down(self.between(self, self.up(x)))
        return out


def spectrum(model: Any, h: Tensor) -> Any:
    return h + model.gate * torch.fft.fft(h).real


def tried(comm: Any, plain: Any, looked_at: str) -> Any:
    """Return a divided model that was checked."""
    model = copy.deepcopy(plain)
    if looked_at != "a call":
        return parallelize(model, comm, PLAN, **{looked_at: X})
    model = parallelize(model, comm, PLAN)
    model(X)
    return model


@pytest.mark.parametrize("looked_at", LOOKED_AT)
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("shape", [(), (5, 1)])
@pytest.mark.ranks(min=2)
def test_errors_hidden_by_zeros_are_refused(comm: Any, shape: tuple[int, ...], learns: bool, looked_at: str) -> None:
    plain = Gated(spectrum, torch.zeros(shape)).requires_grad_(learns)
    with pytest.raises(UsageError, match="differs"):
        tried(comm, plain, looked_at)


@pytest.mark.parametrize("looked_at", LOOKED_AT)
def test_valid_models_may_have_zeros(comm: Any, looked_at: str) -> None:
    """Each weight keeps its value, and an earlier graph stays valid."""
    torch.manual_seed(0)
    plain = Gated(lambda model, h: h.relu(), torch.zeros(()))
    nn.init.zeros_(plain.up.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tried(comm, plain, looked_at)
    for name, value in gather_state_dict(model).items():
        assert torch.equal(value, plain.state_dict()[name]), name
    losses: list[list[float]] = [[], []]
    for own, one in zip(losses, (plain, model), strict=True):
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        for _ in range(4):
            loss = one(X).square().mean()  # a call of another kind before its backward
            with torch.no_grad():
                one.eval()(X)
            one.train()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own.append(loss.item())
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)


class Turned(nn.Module):
    """Fails or returns NaN if its weight is not zero."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.up, self.down, self.turn = nn.Linear(8, 12), nn.Linear(12, 8), nn.Parameter(torch.zeros(()))
        self.fails = fails
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and float(self.turn) != 0:
            raise ValueError("turned")
        out: Tensor = self.down(self.up(x).softmax(1)) + (-self.turn).sqrt()
        return out


@pytest.mark.parametrize("looked_at", LOOKED_AT)
@pytest.mark.parametrize("fails", [True, False])
def test_zeros_stay_if_other_values_fail(comm: Any, fails: bool, looked_at: str) -> None:
    torch.manual_seed(0)
    plain = Turned(fails)
    model = tried(comm, plain, looked_at)
    torch.testing.assert_close(model(X), plain(X), rtol=0, atol=1e-12)
