"""Leaf layers: the Keras layers that a trace records as one step, without their inner operations."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel import equations
from commlib.tensor_parallel.einsum import Einsum
from commlib.tensor_parallel.equations import Equation
from commlib.tensor_parallel.styles import Style
from commlib_tensorflow._shards import whole_shape
from commlib_tensorflow.tensor._operations import shape_of

_CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.Conv3D)
_MIXING = (
    layers.DepthwiseConv1D, layers.DepthwiseConv2D, layers.SeparableConv1D, layers.SeparableConv2D,
    layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose,
)  # fmt: skip
_RECURRENT = (layers.LSTM, layers.GRU, layers.SimpleRNN)
"""Recurrent layers: they also need all features, and no style shards them."""
_ATTENTION = (layers.MultiHeadAttention, layers.GroupQueryAttention)
_NORMS = (layers.LayerNormalization, layers.RMSNormalization)
_OTHER_NORMS = (layers.BatchNormalization, layers.GroupNormalization, layers.SpectralNormalization)
_DROPOUT = (
    layers.Dropout, layers.SpatialDropout1D, layers.SpatialDropout2D, layers.SpatialDropout3D, layers.GaussianDropout,
    layers.AlphaDropout, layers.GaussianNoise,
)  # fmt: skip
_KNOWN = (
    layers.Dense, layers.EinsumDense, layers.Embedding, layers.PReLU, *_RECURRENT, *_CONVOLUTIONS, *_MIXING,
    *_ATTENTION, *_NORMS, *_OTHER_NORMS, *_DROPOUT,
)  # fmt: skip


def is_leaf(layer: Any) -> bool:
    """Return whether a layer is a leaf: a known layer, or one that is already sharded."""
    divided = isinstance(getattr(layer, "style", None), Style) or isinstance(getattr(layer, "axis", None), ParallelAxis)
    return divided or isinstance(layer, _KNOWN)


def describe_leaf(layer: Any, x: Any) -> dict[str, Any]:
    """Return the fields of a leaf's step, for its first input: its kind and the matching details."""
    shape = shape_of(x)
    every = tuple(range(len(shape)))
    match layer:
        case layers.Dense():
            return {"kind": "product", "size": _kernel_shape(layer)}
        case layers.EinsumDense():
            return _einsum(layer)
        case keras.layers.Conv1D() | keras.layers.Conv2D() | keras.layers.Conv3D():
            dim = -1 if layer.data_format == "channels_last" else 1
            return {"kind": "product", "dims": (dim, dim), "size": _kernel_shape(layer)[-2:]}
        case layers.ReversibleEmbedding() if x.dtype.is_floating:  # in reverse
            return {"kind": "product", "size": (layer.output_dim, layer.input_dim)}
        case layers.Embedding():
            return {"kind": "table", "size": (layer.input_dim, layer.output_dim)}
        case layers.GroupQueryAttention():
            return {"kind": "attention", "size": (layer.num_query_heads, layer.num_key_value_heads)}
        case layers.MultiHeadAttention():
            return {"kind": "attention", "size": (layer.num_heads, layer.num_heads)}
        case layers.LayerNormalization() | layers.RMSNormalization():
            dims = (layer.axis,) if isinstance(layer.axis, int) else layer.axis
            return _equation(equations.dimwise(shape, tuple(dims)), layer)
        case layers.PReLU():
            return _feature_fields(equations.pointwise(shape), len(shape) - 1)
        case layers.BatchNormalization():
            dim = layer.axis % len(shape)
            return _feature_fields(equations.dimwise(shape, set(every) - {dim}), dim)
        case layers.GroupNormalization():
            dim = layer.axis % len(shape)
            groups = {"size": (getattr(layer, "whole_groups", layer.groups), shape[dim])}
            return _feature_fields(equations.dimwise(shape, set(every) - {0, dim}), dim) | groups
    if isinstance(layer, _MIXING):
        dim = -1 if layer.data_format == "channels_last" else 1
        return {"kind": "product", "dims": (dim, dim)}
    if isinstance(layer, _RECURRENT):
        return {"kind": "product"}
    if isinstance(layer, _OTHER_NORMS):
        return _equation(equations.dimwise(shape, every), layer)
    if isinstance(layer, _DROPOUT):
        draws = getattr(layer, "rate", getattr(layer, "stddev", 0)) > 0
        return _equation(equations.pointwise(shape), layer) | {"draws": draws}
    return {"kind": "unknown"}


def _einsum(layer: Any) -> dict[str, Any]:
    """Return the fields of an EinsumDense: its first kernel dimension that is summed, and the first that is not."""
    einsum = Einsum.of(layer.name, layer.equation)
    if not (einsum.rows and einsum.columns):
        return {"kind": "unknown"}
    row, column, whole = einsum.rows[0], einsum.columns[0], _kernel_shape(layer)
    return {"kind": "product", "dims": (row.outside, column.outside), "size": (whole[row.kernel], whole[column.kernel])}


def _kernel_shape(layer: Any) -> tuple[int, ...]:
    """Return the unsharded shape of a layer's kernel, without computing LoRA."""
    return tuple(layer.kernel.shape) if layer.quantization_mode else whole_shape(layer._kernel)


def _equation(equation: Equation, layer: Any) -> dict[str, Any]:
    return {"kind": "equation", "equation": equation, "weights": bool(layer.trainable_variables)}


def _feature_fields(equation: Equation, dim: int) -> dict[str, Any]:
    """Return the fields of a layer with state per feature, frozen or not: weights, moments, or groups."""
    return {"kind": "equation", "equation": equation, "weights": True, "dims": (dim, dim)}
