"""Per-expert settings on stacked weights: regularizers, constraints, and checks for unsupported layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from commlib.errors import UsageError


class ExpertRegularizer(keras.regularizers.Regularizer):  # type: ignore[misc]  # Keras has no types
    """Sum of a regularizer over this rank's experts, times the number of ranks that share the experts.

    Ranks average their losses, and the gradients of experts: so it counts once for each expert.
    """

    def __init__(self, one: Any, ranks: int) -> None:
        self.one, self.ranks = one, ranks

    def __call__(self, stack: Any) -> Any:
        """Return the loss of a stack [experts of this rank, ...]."""
        return self.ranks * tf.add_n([tf.reduce_sum(self.one(weight)) for weight in _unstack(stack)])


class ExpertConstraint(keras.constraints.Constraint):  # type: ignore[misc]
    """Constraint applied to the weights of each expert of this rank separately."""

    def __init__(self, one: Any) -> None:
        self.one = one

    def __call__(self, stack: Any) -> Any:
        """Return the constrained stack [experts of this rank, ...]."""
        return tf.stack([self.one(weight) for weight in _unstack(stack)])


def _unstack(stack: Any) -> list[Any]:
    return list(tf.unstack(keras.ops.convert_to_tensor(stack)))


def check_layer(what: str, layer: Any) -> None:
    """Raise UsageError for a layer that cannot be an expert: with untrained weights, or losses on outputs.

    what: the layer, for errors.
    """
    for inner in _inner_layers(layer):
        if getattr(inner, "lora_enabled", False):
            raise UsageError(
                f"{what}: {inner.name} has LoRA, which adds factors to a frozen kernel, but experts support only "
                "trainable weights: use merged kernels, without enable_lora()"
            )
        if any(not variable.trainable for variable in inner._trainable_variables):  # experts would train them
            raise UsageError(
                f"{what}: {inner.name} is frozen (trainable=False), but experts are always created trainable: set "
                "trainable=True first, and freeze the mixture of experts afterwards"
            )
        if getattr(inner, "activity_regularizer", None) is not None:
            raise UsageError(
                f"{what}: {inner.name} has an activity regularizer, but an expert does not see the rows of a batch: "
                "remove it, or add a loss after the mixture of experts"
            )
        if (seeds := getattr(inner, "seed_generator", None)) is not None:
            raise UsageError(
                f"{what}: {inner.name} ({type(inner).__name__}) draws random numbers from {seeds.state.path}, which is "
                "not trained, but experts support only trainable weights: put it before or after the mixture of experts"
            )
    if layer.non_trainable_variables:
        raise UsageError(
            f"{what}: an expert has {layer.non_trainable_variables[0].path}, which is not trained: experts support "
            "only trainable weights, since each sees other tokens (no dropout, no batch normalisation)"
        )


def check_tied(what: str, layer: Any, model: Any) -> None:
    """Raise UsageError for an MLP that shares a weight with another layer: experts have separate weights."""
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
                    f"{what}: {variable.path} is tied: it is also a weight of {other.name}, outside of the MLP, but "
                    "each expert has its own weights: give each layer its own first, or use hidden= for built-in MLPs"
                )


def check_call(what: str, layer: Any, width: int) -> None:
    """Raise UsageError for a layer that adds losses when it is called."""
    options = {"training": True} if takes_training(layer) else {}
    with keras.StatelessScope(collect_losses=True) as scope:
        layer(tf.zeros((1, width), layer.compute_dtype), **options)
    if scope.losses:
        raise UsageError(
            f"{what}: an expert calls add_loss(), but does not see the rows of a batch: add a loss after the mixture "
            "of experts"
        )


def check_scope(what: str, layer: Any) -> None:
    """Raise UsageError for a layer made in a `keras.RematScope`: weights of experts have no gradients in it."""
    for inner in _inner_layers(layer):
        if getattr(getattr(inner, "_remat_mode", None), "mode", None) is not None:
            raise UsageError(
                f"{what}: {inner.name} was made in a keras.RematScope, in which experts' gradients would be lost: make "
                "it outside, and recompute a layer around the mixture instead"
            )


def check_rows(what: str, rows: Any, out: Any) -> None:
    """Raise UsageError unless an expert returns rows of the same width and dtype as its input."""
    if out.dtype != rows.dtype or out.shape[1:] != rows.shape[1:]:
        raise UsageError(
            f"{what}: for rows {rows.dtype.name}[number, {rows.shape[-1]}] an expert returns {out.dtype.name}"
            f"[number, {', '.join(map(str, out.shape[1:]))}]: input and output must match, so change its last layer"
        )


finfo: Any = ml_dtypes.finfo  # no types


def check_same_outputs(what: str, layer: Any, rebuilt: Any, width: int) -> None:
    """Raise UsageError unless an expert computes the same for rows as the original MLP, with the same weights.

    It does not if the MLP mixes tokens, has weights for positions in a sequence, or has state that its configuration
    lacks. Both are tried with random numbers, in evaluation mode.
    """
    shapes = [[tuple(variable.shape) for variable in one.trainable_variables] for one in (layer, rebuilt)]
    hint = "give hidden= for built-in MLPs, or an MLP that treats each token separately, as configured"
    for variable, old, new in zip(layer.trainable_variables, *shapes, strict=False):
        if old != new:
            raise UsageError(
                f"{what}: {variable.path} has shape {list(old)}, but in an expert, which gets rows [number, "
                f"{width}], {list(new)}: {hint}"
            )
    draw = np.random.default_rng(0)
    shape = _shape_within(layer, width)
    x = draw.standard_normal(shape)
    weights = [draw.standard_normal(one) / 2 for one in shapes[0]]
    rows = x.reshape(-1, width)
    expected = _outputs(layer, weights, x).reshape(-1, width)
    output = np.empty_like(expected)
    for some in (slice(0, None, 2), slice(1, None, 2)):
        output[some] = _outputs(rebuilt, weights, rows[some])
    precision = max(float(np.sqrt(finfo(layer.compute_dtype).eps)), 1e-8)
    finite = np.isfinite(expected)
    largest = float(np.abs(expected[finite]).max(initial=0.0))
    if not np.allclose(output, expected, rtol=precision, atol=precision * largest, equal_nan=True):
        raise UsageError(
            f"{what}: for random tokens {shape} an expert with the weights of the MLP gives other results, by up to "
            f"{float(np.abs(output - expected)[finite].max(initial=0.0)):.3g} of {largest:.3g}: the MLP mixes tokens, "
            f"or has state that its configuration lacks: {hint}"
        )


def _outputs(layer: Any, weights: list[Any], x: Any) -> Any:
    options = {"training": False} if takes_training(layer) else {}
    values = [tf.cast(value, one.dtype) for value, one in zip(weights, layer.trainable_variables, strict=True)]
    out, _ = layer.stateless_call(values, [], tf.cast(x, layer.compute_dtype), **options)
    return tf.cast(out, tf.float64).numpy()


def _shape_within(layer: Any, width: int) -> list[int]:
    """Return a small input shape for a layer, from its use in the model, or from its built shape."""
    nodes, built = layer._inbound_nodes, next(iter((layer._build_shapes_dict or {}).values()), None)
    given = nodes[0].input_tensors[0].shape if nodes else built
    if not isinstance(given, list | tuple) or len(given) < 2 or given[-1] not in (None, width):
        given = (None, None, width)
    return [2, *(3 if size is None else int(size) for size in given[1:-1]), width]


def check_plain(what: str, layer: Any) -> None:
    """Raise UsageError for a layer with regularizers or constraints, which built-in experts do not support."""
    for variable in layer.variables:
        for kind in ("regularizer", "constraint"):
            if getattr(variable, kind, None) is not None:
                raise UsageError(
                    f"{what}: {variable.path} has a {kind}, which built-in experts (hidden=) do not support: leave "
                    "hidden= out for experts like the MLP, or remove it"
                )


def takes_training(layer: Any) -> bool:
    """Return whether a layer's `call` has a `training` argument."""
    return "training" in inspect.signature(layer.call).parameters


def _inner_layers(layer: Any) -> Iterator[Any]:
    for inner in layer._flatten_layers():
        if not isinstance(inner, keras.layers.InputLayer):
            yield inner
