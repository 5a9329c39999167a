"""Models with a function between the layers of a pair, which a plan divides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    """A pair with a function between its layers. width: of what the first one gives."""

    def __init__(self, function: Any, width: int = 12) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(8, width), nn.Linear(12, 8), function

    def forward(self, x: Tensor) -> Any:
        return self.down(self.function(self.up(x)))


class Two(nn.Module):
    """A pair that stands in question, and one beside it that is right."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.last = Mlp(function), Mlp(torch.relu)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x))
