"""Linear layers whose weight is (inputs, outputs), divided: Hugging Face's `Conv1D`, of which GPT-2 is made."""

from __future__ import annotations

from torch import Tensor, nn

from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel.styles import Column, Row
from commlib_torch._shards import KeepsShards
from commlib_torch.tensor._dividing import divide
from commlib_torch.tensor.linear import become_column, outputs_of_column, outputs_of_row


class ColumnTransposed(KeepsShards, nn.Module):
    """As `ColumnLinear`: each rank has some columns of the weight. Becomes of a plain layer; see `layers`."""

    weight: nn.Parameter
    bias: nn.Parameter

    def shardings(self, what: str, style: Column) -> dict[str, Sharding]:
        """Return how its weights are divided; `self` may be an ordinary layer. Raises UsageError if they cannot be."""
        shape = tuple(self.weight.shape)
        parts = parts_of(what, style.parts, shape[1])
        weight = Sharding(shape, 1, parts, style.units, shared=style.shares)
        return {"weight": weight, "bias": Sharding(shape[1:], 0, parts, style.units, shared=style.shares)}

    def become(self, what: str, axis: Axis, style: Column) -> None:
        """Divide what is an ordinary layer so far."""
        become_column(self, what, axis, style, ColumnTransposed.shardings(self, what, style))

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs, or all of them."""
        return outputs_of_column(self, x, transposed=True)


class RowTransposed(KeepsShards, nn.Module):
    """As `RowLinear`: each rank has some rows of the weight. Becomes of a plain layer; see `layers`."""

    weight: nn.Parameter
    bias: nn.Parameter

    def shardings(self, what: str, style: Row) -> dict[str, Sharding]:
        """Return how its weights are divided; `self` may be an ordinary layer. Raises UsageError if they cannot be."""
        return {"weight": Sharding(tuple(self.weight.shape), 0, (), style.units)}

    def become(self, what: str, axis: Axis, style: Row) -> None:
        """Divide what is an ordinary layer so far."""
        shardings = RowTransposed.shardings(self, what, style)
        divide(what, self, axis, shardings)
        self.axis, self.style, self.sharding = axis, style, shardings["weight"]

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, whole or this rank's part of the sequence."""
        return outputs_of_row(self, x, self.weight.t())
