"""Linear layers sharded among the ranks of an axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.sharding.axis import AxisRanks, ParallelAxis, axis_of
from commlib.sharding.shard_sharing import Sharers
from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import REDUCE
from commlib.tensor_parallel.styles import Column, Row, Vocabulary
from commlib_torch.tensor._entry import product
from commlib_torch.tensor._sharded_layer import ShardedLayer
from commlib_torch.tensor.moves import copy, redistribute


class ColumnLinear(ShardedLayer, nn.Linear):
    """A linear layer with sharded outputs: each rank has some rows of the weight.

    Like `nn.Linear(in_features, out_features)`, with its values for the same seed. x: (..., in_features), unsharded on
    every rank, or sharded along `sequence`. Returns (..., this rank's outputs), or all with `gather`. Other arguments:
    see `commlib.tensor_parallel.Column`.

    Args:
        in_features: The features of the input, unsharded.
        out_features: The features of the output, unsharded.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        bias: Whether the layer has a bias.
        style: How the layer is sharded: see `commlib.tensor_parallel`.
        **kwargs: Arguments of the layer that is sharded.
    """

    style: Column | Vocabulary

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ranks: AxisRanks,
        bias: bool = True,
        *,
        style: Column | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        self.become("ColumnLinear", axis_of(ranks, "ColumnLinear"), style or Column())

    def shardings(self, what: str, style: Column) -> dict[str, Sharding]:
        """Return the shardings of its weights; `self` may be a plain layer. Raises UsageError if there are none."""
        parts = parts_of(what, style.parts, self.out_features)
        weight = Sharding((self.out_features, self.in_features), 0, parts, style.units, shared=style.shares)
        bias = Sharding((self.out_features,), 0, parts, style.units, shared=style.shares)
        return {"weight": weight} if self.bias is None else {"weight": weight, "bias": bias}

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs, or all of them."""
        return outputs_of_column(self, x)


class VocabularyLinear(ColumnLinear):
    """The layer that computes logits, sharded by vocabulary: like `ColumnLinear`, for the style `Vocabulary`.

    It may share the weight of a `VocabularyEmbedding`, which is sharded once. Returns (..., this rank's tokens), for
    `vocabulary_cross_entropy`, or all with `gather`.

    Args:
        in_features: The features of the input, unsharded.
        out_features: The features of the output, unsharded.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        bias: Whether the layer has a bias.
        style: How the layer is sharded: see `commlib.tensor_parallel`.
        **kwargs: Arguments of the layer that is sharded.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ranks: AxisRanks,
        bias: bool = True,
        *,
        style: Vocabulary | None = None,
        **kwargs: Any,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, **kwargs)
        self.become("VocabularyLinear", axis_of(ranks, "VocabularyLinear"), style or Vocabulary())

    def shardings(self, what: str, style: Column | Vocabulary) -> dict[str, Sharding]:
        """Return the shardings of its weights; `self` may be a plain layer. Raises UsageError if there are none."""
        return ColumnLinear.shardings(self, what, Column())

    def become(self, what: str, axis: ParallelAxis, style: Column | Vocabulary) -> None:
        """Shard a plain layer in place."""
        super().become(what, axis, Column(gather=style.gather, sequence=style.sequence))
        self.style = style


class RowLinear(ShardedLayer, nn.Linear):
    """A linear layer with sharded inputs: each rank has some columns of the weight; outputs are summed.

    Like `nn.Linear(in_features, out_features)`, with its values for the same seed. x: (..., this rank's inputs), or all
    with `split`. Returns (..., out_features), unsharded on every rank or sharded along `sequence`.

    Args:
        in_features: The features of the input, unsharded.
        out_features: The features of the output, unsharded.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        bias: Whether the layer has a bias.
        style: How the layer is sharded: see `commlib.tensor_parallel`.
        **kwargs: Arguments of the layer that is sharded.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ranks: AxisRanks,
        bias: bool = True,
        *,
        style: Row | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        self.become("RowLinear", axis_of(ranks, "RowLinear"), style or Row())

    def shardings(self, what: str, style: Row) -> dict[str, Sharding]:
        """Return the shardings of its weights; `self` may be a plain layer. Raises UsageError if there are none."""
        return {"weight": Sharding((self.out_features, self.in_features), 1, (), style.units)}

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, unsharded or this rank's part of the sequence."""
        return outputs_of_row(self, x, self.weight)


def outputs_of_column(layer: Any, x: Tensor, *, transposed: bool = False) -> Tensor:
    """Return this rank's outputs of a layer, or all of them. transposed: its weight is (inputs, outputs)."""
    weight, bias = layer.weight, layer.bias
    if layer.sharers:
        weight = sum_shared_gradient(layer.sharers, weight, 1 if transposed else 0)
        bias = None if bias is None else sum_shared_gradient(layer.sharers, bias, 0)
    out = product(x, weight.t() if transposed else weight, bias, layer.axis, layer.style.sequence, layer)
    return gather_outputs(out, layer.axis, layer.sharding, layer=layer) if layer.style.gather else out


def outputs_of_row(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    """Return the outputs of a layer with sharded inputs. weight: (outputs, this rank's inputs)."""
    axis, sequence = layer.axis, layer.style.sequence
    if layer.style.split:
        x = redistribute(x, axis, moves.scatter(-1, layer.sharding.lengths(axis.size)), layer=layer)
    check_inputs(layer, x, weight.shape[1])
    move = REDUCE if sequence is None else moves.reduce_scatter(sequence)
    out = redistribute(F.linear(x, weight), axis, move, may_write=True, layer=layer)
    if layer.bias is None:
        return out
    # With a sharded sequence, each rank has a part of the bias gradient.
    return out + (layer.bias if sequence is None else copy(layer.bias, axis)).to(out.dtype)


def sum_shared_gradient(sharers: Sharers, weight: Tensor, dim: int) -> Tensor:
    """Return a weight whose gradient is summed over the ranks that share it, or parts of it along a dimension."""
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return weight
    pieces = weight.split([length for length, _ in sharers], dim)
    copied = [one if axis is None else copy(one, axis) for one, (_, axis) in zip(pieces, sharers, strict=True)]
    return copied[0] if len(copied) == 1 else torch.cat(copied, dim)


def gather_outputs(out: Tensor, axis: ParallelAxis, sharding: Sharding, dim: int = -1, *, layer: Any = None) -> Tensor:
    """Return the outputs of all ranks in the unsharded order along a dimension. layer: their layer."""
    lengths = sharding.lengths(axis.size)
    if out.shape[dim] != lengths[axis.rank]:
        raise shape_error(axis, out.shape[dim], lengths[axis.rank])
    whole = redistribute(out, axis, moves.gather(dim, lengths=lengths), layer=layer)
    if len(sharding.parts) < 2 and sharding.copies(axis.size) == 1:
        return whole
    offsets = [sum(lengths[:rank]) for rank in range(axis.size)]
    pieces = sharding.pieces(axis.size)
    return torch.cat([whole.narrow(dim, offsets[rank] + first, last - first) for rank, first, last, _ in pieces], dim)


def shape_error(axis: ParallelAxis, shape: int, expected: int) -> UsageError:
    """Return the error for a weight that no longer has the shape of this rank's shard."""
    return UsageError(
        f"a sharded layer on rank {axis.rank} of {axis.comm.name}: its weight has shape {shape}, expected {expected}, "
        "this rank's shard: a function such as resize_token_embeddings has replaced its values: call it before the "
        "model is sharded"
    )


def check_inputs(module: Any, x: Tensor, expected: int, dim: int = -1) -> None:
    """Raise UsageError unless the input is sharded like the weight."""
    if x.shape[dim] != expected:
        whole = module.sharding.shape[module.sharding.dim]
        hint = (
            "the input is unsharded: pass Row(split=True), or use a Column before it"
            if x.shape[dim] == whole
            else "give both the same units"
        )
        raise UsageError(
            f"{type(module).__name__} on rank {module.axis.rank} of {module.axis.comm.name}: its input has "
            f"{x.shape[dim]} {'features' if dim == -1 else 'channels'}, expected {expected} of {whole}: {hint}"
        )
