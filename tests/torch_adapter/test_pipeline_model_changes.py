"""Changes of a model after it was cut: new layers are refused, and changes of existing ones are adopted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import PeerError, UsageError
from commlib_torch import pipeline

WIDTH = 4


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Sequential(linear(), nn.Tanh()), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.middle(self.first(x))) + x
        return result


def replace(model: Any) -> None:
    model[2] = linear()


def replace_head(model: Any) -> None:
    model.head = linear()


@pytest.mark.parametrize(
    ("make", "change", "text"),
    [
        (lambda: nn.Sequential(linear(), nn.Tanh(), linear()), replace, "layer 2 of the model was a Linear"),
        (
            lambda: nn.Sequential(*[linear() for _ in range(3)]),
            lambda model: model.append(nn.Tanh()),
            "layer 3 .* was nothing",
        ),
        (lambda: nn.Sequential(linear(), linear(), nn.Tanh()), lambda model: model.pop(2), "is nothing now"),
        (Traced, replace_head, "layer head of the model was a Linear"),
    ],
    ids=["replaced", "added", "taken away", "traced"],
)
def test_changed_layers_are_adopted_or_refused(
    comm: Any, make: Callable[[], Any], change: Callable[[Any], Any], text: str
) -> None:
    """Regression: the pipeline silently continued with the old layers."""
    torch.manual_seed(0)
    model = make()
    pipe = pipeline(model, comm, loss=F.mse_loss, microbatches=2)
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    pipe.step(x, x)
    change(model)
    with pytest.raises((UsageError, PeerError), match=text):
        pipe.step(x, x)
    pipe.close()


class Short(nn.Module):
    """A model whose second layer computes in float32, whatever the surrounding autocast."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.first, self.second, self.asks = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), asks
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.asks:
            h = h * 2 if torch.is_autocast_enabled("cpu") else h
        else:
            with torch.autocast("cpu", enabled=False):
                h = self.second(h.float())
        result: Tensor = self.last(self.second(h))
        return result


@pytest.mark.parametrize("asks", [False, True], ids=["off", "asks"])
def test_autocast_within_a_traced_forward(comm: Any, asks: bool) -> None:
    """A trace without autocast sees neither that it is disabled, nor its dtype in other batches."""
    with pytest.raises(UsageError, match="autocast"):
        pipeline(Short(asks=asks), comm, loss=F.mse_loss, microbatches=2)
