"""Runs: one forward and backward of a Keras model, value by value."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.dtypes import Array
from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel.checks.runs import Outputs, Run
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow._unnoticed import unnoticed
from commlib_tensorflow.tensor._calls import Call
from commlib_tensorflow.tensor._stand_ins import standing_in, zeros_in
from commlib_tensorflow.tensor.tracing import Layers, Recorder, attempted, graph_of, tensors_in


def ran(
    model: Any, layers: Layers, inputs: Any, styles: Collection[str], outputs: Outputs, paths: Sequence[str] = ()
) -> Run:
    """Run a model forward and backward, not in training, by one graph that gives all its values.

    paths: how its weights are called, if not by their own. Weights that are zeros have other numbers for that, unless
    the whole fails with them, or gives no numbers.
    """
    zeros = zeros_in(model) if outputs.zeros is None else zeros_in(model) & outputs.zeros
    if outputs.zeros is not None or not zeros:
        return _ran(model, layers, inputs, styles, outputs, paths, zeros)
    with suppress(Exception):
        found = _ran(model, layers, inputs, styles, outputs, paths, zeros)
        if found.is_finite:
            return found
    return _ran(model, layers, inputs, styles, outputs, paths, frozenset())


def _ran(
    model: Any,
    layers: Layers,
    inputs: Any,
    styles: Collection[str],
    outputs: Outputs,
    paths: Sequence[str],
    zeros: frozenset[str],
) -> Run:
    own = [variable.path for variable in model.trainable_variables]
    recorder = Recorder(model, layers, styles, keeps=False)
    variables = {
        f"{path} ({at})": variable
        for at, (path, variable) in enumerate(zip(paths or own, model.trainable_variables, strict=True))
    }
    wanted: list[str] = []
    """Names of all gradients that the graph could give."""

    def once(call: Call) -> Any:
        given = [tensor for tensor in call.tensors if tensor.dtype.is_floating]
        wanted.extend((*(f"input {at}" for at in range(len(given))), *variables))
        with tf.GradientTape() as tape:
            tape.watch(given)
            result = recorder.run(call, training=False)
            if recorder.error is not None:
                raise recorder.error
            loss = _loss(tensors_in(result), outputs)
        found = tape.gradient(loss, [*given, *(variable.value for variable in variables.values())])
        gradients = {
            name: tf.convert_to_tensor(each) for name, each in zip(wanted, found, strict=True) if each is not None
        }
        made = [value for step in recorder.trace().steps for value in step.outputs]
        return {str(value): recorder.tensors[value] for value in made if _is_array(recorder.tensors[value])}, gradients

    call = Call.of(inputs).mapped(tf.convert_to_tensor)
    with unnoticed(model, inputs), standing_in(model, zeros):
        values, gradients = graph_of(once, call)(*call.tensors)
    shardings = {name: getattr(layer, "sharding", None) for name, layer in layers.items()}
    trace, (seen, _) = recorder.trace(), attempted(model, layers, call, styles)
    if seen.steps == trace.steps:
        trace = replace(trace, kept=seen.kept)
    return Run(
        trace=trace,
        values=[_array(values.get(str(number))) for number in range(len(recorder.tensors))],
        gradients={name: _array(gradients[name]) if name in gradients else None for name in wanted},
        shards={name: shard for name, variable in variables.items() if (shard := shard_of(variable)) is not None},
        shardings={name: given for name, given in shardings.items() if isinstance(given, Sharding)},
        zeros=zeros,
    )


def _loss(results: Sequence[Any], outputs: Outputs) -> Any:
    loss = tf.zeros((), tf.float64)
    for at, value in enumerate(results):
        if value.dtype.is_floating:
            weights = tf.constant(outputs.weights(at, tuple(value.shape)))
            loss += tf.cast(tf.reduce_sum(value * tf.cast(weights, value.dtype)), tf.float64)
    return loss


def _is_array(tensor: Any) -> bool:
    return tensor.dtype not in (tf.resource, tf.variant, tf.string)


def _array(tensor: Any) -> Array:
    found: Array = np.empty(0) if tensor is None else tensor.numpy()
    return found
