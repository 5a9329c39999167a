"""MLP: the built-in expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import Sharding
from commlib_tensorflow.tensor.blocks import activation_of
from commlib_tensorflow.tensor.moves import copy, reduce


class MLP(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """A dense layer to `hidden` features, an activation, and a dense layer back. inputs: (..., width).

    gated: the activation of one half of 2 * hidden features times the other half. Kernels have PyTorch's layout,
    [outputs, inputs].
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        gated: bool = False,
        activation: Any = "gelu",
        use_bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.width, self.hidden, self.gated, self.use_bias = width, hidden, gated, use_bias
        self.activation = activation_of("MLP", activation)

    def build(self, input_shape: Any) -> None:
        """Create the weights."""
        inside = (1 + self.gated) * self.hidden
        self.up_weight = self._weight("up_weight", inside, self.width)
        self.up_bias = self._bias("up_bias", inside)
        self.down_weight = self._weight("down_weight", self.width, self.hidden)
        self.down_bias = self._bias("down_bias", self.width)

    def _weight(self, name: str, outputs: int, inputs: int) -> Any:
        return self.add_weight(shape=(outputs, inputs), initializer="glorot_uniform", name=name)

    def _bias(self, name: str, outputs: int) -> Any:
        return self.add_weight(shape=(outputs,), initializer="zeros", name=name) if self.use_bias else None

    def call(self, inputs: Any) -> Any:
        """Return the output."""
        inside = self._inside(_linear(inputs, self.up_weight, self.up_bias))
        return _linear(inside, self.down_weight, self.down_bias)

    def divided(self) -> dict[str, Sharding]:
        """Return the sharding of its weights over tensor-parallel ranks: columns, then rows."""
        inside = (1 + self.gated) * self.hidden
        halves = (self.hidden, self.hidden) if self.gated else ()
        return {
            "up_weight": Sharding((inside, self.width), 0, halves),
            "up_bias": Sharding((inside,), 0, halves),
            "down_weight": Sharding((self.width, self.hidden), 1),
        }

    def grouped(self, stacks: Sequence[Any], rows: Any, counts: Any, local: int, tensor: ParallelAxis | None) -> Any:
        """Return the outputs of several experts: the first counts[0] rows belong to the first.

        stacks: their weights, in the order of this layer's own. tensor: the ranks over which each is sharded, or None.
        """
        names = [variable.name for variable in self.trainable_variables]
        weights = {name: keras.ops.convert_to_tensor(stack) for name, stack in zip(names, stacks, strict=True)}
        up, down = (tf.unstack(weights[name], num=local) for name in ("up_weight", "down_weight"))
        up_bias = tf.unstack(weights["up_bias"], num=local) if self.use_bias else [None] * local
        if tensor is not None:
            rows = copy(rows, tensor)
        parts = tf.split(rows, counts, num=local)
        each = [
            tf.matmul(self._inside(_product(part, up[e], up_bias[e])), down[e], transpose_b=True)
            for e, part in enumerate(parts)
        ]
        out = tf.concat(each, 0)
        if tensor is not None:
            out = reduce(out, tensor)
        return out + tf.repeat(weights["down_bias"], counts, axis=0) if self.use_bias else out

    def _inside(self, x: Any) -> Any:
        if not self.gated:
            return self.activation(x)
        gate, up = tf.split(x, 2, -1)
        return self.activation(gate) * up

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {
            **super().get_config(),
            "width": self.width,
            "hidden": self.hidden,
            "gated": self.gated,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
        }


def _linear(x: Any, weight: Any, bias: Any) -> Any:
    return _product(x, keras.ops.convert_to_tensor(weight), None if bias is None else keras.ops.convert_to_tensor(bias))


def _product(x: Any, weight: Any, bias: Any) -> Any:
    x = tf.matmul(x, weight, transpose_b=True)
    return x if bias is None else x + bias
