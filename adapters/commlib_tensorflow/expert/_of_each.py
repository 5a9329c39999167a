"""Settings of one expert's weights for stacks of several: what regularizes and constrains each, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from commlib.errors import UsageError


class RegularizerOfEach(keras.regularizers.Regularizer):  # type: ignore[misc]  # Keras has no types
    """The sum of what a regularizer makes of the weights of each expert of this rank, times the ranks that share them.

    Ranks take the mean of their losses, and of the gradients of experts: so it counts once for each expert.
    """

    def __init__(self, one: Any, ranks: int) -> None:
        self.one, self.ranks = one, ranks

    def __call__(self, stack: Any) -> Any:
        """Return the loss of a stack [experts of this rank, ...]."""
        return self.ranks * tf.add_n([tf.reduce_sum(self.one(weight)) for weight in _each(stack)])


class ConstraintOfEach(keras.constraints.Constraint):  # type: ignore[misc]
    """What a constraint makes of the weights of each expert of this rank, by itself."""

    def __init__(self, one: Any) -> None:
        self.one = one

    def __call__(self, stack: Any) -> Any:
        """Return a stack [experts of this rank, ...] that fulfils it."""
        return tf.stack([self.one(weight) for weight in _each(stack)])


def _each(stack: Any) -> list[Any]:
    return list(tf.unstack(keras.ops.convert_to_tensor(stack)))


def check_layer(what: str, layer: Any) -> None:
    """Raise UsageError for a layer that cannot be an expert: with weights that are not trained, or losses of outputs.

    what: the layer, for errors.
    """
    for inner in _within(layer):
        if getattr(inner, "lora_enabled", False):
            raise UsageError(
                f"{what}: {inner.name} has LoRA, whose factors are beside a kernel that is not trained, and experts "
                "keep trainable weights alone: give kernels that are merged with it, without enable_lora()"
            )
        if any(not variable.trainable for variable in inner._trainable_variables):  # they would be, but for this
            raise UsageError(
                f"{what}: {inner.name} is frozen (trainable=False), and experts are made to be trained: set "
                "trainable=True before, and freeze the mixture of experts afterwards"
            )
        if getattr(inner, "activity_regularizer", None) is not None:
            raise UsageError(
                f"{what}: {inner.name} has an activity regularizer, and an expert has other rows than a batch: take it "
                "off, or add a loss of your own behind the mixture of experts"
            )
        if (seeds := getattr(inner, "seed_generator", None)) is not None:
            raise UsageError(
                f"{what}: {inner.name} ({type(inner).__name__}) draws random numbers by {seeds.state.path}, which is "
                "not trained, and experts keep trainable weights alone: put it before or behind the mixture of experts"
            )
    if layer.non_trainable_variables:
        raise UsageError(
            f"{what}: an expert has {layer.non_trainable_variables[0].path}, which is not trained: experts keep "
            "trainable weights alone, since each sees other tokens (no dropout, no batch normalisation)"
        )


def check_call(what: str, layer: Any, width: int) -> None:
    """Raise UsageError for a layer that adds losses when it is called."""
    options = {"training": True} if takes_training(layer) else {}
    with keras.StatelessScope(collect_losses=True) as scope:
        layer(tf.zeros((1, width), layer.compute_dtype), **options)
    if scope.losses:
        raise UsageError(
            f"{what}: an expert calls add_loss(), and has other rows than a batch: add a loss of your own behind the "
            "mixture of experts"
        )


def check_rows(what: str, rows: Any, out: Any) -> None:
    """Raise UsageError unless an expert makes of rows others of that width and dtype."""
    if out.dtype != rows.dtype or out.shape[1:] != rows.shape[1:]:
        raise UsageError(
            f"{what}: of rows {rows.dtype.name}[number, {rows.shape[-1]}] an expert makes {out.dtype.name}"
            f"[number, {', '.join(map(str, out.shape[1:]))}]: it must make the same, so let its last layer give that"
        )


def check_plain(what: str, layer: Any) -> None:
    """Raise UsageError for a layer with regularizers or constraints, which built-in experts have not."""
    for variable in layer.variables:
        for kind in ("regularizer", "constraint"):
            if getattr(variable, kind, None) is not None:
                raise UsageError(
                    f"{what}: {variable.path} has a {kind}, and built-in experts (hidden=) have none: leave hidden= "
                    "out for experts like the MLP, or take it off"
                )


def takes_training(layer: Any) -> bool:
    """Return whether a layer's `call` is told whether it is trained."""
    return "training" in inspect.signature(layer.call).parameters


def _within(layer: Any) -> Iterator[Any]:
    for inner in layer._flatten_layers():
        if not isinstance(inner, keras.layers.InputLayer):
            yield inner
