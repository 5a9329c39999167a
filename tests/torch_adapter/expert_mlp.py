"""A user's MLP that becomes experts."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out
