"""verify: compare a model with experts over ranks with a dense one, in which each rank has all experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.expert.verify import DenseRun, compare_dense, mask_of
from commlib.tensor_parallel.checks.trace_run import WHOLE
from commlib.tensor_parallel.recording import replace_attribute
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow._trial_run import preserve_model
from commlib_tensorflow.expert._padding import padding_mask, zero_padding
from commlib_tensorflow.expert.moe import MoE

Wholes = dict[str, list[Any]]
"""The weights of all experts of each mixture, by its name, in the order of `stacks`."""


def verify(model: Any, batch: Any, *, tolerance: float | None = None, gradients: bool = True) -> None:
    """Compare one forward and backward of a model's mixtures of experts with dense ones, without exchange.

    model: a `MoE`, or a model with some, built. batch: the arguments of its call: this rank's own. The reference has
    the weights of all experts, gathered on each rank: it computes each token's experts by the same routing, and
    recomputes their gates from the logits. Compared are, in this order, the outputs of mixtures and of the model, the
    gradients of inputs, of other weights, including routers, and of experts, for a loss that is a fixed weighted sum of
    the outputs; without `gradients` only that of the first router. Both run in evaluation mode. tolerance: relative to
    the largest element; by default 1e-4, the precision of routers, or that of the dtype.

    Collective. Raises UsageError on all ranks, with the first difference, its size and its ranks. All state is
    restored: variables, statistics, losses, random states, and attributes of the model.
    """
    layers = {layer.path or layer.name: layer for layer in model._flatten_layers() if isinstance(layer, MoE)}
    if not layers:
        raise UsageError("verify: the model has no mixture of experts")
    first = next(iter(layers.values()))
    wholes = {name: [_gather(stack) for stack in layer.stacks] for name, layer in layers.items()}
    wanted = None if gradients else first.router
    own, dense = _run_model(model, layers, batch, {}, wanted), _run_model(model, layers, batch, wholes, wanted)
    shards = {
        _stack_name(name, place, stack): (shard, layer.ranks)
        for name, layer in layers.items()
        for place, stack in enumerate(layer.stacks)
        if (shard := shard_of(stack)) is not None
    }
    compare_dense(first.ranks, own, dense, shards, tolerance)


def _gather(stack: Any) -> Any:
    shard = shard_of(stack)
    assert shard is not None
    return tf.constant(shard.whole(stack.numpy()))


def _stack_name(name: str, place: int, stack: Any) -> str:
    return f"{name}, {stack.name}" if stack.name else f"{name}, stack {place}"


def _run_model(model: Any, layers: Mapping[str, MoE], batch: Any, wholes: Wholes, only: Any) -> DenseRun:
    """Run a model, with dense mixtures if `wholes` is given. only: the single variable whose gradient is needed."""
    dense, plain = DenseRun(), vars(MoE)["call"]
    names = {id(layer): name for name, layer in layers.items()}
    mixed: list[Any] = []  # input and output of the mixture whose router's gradient alone is needed

    def call(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        name = names[id(layer)]
        out = (
            _dense_outputs(layer, wholes[name], inputs, mask)
            if wholes
            else plain(layer, inputs, training=training, mask=mask)
        )
        dense.values.append((f"the output of {name}", _array(out)))
        if only is layer.router and not mixed:
            mixed.extend((inputs, out))
        return out

    given = keras.tree.map_structure(tf.convert_to_tensor, batch)
    floats = {f"input {at}": one for at, one in enumerate(keras.tree.flatten(given)) if one.dtype.is_floating}
    stacks = {
        _stack_name(name, place, stack): wholes[name][place] if wholes else stack.value
        for name, layer in layers.items()
        for place, stack in enumerate(layer.stacks)
    }
    own = {id(stack) for layer in layers.values() for stack in layer.stacks}
    others = {
        f"{variable.path} ({at})": variable.value
        for at, variable in enumerate(model.trainable_variables)
        if id(variable) not in own and (only is None or variable is only)
    }
    if only is not None:
        floats, stacks = {}, {}
    wanted = {**floats, **others, **stacks}
    with preserve_model(model, batch), replace_attribute(MoE, "call", call), tf.GradientTape() as tape:
        tape.watch([*floats.values(), *(whole for each in wholes.values() for whole in each)])
        with keras.StatelessScope():
            outputs = keras.tree.flatten(model(given, training=False))
        loss = tf.zeros((), tf.float64)
        for at, value in enumerate(outputs):
            dense.values.append((f"output {at}", _array(value)))
            if value.dtype.is_floating:
                weights = tf.cast(WHOLE.weights(at, tuple(value.shape)), value.dtype)
                loss += tf.cast(tf.reduce_sum(value * weights), tf.float64)
    gradients = tape.gradient(loss, [*wanted.values(), *mixed[1:]])
    if mixed and (gradient := gradients.pop()) is not None:
        dense.scale_by(*map(_array, (*mixed, gradient)))
    for (name, one), gradient in zip(wanted.items(), gradients, strict=True):
        values = np.zeros(one.shape, one.dtype.as_numpy_dtype) if gradient is None else _array(gradient)
        (dense.experts if name in stacks else dense.gradients)[name] = values
    return dense


def _array(tensor: Any) -> Array:
    array: Array = tf.convert_to_tensor(tensor).numpy()
    return array


def _dense_outputs(layer: Any, whole: Sequence[Any], inputs: Any, mask: Any) -> Any:
    """Return the outputs of a mixture with all experts on this rank, by the same routing, with recomputed gates."""
    options, bias = layer.options, layer.expert_bias
    keep = padding_mask(layer.name, inputs, mask)
    tokens = tf.reshape(zero_padding(inputs, keep), (-1, layer.width))
    logits = layer.logits(tokens, training=False)
    routing = layer.mixture.route(
        logits.numpy(),
        training=False,
        bias=None if bias is None else bias.numpy(),
        mask=None if keep is None else tf.reshape(keep, (-1,)).numpy(),
        sequence=max(int(inputs.shape[-2]), 1) if len(inputs.shape) > 2 else 0,
    )
    has = mask_of(routing, len(tokens))
    scores = tf.cast(logits, tf.float64)
    scores = tf.sigmoid(scores) if options.scores == "sigmoid" else tf.nn.softmax(scores)
    gates = tf.where(has, scores, 0.0)
    if options.normalises:
        gates = gates / tf.where(has.any(-1, keepdims=True), tf.reduce_sum(gates, -1, keepdims=True), 1.0)
    gates = gates * options.scale
    y = tf.zeros_like(tokens)
    for expert in range(options.count):
        rows = np.flatnonzero(has[:, expert])[:, None]
        out = layer.one_expert([stack[expert] for stack in whole], tf.gather_nd(tokens, rows))
        gate = tf.gather_nd(gates[:, expert], rows)[:, None]
        y = tf.tensor_scatter_nd_add(y, rows, tf.cast(out * tf.cast(gate, out.dtype), y.dtype))
    y = tf.reshape(y, tf.shape(inputs))
    if layer.shared is not None:
        y = y + zero_padding(tf.reshape(layer.shared(tokens), tf.shape(inputs)), keep)
    return y
