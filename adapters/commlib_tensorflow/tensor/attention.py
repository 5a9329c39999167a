"""Multi-head attention of Keras with its heads sharded over the ranks of an axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from commlib.errors import UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.heads import units_of_queries
from commlib.tensor_parallel.styles import Column, Row
from commlib_tensorflow.tensor._activity import regularize_activity
from commlib_tensorflow.tensor._comparison import note_input
from commlib_tensorflow.tensor._file_layers import disguise_class
from commlib_tensorflow.tensor._input_cache import enter
from commlib_tensorflow.tensor._masks import gather_mask
from commlib_tensorflow.tensor._sharded_layer import check_plain
from commlib_tensorflow.tensor._sharding import Shardings, shard_variables
from commlib_tensorflow.tensor.einsum import ColumnEinsumDense, RowEinsumDense
from commlib_tensorflow.tensor.moves import redistribute
from commlib_tensorflow.tensor.streams import split_streams

_OF_KEYS = ("key", "value")
"""The layers that make heads of keys and values."""


class ColumnAttention:
    """A `MultiHeadAttention` or `GroupQueryAttention` of Keras with sharded heads, in units of K and V heads.

    Each rank has some heads of all projections, and adds its part of the output. If there are fewer heads of K and V
    than ranks, ranks share them: see `commlib.tensor_parallel.heads`. Arguments and results are Keras'.

    Inputs are unsharded on every rank, or sharded along `sequence` of the style; so is the output. Explicit masks are
    those of whole sequences, and may have a dimension of all heads; Keras' implicit masks are sharded like their
    tensors. Returned scores include all heads.
    """

    def shardings(self: Any, what: str, style: Column, size: int) -> Shardings:
        """Return the sharding of its variables over `size` ranks; `self` may be a plain layer.

        Raises UsageError if it cannot be sharded.
        """
        check_plain(what, self, style)
        if style.gather or style.parts != 1 or style.units not in (0, _keys(self)):
            raise UsageError(f"plan: {what}: {style} for attention, whose units are heads: use Column(sequence=...)")
        units = _units(what, self, size)
        shardings = [
            (variable, replace(sharding, shared=name in _OF_KEYS))
            for name, dense in _projections(self).items()
            for variable, sharding in ColumnEinsumDense.shardings(dense, f"{what}/{name}", Column(units=units[name]))
        ]
        row = Row(units=units["query"])
        return [*shardings, *RowEinsumDense.shardings(self._output_dense, f"{what}/attention_output", row)]

    def become(self: Any, what: str, axis: ParallelAxis, style: Column) -> None:
        """Shard a plain attention layer in place."""
        shard_variables(what, axis, self.shardings(what, style, axis.size))
        self.supports_jit = False
        self.divided_axis, self.style = axis, style
        regularize_activity(self, axis, Row(sequence=style.sequence))  # it returns the full output
        units = _units(what, self, axis.size)
        for name, dense in _projections(self).items():
            plain: Any = type(dense)
            dense.__class__ = disguise_class(ColumnEinsumDense, plain)
            dense.become(f"{what}/{name}", axis, Column(units=units[name]))
            dense.enters = False
        plain = type(self._output_dense)
        self._output_dense.__class__ = disguise_class(RowEinsumDense, plain)
        self._output_dense.become(f"{what}/attention_output", axis, Row(units=units["query"], sequence=style.sequence))
        if hasattr(self, "num_repeats"):  # query heads of this rank per head of keys
            self.num_repeats = _heads(self)[axis.rank] // self._key_dense.sharding.length(axis.rank, axis.size)
        split_streams(self._dropout_layer, axis)

    def call(
        self: Any,
        query: Any,
        value: Any,
        key: Any = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the output, and with `return_attention_scores` the scores of all heads."""
        axis, sequence = self.divided_axis, self.style.sequence
        moves_of: dict[int, Any] = {}  # one for each distinct input tensor
        inputs = [query, value, value if key is None else key]
        inside = []
        for x in inputs:
            if id(x) not in moves_of:
                moves_of[id(x)] = enter(self, x, axis, sequence)
            inside.append(moves_of[id(x)])
        masks = {}
        for name, x, mask in zip(("query", "value", "key"), inputs, (query_mask, value_mask, key_mask), strict=True):
            if id(mask) not in moves_of:
                if sequence is None:
                    note_input(axis, self, mask, f"the mask of {name}")
                moves_of[id(mask)] = gather_mask(mask, axis, sequence, len(x.shape))
            masks[f"{name}_mask"] = moves_of[id(mask)]
        _set_mask(inside[0], masks["query_mask"])  # Keras' MultiHeadAttention looks for the mask here
        if attention_mask is not None:
            note_input(axis, self, attention_mask, "the mask")
            kwargs["attention_mask"] = self._own_heads(attention_mask)
        result = super().call(*inside, **masks, **kwargs)  # type: ignore[misc]
        output, *scores = result if isinstance(result, tuple) else (result,)
        if query_mask is not None:
            _set_mask(output, query_mask)
        if not scores:
            return output
        whole = redistribute(scores[0], axis, moves.gather(_dim_of_heads(self), lengths=_heads(self)))
        return output, whole

    def _own_heads(self: Any, mask: Any) -> Any:
        """Return the mask of this rank's heads, from one with all heads."""
        heads, dim = _heads(self), _dim_of_heads(self)
        if len(mask.shape) < -dim or mask.shape[dim] != sum(heads) or sum(heads) == 1:
            return mask
        first = sum(heads[: self.divided_axis.rank])
        own = slice(first, first + heads[self.divided_axis.rank])
        return mask[(..., own, *(slice(None),) * (-dim - 1))]


def _keys(layer: Any) -> int:
    """Return the number of K and V heads."""
    return getattr(layer, "num_key_value_heads", None) or layer.num_heads  # type: ignore[no-any-return]


def _units(what: str, layer: Any, size: int) -> dict[str, int]:
    """Return the number of units of each projection, by name, for `size` ranks."""
    keys = _keys(layer)
    queries = getattr(layer, "num_query_heads", keys)
    units = units_of_queries(queries, keys, size) or (keys if keys == queries else 0)
    if not units:
        raise UsageError(
            f"plan: {what}: {queries} heads of queries and {keys} of keys and values cannot be sharded over {size} "
            f"ranks. With fewer key heads than ranks, {keys} must divide the number of ranks, and that number must "
            f"divide {queries} (one key head only needs as many query heads as ranks): use a smaller axis, or leave it "
            "unsharded"
        )
    return {name: keys if name in _OF_KEYS else units for name in _projections(layer)}


def _projections(layer: Any) -> dict[str, Any]:
    """Return the layers that make heads, by their role."""
    projections = {name: getattr(layer, f"_{name}_dense", None) for name in ("query", "key", "value", "gate")}
    return {name: dense for name, dense in projections.items() if dense is not None}


def _heads(layer: Any) -> tuple[int, ...]:
    """Return the number of query heads of each rank."""
    return tuple(layer._query_dense.sharding.lengths(layer.divided_axis.size))


def _dim_of_heads(layer: Any) -> int:
    """Return the dimension of heads in scores, and in masks with such a dimension."""
    return -2 * len(getattr(layer, "_attention_axes", (1,))) - 1


def _set_mask(x: Any, mask: Any) -> None:
    """Set or remove a tensor's mask as Keras does."""
    x._keras_mask = mask
