"""Objects shared in Python by layers of stages on several ranks: harmless sharing passes, and writes are refused."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib_torch import pipeline

WIDTH = 4


class Writes(nn.Module):
    def __init__(self, box: dict[str, Any]) -> None:
        super().__init__()
        self.layer, self.box = nn.Linear(WIDTH, WIDTH), box

    def forward(self, x: Tensor) -> Tensor:
        self.box["skip"] = x
        out: Tensor = self.layer(x)
        return out


class Reads(Writes):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.box.get("skip", 0)
        return out


class Asks(nn.Module):
    """Reads a configuration, and counts in a list that others do not read."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.layer, self.config = nn.Linear(WIDTH, WIDTH), config

    def forward(self, x: Tensor) -> Tensor:
        self.config.seen.append(1)
        out: Tensor = self.layer(x) * self.config.scale
        return out


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("options", [{}, {"example": torch.ones(2, WIDTH)}, {"verify": torch.ones(2, WIDTH)}])
@pytest.mark.parametrize("kind", [list, nn.ModuleList, lambda layers: nn.Sequential(*layers)])
def test_writes_read_on_another_rank_are_refused(comm: Any, kind: Any, options: dict[str, Any]) -> None:
    """Regression: the loss silently changed, because the compared copies shared objects, and ranks do not."""
    torch.manual_seed(0)
    box: dict[str, Any] = {}
    between = [nn.Tanh() for _ in range(max(1, comm.size - 2))]
    model, end = kind([Writes(box), *between, Reads(box)]), 1 + len(between)
    x = torch.ones(4, WIDTH)
    text = rf"0\.box and {end}\.box, of layers on ranks 0, {comm.size - 1}, are one dict"
    with pytest.raises(UsageError, match=text):
        pipeline(model, comm, microbatches=2, loss=F.mse_loss, **options).step(x, x)


class Counts(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layer(x)
        return out


class ReadsBuffer(nn.Module):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.layer, self.hidden = nn.Linear(WIDTH, WIDTH), [counts]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.hidden[0].calls
        return out


@pytest.mark.ranks(min=2)
def test_a_buffer_that_is_read_by_a_hidden_reference(comm: Any) -> None:
    """Regression: the last stage's rank read a buffer that only the first one changes."""
    counts, x, end = Counts(), torch.ones(4, WIDTH), comm.size - 1
    model = nn.Sequential(counts, *(nn.Tanh() for _ in range(end - 1)), ReadsBuffer(counts))
    pipe = pipeline(model, comm, microbatches=1, loss=F.mse_loss)
    with pytest.raises(UsageError, match=rf"0 and {end}\.hidden, of layers on ranks 0, {end}, are one Counts"):
        pipe.step(x, x)
    pipe.close()


def test_harmless_sharing_passes(comm: Any) -> None:
    config = SimpleNamespace(scale=0.5, seen=[])
    torch.manual_seed(0)
    model = nn.Sequential(*(Asks(config) for _ in range(comm.size)))
    whole, x = copy.deepcopy(model), torch.ones(4, WIDTH)
    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss)
    torch.testing.assert_close(pipe.step(x, x), F.mse_loss(whole(x), x).detach())
    assert len(config.seen) == 2, "comparing leaves no trace"
    pipe.close()
