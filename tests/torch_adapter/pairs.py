"""Models with a function between the layers of a pair, which a plan divides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    """A pair with a function between its layers. width: the number of features of the first one."""

    def __init__(self, function: Any, width: int = 12) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(8, width), nn.Linear(12, 8), function

    def forward(self, x: Tensor) -> Any:
        return self.down(self.function(self.up(x)))


class Two(nn.Module):
    """A questionable pair, and a valid one next to it."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.last = Mlp(function), Mlp(torch.relu)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x))


def is_right(plain: Any, divided: Any, x: Tensor) -> None:
    """Check that outputs and gradients of inputs match one process."""
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [model(one) for model, one in zip((plain, divided), inputs, strict=True)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-10)
    for out in outputs:
        out.square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=0, atol=1e-10)
