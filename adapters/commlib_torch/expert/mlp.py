"""MLP: the built-in expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import Sharding
from commlib_torch.expert._expert_stack import is_called_plainly
from commlib_torch.expert._grouped_linear import grouped_linear
from commlib_torch.tensor.mlp import Activation, activation_of
from commlib_torch.tensor.moves import copy, reduce


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

    def divided(self) -> dict[str, Sharding]:
        """The shardings of its parameters for tensor parallelism: columns, then rows."""
        inside, width = self.up.weight.shape
        halves = (inside // 2, inside // 2) if self.gated else ()
        return {
            "up.weight": Sharding((inside, width), 0, halves),
            "up.bias": Sharding((inside,), 0, halves),
            "down.weight": Sharding(tuple(self.down.weight.shape), 1),
        }

    @property
    def is_plain(self) -> bool:
        """Whether `grouped` equals the layers' calls: they are not replaced, and have no hooks."""
        up, down = self.up, self.down
        return type(up) is type(down) is nn.Linear and all(map(is_called_plainly, (self, up, down)))

    def grouped(self, rows: Tensor, counts: list[int], tensor: ParallelAxis | None = None) -> Tensor:
        """Return the outputs of several experts, with stacked parameters: the first counts[0] rows are for the first.

        tensor: the ranks of each expert's tensor parallelism, if there is any.
        """
        if tensor is None:
            inside = self._inside(grouped_linear(rows, self.up.weight, self.up.bias, counts))
            return grouped_linear(inside, self.down.weight, self.down.bias, counts)
        inside = self._inside(grouped_linear(copy(rows, tensor), self.up.weight, self.up.bias, counts))
        out = reduce(grouped_linear(inside, self.down.weight, None, counts), tensor)
        if self.down.bias is None:
            return out
        return out + self.down.bias.repeat_interleave(torch.tensor(counts), 0, output_size=len(rows)).to(out.dtype)

    def _inside(self, inside: Tensor) -> Tensor:
        if not self.gated:
            return self.activation(inside)
        gate, up = inside.chunk(2, -1)
        return self.activation(gate) * up
