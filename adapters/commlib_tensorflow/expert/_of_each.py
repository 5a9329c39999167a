"""Settings of one expert's weights for stacks of several: what regularizes and constrains each, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import keras
import ml_dtypes
import numpy as np
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


def check_tied(what: str, layer: Any, model: Any) -> None:
    """Raise UsageError for an MLP with a weight that another layer of its model has, too: experts have their own."""
    own, waiting, known = {id(one): one for one in layer.variables}, [model], {id(layer)}
    while waiting:
        other = waiting.pop()
        if id(other) in known:
            continue
        known.add(id(other))
        waiting += other._layers
        for variable in (*other._trainable_variables, *other._non_trainable_variables):
            if id(variable) in own:
                raise UsageError(
                    f"{what}: {variable.path} is a weight of {other.name}, too, outside of the MLP, tied: experts have "
                    "each of their own: give each layer its own before, or hidden= for built-in MLPs"
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


def check_scope(what: str, layer: Any) -> None:
    """Raise UsageError for a layer made in a `keras.RematScope`: weights of experts have no gradients there."""
    for inner in _within(layer):
        if getattr(getattr(inner, "_remat_mode", None), "mode", None) is not None:
            raise UsageError(
                f"{what}: {inner.name} was made in a keras.RematScope, in which experts' gradients would be lost: make "
                "it outside, and compute a layer around the mixture again"
            )


def check_rows(what: str, rows: Any, out: Any) -> None:
    """Raise UsageError unless an expert makes of rows others of that width and dtype."""
    if out.dtype != rows.dtype or out.shape[1:] != rows.shape[1:]:
        raise UsageError(
            f"{what}: of rows {rows.dtype.name}[number, {rows.shape[-1]}] an expert makes {out.dtype.name}"
            f"[number, {', '.join(map(str, out.shape[1:]))}]: it must make the same, so let its last layer give that"
        )


finfo: Any = ml_dtypes.finfo  # no types


def check_alike(what: str, layer: Any, made: Any, width: int) -> None:
    """Raise UsageError unless an expert makes of rows what the MLP like which it is made does, with the same weights.

    It does not where the MLP looks at other tokens, has weights for places in a sequence, or something that its
    configuration does not tell. Both are tried with numbers that are drawn, in evaluation.
    """
    shapes = [[tuple(variable.shape) for variable in one.trainable_variables] for one in (layer, made)]
    hint = "give hidden= for built-in MLPs, or an MLP that computes each token by itself, as its configuration says"
    for variable, old, new in zip(layer.trainable_variables, *shapes, strict=False):
        if old != new:
            raise UsageError(
                f"{what}: {variable.path} has shape {list(old)}, and in an expert, which is given rows [number, "
                f"{width}], {list(new)}: {hint}"
            )
    draw = np.random.default_rng(0)
    shape = _shape_within(layer, width)
    x = draw.standard_normal(shape)
    weights = [draw.standard_normal(one) / 2 for one in shapes[0]]
    rows = x.reshape(-1, width)
    expected = _outputs(layer, weights, x).reshape(-1, width)
    got = np.empty_like(expected)
    for some in (slice(0, None, 2), slice(1, None, 2)):
        got[some] = _outputs(made, weights, rows[some])
    precision = max(float(np.sqrt(finfo(layer.compute_dtype).eps)), 1e-8)
    finite = np.isfinite(expected)
    largest = float(np.abs(expected[finite]).max(initial=0.0))
    if not np.allclose(got, expected, rtol=precision, atol=precision * largest, equal_nan=True):
        raise UsageError(
            f"{what}: of drawn tokens {shape} an expert with the weights of the MLP makes something else, by "
            f"{float(np.abs(got - expected)[finite].max(initial=0.0)):.3g} of {largest:.3g}: the MLP looks at other "
            f"tokens, or has what its configuration does not tell: {hint}"
        )


def _outputs(layer: Any, weights: list[Any], x: Any) -> Any:
    options = {"training": False} if takes_training(layer) else {}
    values = [tf.cast(value, one.dtype) for value, one in zip(weights, layer.trainable_variables, strict=True)]
    out, _ = layer.stateless_call(values, [], tf.cast(x, layer.compute_dtype), **options)
    return tf.cast(out, tf.float64).numpy()


def _shape_within(layer: Any, width: int) -> list[int]:
    """Return a shape of few tokens with which a layer can be called in its model: its own, where that is fixed."""
    nodes, built = layer._inbound_nodes, next(iter((layer._build_shapes_dict or {}).values()), None)
    given = nodes[0].input_tensors[0].shape if nodes else built
    if not isinstance(given, list | tuple) or len(given) < 2 or given[-1] not in (None, width):
        given = (None, None, width)
    return [2, *(3 if size is None else int(size) for size in given[1:-1]), width]


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
