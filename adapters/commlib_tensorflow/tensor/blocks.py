"""Parallel blocks: attention and MLP of a transformer as layers that are constructed sharded."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from commlib.arguments import suggest
from commlib.comparison.agreement import LayerAgreement
from commlib.errors import UsageError
from commlib.schedule.layout import even
from commlib.sharding.axis import AxisRanks
from commlib.tensor_parallel.heads import check_attention
from commlib.tensor_parallel.styles import Column, Row
from commlib_tensorflow.tensor._file_layers import refuse_configuration
from commlib_tensorflow.tensor._sharded_layer import is_elementwise
from commlib_tensorflow.tensor.dense import ColumnDense, RowDense
from commlib_tensorflow.tensor.moves import axis_of
from commlib_tensorflow.tensor.streams import dropout


def activation_of(what: str, given: Any) -> Any:
    """Return an activation given by name, or as a function. Raises UsageError."""
    if isinstance(given, type):
        raise UsageError(
            f"{what}: activation is the class {given.__name__}, expected {given.__name__}(), or a function"
        )
    try:
        return keras.activations.get(given)
    except ValueError as error:
        known = {name for name in dir(keras.activations) if not name.startswith("_")} - {"get", "serialize"}
        raise UsageError(
            f"{what}: activation {given!r}, expected a function, or a name of keras.activations{suggest(given, known)}"
        ) from error


class _ParallelBlock(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """A block that is constructed sharded. width: of its inputs."""

    width: int

    @classmethod
    def from_config(cls, config: Any) -> Any:
        """Raise UsageError: the layer needs an axis."""
        raise refuse_configuration(cls.__name__)

    def get_config(self) -> dict[str, Any]:
        """Return the base configuration, without the axis that a clone would need."""
        config: dict[str, Any] = super(keras.layers.Layer, self).get_config()
        return config

    def _check_width(self, shape: Any) -> None:
        if shape[-1] != self.width:
            raise UsageError(f"{type(self).__name__}: its input has {shape[-1]} features, expected width={self.width}")


@keras.saving.register_keras_serializable("commlib")
class ParallelAttention(_ParallelBlock):
    """Self-attention with sharded heads: one fused layer for Q, K and V, and one for the output.

    On an axis of one rank it is the unsharded layer.

    Args:
        width: The features of inputs and outputs, (batch, sequence, width).
        heads: The number of heads of queries.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        kv_heads: The number of K and V heads, each shared by equally many heads of Q; these are sharded over the ranks.
        causal: No position sees a later one.
        bias: Whether the layer has a bias.
        dropout: The share of attention weights that is dropped in training.
        sequence: The dimension along which inputs and outputs are sharded, None for unsharded ones.
        **kwargs: Arguments of a Keras layer.

    Raises:
        UsageError: For sizes that do not fit.

    Examples:
        >>> layer = ct.ParallelAttention(8, 2, comm)  # a head on each of 2 ranks
        >>> layer(tf.ones([1, 3, 8])).shape.as_list()
        [1, 3, 8]
    """

    def __init__(
        self,
        width: int,
        heads: int,
        ranks: AxisRanks,
        *,
        kv_heads: int | None = None,
        causal: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        sequence: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        shared, units = axis_of(ranks, "ParallelAttention"), heads if kv_heads is None else kv_heads
        check_attention("ParallelAttention", width, heads, units, dropout)
        self.supports_jit = False
        self.width, self.features, self.groups = width, width // heads, heads // units
        self.causal, self.dropout = causal, dropout
        self.divided_axis = shared
        self.local = even(units, shared.size).counts[shared.rank]
        parts = (width, units * self.features, units * self.features)
        self.qkv = ColumnDense(
            sum(parts),
            shared,
            style=Column(parts=parts, units=units, sequence=sequence),
            use_bias=bias,
            dtype=self.dtype_policy,
            name="qkv",
        )
        self.output_dense = RowDense(
            width,
            shared,
            features=width,
            style=Row(units=units, sequence=sequence),
            use_bias=bias,
            dtype=self.dtype_policy,
            name="output",
        )
        self.seed_generator = keras.random.SeedGenerator()

    def build(self, input_shape: Any) -> None:
        """Create the weights. Collective."""
        self._check_width(input_shape)
        self.qkv.build(input_shape)
        self.output_dense.build(input_shape)
        options = {"causal": self.causal, "dropout": self.dropout, "groups": self.groups}
        LayerAgreement(self.divided_axis.comm, "ParallelAttention").settle("built", options)

    def call(self, inputs: Any, attention_mask: Any = None, training: Any = None) -> Any:
        """Return the output. attention_mask: bool (batch or 1, 1, sequence, sequence), True for visible keys."""
        qkv = self.qkv(inputs)
        shape = tf.shape(qkv)[:2]
        sizes = [self.local * self.groups * self.features, *[self.local * self.features] * 2]
        q, k, v = (
            tf.reshape(x, tf.concat([shape, [self.local, -1, self.features]], 0)) for x in tf.split(qkv, sizes, -1)
        )
        # b: batch, t and s: positions, h: heads of K and V, g: the heads of Q for each, d: features
        scores = tf.einsum("bthgd,bshd->bhgts", q / math.sqrt(self.features), k[:, :, :, 0])
        weights = self._softmax(scores, attention_mask)
        if training:
            weights = dropout(weights, self.dropout, self.seed_generator, self.divided_axis)
        out = tf.einsum("bhgts,bshd->bthgd", weights, v[:, :, :, 0])
        return self.output_dense(tf.reshape(out, tf.concat([shape, [sizes[0]]], 0)))

    def _softmax(self, scores: Any, mask: Any) -> Any:
        wide = tf.cast(scores, tf.float64 if scores.dtype == tf.float64 else tf.float32)
        if self.causal:
            wide = tf.where(tf.linalg.band_part(tf.ones(tf.shape(wide)[-2:], tf.bool), -1, 0), wide, wide.dtype.min)
        if mask is not None:
            wide = tf.where(tf.cast(mask, tf.bool)[:, :, tf.newaxis], wide, wide.dtype.min)
        return tf.cast(tf.nn.softmax(wide), scores.dtype)

    def compute_output_shape(self, inputs_shape: Any, attention_mask_shape: Any = None) -> Any:
        """Return the shape of unsharded outputs."""
        return inputs_shape


@keras.saving.register_keras_serializable("commlib")
class ParallelMLP(_ParallelBlock):
    """The MLP of a transformer with sharded hidden units: a column-sharded layer, then a row-sharded one.

    On an axis of one rank it is the unsharded layer.

    Args:
        width: The features of inputs and outputs, (..., width).
        hidden: The features between both layers.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        gated: activation(gate) * up, both in one fused layer.
        activation: The name of an activation, or an elementwise function.
        sequence: The dimension along which inputs and outputs are sharded, None for unsharded ones.
        bias: Whether the layer has a bias.
        **kwargs: Arguments of a Keras layer.

    Raises:
        UsageError: For an activation that depends on all hidden units.

    Examples:
        >>> layer = ct.ParallelMLP(8, 32, comm)
        >>> layer(tf.ones([1, 8])).shape.as_list()
        [1, 8]
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        ranks: AxisRanks,
        *,
        gated: bool = False,
        activation: Any = "gelu",
        sequence: int | None = None,
        bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        shared = axis_of(ranks, "ParallelMLP")
        self.supports_jit = False
        self.width, self.gated, self.activation = width, gated, activation_of("ParallelMLP", activation)
        if not is_elementwise(self.activation):
            raise UsageError(f"ParallelMLP: activation {activation!r} needs all hidden features, which are sharded")
        common = {"use_bias": bias, "dtype": self.dtype_policy}
        style = Column(parts=2 if gated else 1, sequence=sequence)
        self.up = ColumnDense(hidden * (2 if gated else 1), shared, style=style, name="up", **common)
        self.down = RowDense(width, shared, features=hidden, style=Row(sequence=sequence), name="down", **common)

    def build(self, input_shape: Any) -> None:
        """Create the weights. Collective."""
        self._check_width(input_shape)
        self.up.build(input_shape)
        self.down.build(input_shape)
        options = {"gated": self.gated, "activation": self.activation}
        LayerAgreement(self.up.axis.comm, "ParallelMLP").settle("built", options)

    def call(self, inputs: Any) -> Any:
        """Return the output."""
        x = self.up(inputs)
        if not self.gated:
            return self.down(self.activation(x))
        gate, up = tf.split(x, 2, -1)
        return self.down(self.activation(gate) * up)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the shape of unsharded outputs."""
        return input_shape
