"""Supported layers: the sharded class for a plain Keras layer and a style, and checks whether it can be used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from commlib.errors import UsageError
from commlib.tensor_parallel.plan import no_layer
from commlib.tensor_parallel.run.divisibility import Divisibility
from commlib.tensor_parallel.styles import Column, Replicate, Row, Sequence, Style, Vocabulary
from commlib_tensorflow.tensor._sharding import Shardings, check_division
from commlib_tensorflow.tensor.attention import ColumnAttention
from commlib_tensorflow.tensor.conv import ColumnConv, RowConv
from commlib_tensorflow.tensor.dense import ColumnDense, RowDense, VocabularyDense
from commlib_tensorflow.tensor.einsum import ColumnEinsumDense, RowEinsumDense
from commlib_tensorflow.tensor.embedding import ColumnEmbedding, VocabularyEmbedding
from commlib_tensorflow.tensor.features import FeatureBatchNormalization, FeatureGroupNormalization, FeaturePReLU
from commlib_tensorflow.tensor.reversible import VocabularyReversibleEmbedding
from commlib_tensorflow.tensor.sequence import (
    ReplicatedLayer,
    SequenceLayerNormalization,
    SequenceRMSNormalization,
    ShardwiseLayer,
    subclass_around,
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
    (keras.layers.PReLU, Sequence): FeaturePReLU,
    **{(plain, Column): subclass_around(ColumnConv, plain) for plain in _CONVOLUTIONS},
    **{(plain, Row): subclass_around(RowConv, plain) for plain in _CONVOLUTIONS},
    **{(plain, Column): subclass_around(ColumnAttention, plain) for plain in _ATTENTION},
}


def find_layer(name: str, layer: Any, style: Style) -> Any:
    """Return the class that a layer becomes, None if it does not change. Raises UsageError if there is none."""
    plain: Any = type(layer)
    if isinstance(style, Replicate) and not style.into_sharded:
        return None
    if hasattr(layer, "become"):
        raise UsageError(f"plan: {name} is sharded already, as {layer.style}")
    _check_own_call(name, layer)
    if (match := _LAYERS.get((plain, type(style)))) is not None:
        return match
    if isinstance(style, Replicate):
        return subclass_around(ReplicatedLayer, plain)
    if isinstance(style, Sequence):
        return subclass_around(ShardwiseLayer, plain)
    raise no_layer(name, plain, style, _LAYERS)


def _check_own_call(name: str, layer: Any) -> None:
    """Raise UsageError if the call of a layer, or of a layer inside it, was replaced on the instance."""
    for one in layer._flatten_layers():
        if put := {"call", "__call__"}.intersection(vars(one)):
            where = name if one is layer else f"{name}, or {one.name} within it,"
            raise UsageError(f"plan: {where} has its {put.pop()} replaced on the instance: shard the model before that")


def check_wrapper(name: str, layers: Mapping[str, list[Any]]) -> None:
    """Raise UsageError for a layer whose wrapper bypasses its call, or uses its weights."""
    above = name.rpartition("/")[0]
    for wrapper in layers.get(above, ()):
        if isinstance(wrapper, keras.layers.TimeDistributed):
            raise UsageError(
                f"plan: {name}: {above} is TimeDistributed, which bypasses the sharded call: put the layer into a "
                "keras.Sequential within it, or leave TimeDistributed out if the layer accepts any dimensions"
            )
        if isinstance(wrapper, keras.layers.SpectralNormalization):
            raise UsageError(
                f"plan: {name}: {above} is SpectralNormalization, which would see only this rank's shard of the "
                "weight: leave it unsharded"
            )


def check_layers(layers: Iterable[tuple[str, Any, Style, Any]], division: Divisibility) -> None:
    """Raise UsageError unless all of (name, layer, style, sharded class) can be sharded together."""
    for name, layer, style, kind in layers:
        if division.is_new(name, layer, style) and kind is not None:
            check_division(name, shardings_of(kind, name, layer, style, division.axis.size), division)


def shardings_of(kind: Any, name: str, layer: Any, style: Style, size: int) -> Shardings:
    """Return the shardings of the variables of a layer that is to become a `kind` over `size` ranks.

    Attention depends on the number of ranks: it may have fewer key heads. Raises UsageError if it cannot be sharded.
    """
    more = (size,) if issubclass(kind, ColumnAttention) else ()
    return kind.shardings(layer, name, style, *more)  # type: ignore[no-any-return]
