"""Side effects of checks: there are none. Caches once grew in the first call, and arguments were changed."""

from __future__ import annotations

import copy
import functools
import queue
import random
import warnings
from collections import UserDict, UserList
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row
from commlib_torch.tensor import parallelize, verify

PLAN: Any = {"up": Column(), "down": Row()}


class Cache:
    """A cache as in language models: lists of tensors, and a tensor written in place."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.seen, self.last = 0, torch.zeros(8).double()


class Hostile(nn.Module):
    """A model that stores values in every way, and writes to its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.calls, self.log, self.cache = 0, [], Cache()  # type: ignore[var-annotated]
        self.draws = np.random.default_rng(3)
        self.hooked = 0
        self.double()

    def forward(self, x: Tensor, cache: Cache | None = None, names: Any = None) -> Any:
        self.calls += 1
        self.log.append(self.calls)
        self.draws.random()
        np.random.rand()
        random.random()
        x.add_(1)
        x = self.norm(x)
        for one in (self.cache, cache):
            if one is not None:
                one.keys.append(x)
                one.seen += len(one.keys)
                one.last += x[0].detach()
        if names is not None:
            names["calls"] = self.calls
        out = self.down(self.up(x).relu())
        return self.drop(out)


def hooked(model: Any) -> list[str]:
    """Put hooks of each kind on a model; return the list that they append to."""
    reports: list[str] = []

    def count(*_: Any) -> None:
        model.hooked += 1

    model.register_forward_pre_hook(lambda *_: reports.append("before"))
    model.up.register_forward_hook(lambda *_: reports.append("after"))
    model.down.register_full_backward_pre_hook(lambda *_: reports.append("backward before"))
    model.down.register_full_backward_hook(lambda *_: reports.append("backward"))
    model.down.weight.register_hook(lambda *_: reports.append("gradient"))
    model.register_forward_hook(count)
    return reports


def kept(model: Any, text: Any, x: Tensor, cache: Cache, names: Any) -> dict[str, Any]:
    """Return all state that may have changed."""
    return {
        "calls": (model.calls, list(model.log), model.hooked, list(text), dict(names)),
        "caches": [(one.seen, len(one.keys), one.last.sum().item()) for one in (model.cache, cache)],
        "x": x.sum().item(),
        "statistics": (model.norm.running_mean.sum().item(), int(model.norm.num_batches_tracked)),
        "random": (random.random(), np.random.rand(), torch.rand(()).item(), model.draws.random()),
        "mode": [module.training for module in model.modules()],
        "gradients": [None if one.grad is None else tuple(one.grad.shape) for one in model.parameters()],
    }


def seed() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


def run(comm: Any, look: str, divide: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = Hostile()
    plain = copy.deepcopy(model)
    text, x, cache, names = hooked(model), torch.ones(4, 8).double(), Cache(), dict[str, Any]()
    seed()
    if divide:
        batch = (x, cache, names)
        options = {look: batch} if look in ("verify", "example") else {}
        plan = "auto" if look == "auto" else PLAN
        if look == "auto":
            options = {"example": batch, "report": lambda *_: None}  # type: ignore[dict-item]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallelize(model, comm, plan, **options)  # type: ignore[arg-type]
            if look == "function":
                verify(model, plain, comm, batch)
            if look == "first call" or look == "function":
                model(x, cache, names)
    elif look == "first call" or look == "function":
        model(x, cache, names)
    return kept(model, text, x, cache, names)


@pytest.mark.parametrize("look", ["example", "verify", "auto", "first call", "function"])
def test_a_check_has_no_side_effects(comm: Any, look: str) -> None:
    """The state matches a run without a check, or one call."""
    if look == "auto" and comm.size > 1:
        pytest.skip("its plan is for other models")
    expected, got = run(comm, look, divide=False), run(comm, look, divide=True)
    for what, value in expected.items():
        assert got[what] == pytest.approx(value) if what in ("x", "statistics") else got[what] == value, what


class Stats:
    """A class that holds counters and has no instances."""

    calls = 0
    log: ClassVar[list[int]] = []
    table, waiting = UserDict[str, int](n=0), queue.Queue[int]()
    lengths: ClassVar[dict[int, int]] = {}


@functools.cache
def once(length: int) -> None:
    Stats.lengths[length] = Stats.calls


class Naming(nn.Module):
    """A model that changes state through names only, and draws random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.draws, self.mode, self.drawn = torch.quasirandom.SobolEngine(1), "fast", 0.0
        self.double()

    def forward(self, x: Tensor, *more: Any) -> Any:
        getattr(self, f"run_{self.mode}")()
        self.drawn = self.draws.draw(1).item()
        once(len(x))
        assert Stats.lengths[len(x)] >= 1
        for each in more:
            while each:
                x = x + each.pop()
        return self.down(self.up(x).relu())

    def run_fast(self) -> None:
        Stats.calls += 1
        Stats.log.append(1)
        Stats.table["n"] += 1
        Stats.waiting.put(1)


def named(model: Naming) -> Any:
    counts = Stats.calls, len(Stats.log), Stats.table["n"], Stats.waiting.qsize(), dict(Stats.lengths)
    return *counts, model.drawn


@pytest.mark.parametrize("look", ["example", "first call"])
def test_a_check_restores_state_reached_by_name(comm: Any, look: str) -> None:
    """Regression: one call was counted four times, and one-time work was skipped in the call itself."""
    x, got = torch.ones(4, 8).double(), []
    for divided in (False, True):
        Stats.calls, Stats.table["n"] = 0, 0
        for one in (Stats.log, Stats.lengths, Stats.waiting.queue):
            one.clear()
        once.cache_clear()
        model = Naming()
        if divided:
            parallelize(model, comm, PLAN, **({} if look == "first call" else {look: x}))  # type: ignore[arg-type]
        model(x)
        model(x)
        got.append(named(model))
    assert got[0] == got[1]
    assert got[0][:4] == (2, 2, 2, 2)


ARGUMENTS: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda x: [x, x],
    "UserList": lambda x: UserList([x, x]),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_a_consumed_argument(comm: Any, kind: str) -> None:
    """Regression: the actual call found it empty, and computed different numbers."""
    model, x = Naming(), torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).double()
    for weight in model.parameters():
        comm.broadcast(weight.detach(), root=0)
    plain = copy.deepcopy(model)
    parallelize(model, comm, PLAN)
    torch.testing.assert_close(model(x, ARGUMENTS[kind](x)), plain(x, ARGUMENTS[kind](x)), rtol=1e-10, atol=1e-10)


class Going(Naming):
    def forward(self, x: Tensor, *more: Any) -> Any:
        for each in more[0]:
            x = x + each
        return super().forward(x)


def test_an_iterator_is_refused(comm: Any) -> None:
    """It cannot be restored: the actual call would miss its values."""
    model, x = Going(), torch.ones(4, 8).double()
    parallelize(model, comm, PLAN)
    with pytest.raises(
        UsageError, match=r"called with a generator \(<genexpr>\), which a trial run .* has consumed\. Pass a list"
    ):
        model(x, (x for _ in range(2)))
