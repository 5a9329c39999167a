"""Layers that can be divided: which class does that for a plain layer of Keras and a style, and whether it can."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from commlib.errors import UsageError
from commlib.tensor_parallel.run.division import Division
from commlib.tensor_parallel.styles import Column, Replicate, Row, Sequence, Style, Vocabulary
from commlib_tensorflow.tensor._dividing import Shardings, check_division
from commlib_tensorflow.tensor.attention import ColumnAttention
from commlib_tensorflow.tensor.conv import ColumnConv, RowConv
from commlib_tensorflow.tensor.dense import ColumnDense, RowDense, VocabularyDense
from commlib_tensorflow.tensor.einsum import ColumnEinsumDense, RowEinsumDense
from commlib_tensorflow.tensor.embedding import ColumnEmbedding, VocabularyEmbedding
from commlib_tensorflow.tensor.features import FeatureBatchNormalization, FeatureGroupNormalization, PartPReLU
from commlib_tensorflow.tensor.reversible import VocabularyReversibleEmbedding
from commlib_tensorflow.tensor.sequence import (
    IntoSharded,
    OnShards,
    SequenceLayerNormalization,
    SequenceRMSNormalization,
    mixed,
)

_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
_ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)

_LAYERS: dict[tuple[type, type[Style]], type] = {
    (keras.layers.Dense, Column): ColumnDense,
    (keras.layers.Dense, Row): RowDense,
    (keras.layers.Dense, Vocabulary): VocabularyDense,
    (keras.layers.EinsumDense, Column): ColumnEinsumDense,
    (keras.layers.EinsumDense, Row): RowEinsumDense,
    (keras.layers.Embedding, Column): ColumnEmbedding,
    (keras.layers.Embedding, Vocabulary): VocabularyEmbedding,
    (keras.layers.ReversibleEmbedding, Vocabulary): VocabularyReversibleEmbedding,
    (keras.layers.LayerNormalization, Sequence): SequenceLayerNormalization,
    (keras.layers.RMSNormalization, Sequence): SequenceRMSNormalization,
    (keras.layers.BatchNormalization, Sequence): FeatureBatchNormalization,
    (keras.layers.GroupNormalization, Sequence): FeatureGroupNormalization,
    (keras.layers.PReLU, Sequence): PartPReLU,
    **{(plain, Column): mixed(ColumnConv, plain) for plain in _CONVOLUTIONS},
    **{(plain, Row): mixed(RowConv, plain) for plain in _CONVOLUTIONS},
    **{(plain, Column): mixed(ColumnAttention, plain) for plain in _ATTENTION},
}


def find_layer(name: str, layer: Any, style: Style) -> Any:
    """Return the class that a layer becomes, None if it stays what it is. Raises UsageError if none is known."""
    plain: Any = type(layer)
    if isinstance(style, Replicate) and not style.into_sharded:
        return None
    if hasattr(layer, "become"):
        raise UsageError(f"plan: {name} is divided already, as {layer.style}")
    _check_own_call(name, layer)
    if (found := _LAYERS.get((plain, type(style)))) is not None:
        return found
    if isinstance(style, Replicate):
        return mixed(IntoSharded, plain)
    if isinstance(style, Sequence):
        return mixed(OnShards, plain)
    able = sorted({plain.__name__ for plain, kind in _LAYERS if isinstance(style, kind)})
    raise UsageError(
        f"plan: {name} is a {type(layer).__name__}, but {type(style).__name__} is for {', '.join(able) or 'no layer'}"
    )


def _check_own_call(name: str, layer: Any) -> None:
    """Raise UsageError for a layer that computes, itself or within it, by what was put in the place of its class'."""
    for one in layer._flatten_layers():
        if put := {"call", "__call__"}.intersection(vars(one)):
            where = name if one is layer else f"{name}, or {one.name} within it,"
            raise UsageError(
                f"plan: {where} has a {put.pop()} of its own, put over that of its class: divide the model before"
            )


def check_wrapper(name: str, layers: Mapping[str, list[Any]]) -> None:
    """Raise UsageError for a layer whose wrapper computes with it past its own call, or looks at its weights."""
    above = name.rpartition("/")[0]
    for wrapper in layers.get(above, ()):
        if isinstance(wrapper, keras.layers.TimeDistributed):
            raise UsageError(
                f"plan: {name}: {above} is TimeDistributed, which goes past what divides a layer: put the layer into a "
                "keras.Sequential within it, or leave TimeDistributed out where the layer takes any dimensions"
            )
        if isinstance(wrapper, keras.layers.SpectralNormalization):
            raise UsageError(
                f"plan: {name}: {above} is SpectralNormalization, which would see this rank's part of the weight: "
                "leave it whole"
            )


def check_layers(found: Iterable[tuple[str, Any, Style, Any]], division: Division) -> None:
    """Raise UsageError unless all of (name, layer, style, the class that it becomes) can be divided together."""
    for name, layer, style, kind in found:
        if division.is_new(name, layer, style) and kind is not None:
            check_division(name, shardings_of(kind, name, layer, style, division.axis.size), division)


def shardings_of(kind: Any, name: str, layer: Any, style: Style, size: int) -> Shardings:
    """Return how the variables of a layer that is to become a `kind` are divided among `size` ranks.

    Of attention that depends on their number: its heads of keys may be fewer. Raises UsageError if they cannot be.
    """
    more = (size,) if issubclass(kind, ColumnAttention) else ()
    return kind.shardings(layer, name, style, *more)  # type: ignore[no-any-return]
