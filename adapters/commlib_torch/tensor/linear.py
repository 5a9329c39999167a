"""Linear layers that are divided among the ranks of an axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding, parts_of
from commlib.sharding.sharers import Sharers, sharers_of
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import REDUCE
from commlib.tensor_parallel.styles import Column, Row, Vocabulary
from commlib_torch._shards import KeepsShards
from commlib_torch.tensor._dividing import divide
from commlib_torch.tensor._entry import product
from commlib_torch.tensor.moves import On, axis_of, copy, moved


class ColumnLinear(KeepsShards, nn.Linear):
    """A linear layer whose outputs are divided: each rank has some rows of the weight.

    As `nn.Linear(in_features, out_features)`, with the values that this has for the same seed. x: (..., in_features),
    whole on every rank, or divided along `sequence`. Returns (..., this rank's outputs), or all with `gather`. Other
    arguments: see `commlib.tensor_parallel.Column`.
    """

    style: Column | Vocabulary
    axis: Axis
    sharding: Sharding
    sharers: Sharers

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: On,
        bias: bool = True,
        *,
        style: Column | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        self.become("ColumnLinear", axis_of(axis), style or Column())

    def shardings(self, what: str, style: Column) -> dict[str, Sharding]:
        """Return how its weights are divided; `self` may be an ordinary layer. Raises UsageError if they cannot be."""
        parts = parts_of(what, style.parts, self.out_features)
        weight = Sharding((self.out_features, self.in_features), 0, parts, style.units, shared=style.shares)
        bias = Sharding((self.out_features,), 0, parts, style.units, shared=style.shares)
        return {"weight": weight} if self.bias is None else {"weight": weight, "bias": bias}

    def become(self, what: str, axis: Axis, style: Column) -> None:
        """Divide what is an ordinary layer so far."""
        become_column(self, what, axis, style, ColumnLinear.shardings(self, what, style))

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs, or all of them."""
        return outputs_of_column(self, x)

    def extra_repr(self) -> str:
        """Say what is divided."""
        return f"{super().extra_repr()}, {self.style}, {self.axis!r}"


class VocabularyLinear(ColumnLinear):
    """The layer that makes logits, divided by words: as `ColumnLinear`, for the style `Vocabulary`.

    Its weight may be that of a `VocabularyEmbedding`: it is divided once. Returns (..., this rank's words), for
    `vocabulary_cross_entropy`, or all with `gather`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: On,
        bias: bool = True,
        *,
        style: Vocabulary | None = None,
        **kwargs: Any,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, **kwargs)
        self.become("VocabularyLinear", axis_of(axis), style or Vocabulary())

    def shardings(self, what: str, style: Column | Vocabulary) -> dict[str, Sharding]:
        """Return how its weights are divided; `self` may be an ordinary layer. Raises UsageError if they cannot be."""
        return ColumnLinear.shardings(self, what, Column())

    def become(self, what: str, axis: Axis, style: Column | Vocabulary) -> None:
        """Divide what is an ordinary layer so far."""
        super().become(what, axis, Column(gather=style.gather, sequence=style.sequence))
        self.style = style


class RowLinear(KeepsShards, nn.Linear):
    """A linear layer whose inputs are divided: each rank has some columns of the weight; outputs are added up.

    As `nn.Linear(in_features, out_features)`, with the values that this has for the same seed. x: (..., this rank's
    inputs), or all with `split`. Returns (..., out_features), whole on every rank or divided along `sequence`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: On,
        bias: bool = True,
        *,
        style: Row | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        self.become("RowLinear", axis_of(axis), style or Row())

    def shardings(self, what: str, style: Row) -> dict[str, Sharding]:
        """Return how its weights are divided; `self` may be an ordinary layer. Raises UsageError if they cannot be."""
        return {"weight": Sharding((self.out_features, self.in_features), 1, (), style.units)}

    def become(self, what: str, axis: Axis, style: Row) -> None:
        """Divide what is an ordinary layer so far."""
        shardings = self.shardings(what, style)
        divide(what, self, axis, shardings)
        self.axis, self.style, self.sharding = axis, style, shardings["weight"]

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, whole or this rank's part of the sequence."""
        return outputs_of_row(self, x, self.weight)

    def extra_repr(self) -> str:
        """Say what is divided."""
        return f"{super().extra_repr()}, {self.style}, {self.axis!r}"


def become_column(layer: Any, what: str, axis: Axis, style: Column, shardings: dict[str, Sharding]) -> None:
    """Divide a layer along its outputs."""
    divide(what, layer, axis, shardings)
    layer.axis, layer.style, layer.sharding = axis, style, shardings["weight"]
    layer.sharers = sharers_of(axis, layer.sharding)


def outputs_of_column(layer: Any, x: Tensor, *, transposed: bool = False) -> Tensor:
    """Return this rank's outputs of a layer, or all of them. transposed: its weight is (inputs, outputs)."""
    weight, bias = layer.weight, layer.bias
    if layer.sharers:
        weight = for_sharers(layer.sharers, weight, 1 if transposed else 0)
        bias = None if bias is None else for_sharers(layer.sharers, bias, 0)
    out = product(x, weight.t() if transposed else weight, bias, layer.axis, layer.style.sequence, layer)
    return gathered(out, layer.axis, layer.sharding, layer=layer) if layer.style.gather else out


def outputs_of_row(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    """Return the outputs of a layer whose inputs are divided. weight: (outputs, this rank's inputs)."""
    axis, sequence = layer.axis, layer.style.sequence
    if layer.style.split:
        x = moved(x, axis, moves.scatter(-1, layer.sharding.lengths(axis.size)), layer=layer)
    check_inputs(layer, x, weight.shape[1])
    move = REDUCE if sequence is None else moves.reduce_scatter(sequence)
    out = moved(F.linear(x, weight), axis, move, may_write=True, layer=layer)
    if layer.bias is None:
        return out
    # Of a divided sequence each rank has a part of the bias' gradient.
    return out + (layer.bias if sequence is None else copy(layer.bias, axis)).to(out.dtype)


def for_sharers(sharers: Sharers, weight: Tensor, dim: int) -> Tensor:
    """Return a weight whose gradient is added up over the ranks that share it, or parts of it along a dimension."""
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return weight
    pieces = weight.split([length for length, _ in sharers], dim)
    copied = [one if axis is None else copy(one, axis) for one, (_, axis) in zip(pieces, sharers, strict=True)]
    return copied[0] if len(copied) == 1 else torch.cat(copied, dim)


def gathered(out: Tensor, axis: Axis, sharding: Sharding, dim: int = -1, *, layer: Any = None) -> Tensor:
    """Return the outputs of all ranks in the order of the whole, along a dimension. layer: whose outputs these are."""
    lengths = sharding.lengths(axis.size)
    if out.shape[dim] != lengths[axis.rank]:
        raise other_part(axis, out.shape[dim], lengths[axis.rank])
    whole = moved(out, axis, moves.gather(dim, lengths=lengths), layer=layer)
    if len(sharding.parts) < 2 and sharding.copies(axis.size) == 1:
        return whole
    offsets = [sum(lengths[:rank]) for rank in range(axis.size)]
    pieces = sharding.pieces(axis.size)
    return torch.cat([whole.narrow(dim, offsets[rank] + first, last - first) for rank, first, last, _ in pieces], dim)


def other_part(axis: Axis, came: int, expected: int) -> UsageError:
    """Return the error for a weight that has not the shape of this rank's part any more."""
    return UsageError(
        f"a divided layer on rank {axis.rank} of {axis.comm.name}: its weight is one of {came}, expected {expected}, "
        "this rank's part: something has put other values into it, as resize_token_embeddings does: do that before "
        "the model is divided"
    )


def check_inputs(module: Any, x: Tensor, expected: int, dim: int = -1) -> None:
    """Raise UsageError unless the input is divided as the weight is."""
    if x.shape[dim] != expected:
        whole = module.sharding.shape[module.sharding.dim]
        hint = (
            "this is the whole: give Row(split=True), or let a Column come before it"
            if x.shape[dim] == whole
            else "give both the same units"
        )
        raise UsageError(
            f"{type(module).__name__} on rank {module.axis.rank} of {module.axis.comm.name}: its input has "
            f"{x.shape[dim]} {'features' if dim == -1 else 'channels'}, expected {expected} of {whole}: {hint}"
        )
