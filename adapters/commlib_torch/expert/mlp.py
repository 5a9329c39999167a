"""MLP: the built-in expert."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from commlib_torch.expert._grouped import grouped_linear
from commlib_torch.tensor.mlp import Activation, activation_of


class MLP(nn.Module):
    """A linear layer to `hidden` features, an activation, and a linear layer back. x: (..., width).

    gated: the activation of one half of 2 * hidden features times the other half. activation: its name, or a function.
    """

    def __init__(
        self, width: int, hidden: int, *, gated: bool = False, activation: str | Activation = "gelu", bias: bool = True
    ) -> None:
        super().__init__()
        self.gated, self.activation = gated, activation_of("MLP", activation)
        self.up = nn.Linear(width, (1 + gated) * hidden, bias)
        self.down = nn.Linear(hidden, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        out: Tensor = self.down(self._inside(self.up(x)))
        return out

    def grouped(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the outputs of several experts, whose parameters are stacked: the first counts[0] rows are of the first."""
        inside = self._inside(grouped_linear(rows, self.up.weight, self.up.bias, counts))
        return grouped_linear(inside, self.down.weight, self.down.bias, counts)

    def _inside(self, inside: Tensor) -> Tensor:
        if not self.gated:
            return self.activation(inside)
        gate, up = inside.chunk(2, -1)
        return self.activation(gate) * up
