"""Sharded linear layers with weights of shape (inputs, outputs): Hugging Face's `Conv1D`, as in GPT-2."""

from __future__ import annotations

from torch import Tensor, nn

from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel.styles import Column, Row
from commlib_torch.tensor._sharded_layer import ShardedLayer
from commlib_torch.tensor.linear import outputs_of_column, outputs_of_row


class ColumnTransposed(ShardedLayer, nn.Module):
    """Like `ColumnLinear`: each rank has some columns of the weight. Replaces a plain layer; see `layers`."""

    weight: nn.Parameter
    bias: nn.Parameter

    def shardings(self, what: str, style: Column) -> dict[str, Sharding]:
        """Return the shardings of its weights; `self` may be a plain layer. Raises UsageError if there are none."""
        shape = tuple(self.weight.shape)
        parts = parts_of(what, style.parts, shape[1])
        weight = Sharding(shape, 1, parts, style.units, shared=style.shares)
        return {"weight": weight, "bias": Sharding(shape[1:], 0, parts, style.units, shared=style.shares)}

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs, or all of them."""
        return outputs_of_column(self, x, transposed=True)


class RowTransposed(ShardedLayer, nn.Module):
    """Like `RowLinear`: each rank has some rows of the weight. Replaces a plain layer; see `layers`."""

    weight: nn.Parameter
    bias: nn.Parameter

    def shardings(self, what: str, style: Row) -> dict[str, Sharding]:
        """Return the shardings of its weights; `self` may be a plain layer. Raises UsageError if there are none."""
        return {"weight": Sharding(tuple(self.weight.shape), 0, (), style.units)}

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, unsharded or this rank's part of the sequence."""
        return outputs_of_row(self, x, self.weight.t())
