"""Convolutions sharded among the ranks of an axis, by output or input channels."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from commlib.errors import UsageError
from commlib.sharding.axis import AxisRanks, axis_of
from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import COPY, REDUCE
from commlib.tensor_parallel.styles import Column, Row
from commlib_torch.tensor._comparison import note_input
from commlib_torch.tensor._entry import enter
from commlib_torch.tensor._sharded_layer import ShardedLayer
from commlib_torch.tensor.linear import check_inputs, gather_outputs
from commlib_torch.tensor.moves import copy, redistribute


class ColumnConv(ShardedLayer, _ConvNd):
    """A convolution with sharded output channels: like `ColumnLinear`, for images of any number of dimensions.

    Like `nn.Conv1d(...)`, `nn.Conv2d(...)` or `nn.Conv3d(...)`, with their values for the same seed.
    """

    def __init__(self, *args: Any, ranks: AxisRanks, style: Column | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.become(type(self).__name__, axis_of(ranks, "ColumnConv"), style or Column())

    def shardings(self, what: str, style: Column) -> dict[str, Sharding]:
        """Return the shardings of its weights; `self` may be a plain layer. Raises UsageError if there are none."""
        _check_groups(what, self)
        parts = parts_of(what, style.parts, self.out_channels)
        shape = (self.out_channels, *self.weight.shape[1:])
        weight, bias = Sharding(shape, 0, parts, style.units), Sharding(shape[:1], 0, parts, style.units)
        return {"weight": weight} if self.bias is None else {"weight": weight, "bias": bias}

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's channels, or all of them."""
        sequence = self.style.sequence
        note_input(self, x, sequence=sequence)
        inside = enter(
            x, self.axis, COPY if sequence is None else moves.gather(sequence, partial=True), redistribute, self.weight
        )
        out: Tensor = self._conv_forward(inside, self.weight, self.bias)
        return gather_outputs(out, self.axis, self.sharding, _channels(self), layer=self) if self.style.gather else out


class RowConv(ShardedLayer, _ConvNd):
    """A convolution with sharded input channels, whose outputs are summed: like `RowLinear`.

    Like `nn.Conv1d(...)`, `nn.Conv2d(...)` or `nn.Conv3d(...)`, with their values for the same seed.
    """

    def __init__(self, *args: Any, ranks: AxisRanks, style: Row | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.become(type(self).__name__, axis_of(ranks, "RowConv"), style or Row())

    def shardings(self, what: str, style: Row) -> dict[str, Sharding]:
        """Return the shardings of its weights; `self` may be a plain layer. Raises UsageError if there are none."""
        _check_groups(what, self)
        shape = tuple(self.weight.shape)
        return {"weight": Sharding((shape[0], self.in_channels, *shape[2:]), 1, (), style.units)}

    def forward(self, x: Tensor) -> Tensor:
        """Return all channels, of full images or of this rank's part of the sequence."""
        axis, sequence, channels = self.axis, self.style.sequence, _channels(self)
        if self.style.split:
            x = redistribute(x, axis, moves.scatter(channels, self.sharding.lengths(axis.size)), layer=self)
        check_inputs(self, x, self.weight.shape[1], channels)
        part = self._conv_forward(x, self.weight, None)
        out = redistribute(part, axis, REDUCE if sequence is None else moves.reduce_scatter(sequence), layer=self)
        if self.bias is None:
            return out
        # With a sharded sequence, each rank has a part of the bias gradient.
        bias = self.bias if sequence is None else copy(self.bias, axis)
        return out + bias.to(out.dtype).reshape(-1, *(1,) * (-1 - channels))


class ColumnConv1d(ColumnConv, nn.Conv1d):
    """A `ColumnConv`. x: (batch, channels, length), or without the batch."""


class ColumnConv2d(ColumnConv, nn.Conv2d):
    """A `ColumnConv`. x: (batch, channels, height, width), or without the batch."""


class ColumnConv3d(ColumnConv, nn.Conv3d):
    """A `ColumnConv`. x: (batch, channels, depth, height, width), or without the batch."""


class RowConv1d(RowConv, nn.Conv1d):
    """A `RowConv`. x: (batch, this rank's channels, length), or without the batch."""


class RowConv2d(RowConv, nn.Conv2d):
    """A `RowConv`. x: (batch, this rank's channels, height, width), or without the batch."""


class RowConv3d(RowConv, nn.Conv3d):
    """A `RowConv`. x: (batch, this rank's channels, depth, height, width), or without the batch."""


def _channels(module: _ConvNd) -> int:
    """Return the dimension of channels, counted from the end."""
    return -1 - len(module.kernel_size)


def _check_groups(what: str, module: _ConvNd) -> None:
    if module.groups != 1:
        raise UsageError(f"{what}: a convolution with groups={module.groups} cannot be sharded: leave it replicated")
