"""Recorded runs: one forward and backward of a Keras model, value by value."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.dtypes import Array
from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel.checks.trace_run import OutputPlacements, TracedRun
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow._trial_run import preserve_model
from commlib_tensorflow.tensor._calls import ModelCall
from commlib_tensorflow.tensor._nested_tensors import tensors_in
from commlib_tensorflow.tensor._placeholders import substitute_weights, zeros_in
from commlib_tensorflow.tensor.tracing import Layers, TraceRecorder, graph_of, try_trace


def run_model(
    model: Any,
    layers: Layers,
    inputs: Any,
    styles: Collection[str],
    outputs: OutputPlacements,
    paths: Sequence[str] = (),
) -> TracedRun:
    """Run a model forward and backward in evaluation mode, in one graph that returns all its values.

    paths: names of its weights, if not their own. Weights that are all zeros get other values for the run, unless the
    unsharded model then fails or returns non-finite values.
    """
    zeros = zeros_in(model) if outputs.zeros is None else zeros_in(model) & outputs.zeros
    if outputs.zeros is not None or not zeros:
        return _run(model, layers, inputs, styles, outputs, paths, zeros)
    with suppress(Exception):
        result = _run(model, layers, inputs, styles, outputs, paths, zeros)
        if result.is_finite:
            return result
    return _run(model, layers, inputs, styles, outputs, paths, frozenset())


def _run(
    model: Any,
    layers: Layers,
    inputs: Any,
    styles: Collection[str],
    outputs: OutputPlacements,
    paths: Sequence[str],
    zeros: frozenset[str],
) -> TracedRun:
    own = [variable.path for variable in model.trainable_variables]
    recorder = TraceRecorder(model, layers, styles, keeps=False)
    variables = {
        f"{path} ({at})": variable
        for at, (path, variable) in enumerate(zip(paths or own, model.trainable_variables, strict=True))
    }
    wanted: list[str] = []
    """Names of all gradients that the graph may return."""

    def once(call: ModelCall) -> Any:
        given = [tensor for tensor in call.tensors if tensor.dtype.is_floating]
        wanted.extend((*(f"input {at}" for at in range(len(given))), *variables))
        with tf.GradientTape() as tape:
            tape.watch(given)
            result = recorder.run(call, training=False)
            if recorder.error is not None:
                raise recorder.error
            loss = _loss(tensors_in(result), outputs)
        derivatives = tape.gradient(loss, [*given, *(variable.value for variable in variables.values())])
        gradients = {
            name: tf.convert_to_tensor(each) for name, each in zip(wanted, derivatives, strict=True) if each is not None
        }
        results = [value for step in recorder.trace().steps for value in step.outputs]
        return {
            str(value): recorder.tensors[value] for value in results if _is_array(recorder.tensors[value])
        }, gradients

    call = ModelCall.of(inputs).mapped(tf.convert_to_tensor)
    with preserve_model(model, inputs), substitute_weights(model, zeros):
        values, gradients = graph_of(once, call)(*call.tensors)
    shardings = {name: getattr(layer, "sharding", None) for name, layer in layers.items()}
    trace, (seen, _) = recorder.trace(), try_trace(model, layers, call, styles)
    if seen.steps == trace.steps:
        trace = replace(trace, retained=seen.retained)
    return TracedRun(
        trace=trace,
        values=[_array(values.get(str(number))) for number in range(len(recorder.tensors))],
        gradients={name: _array(gradients[name]) if name in gradients else None for name in wanted},
        shards={name: shard for name, variable in variables.items() if (shard := shard_of(variable)) is not None},
        shardings={name: given for name, given in shardings.items() if isinstance(given, Sharding)},
        zeros=zeros,
    )


def _loss(results: Sequence[Any], outputs: OutputPlacements) -> Any:
    loss = tf.zeros((), tf.float64)
    for at, value in enumerate(results):
        if value.dtype.is_floating:
            weights = tf.constant(outputs.weights(at, tuple(value.shape)))
            loss += tf.cast(tf.reduce_sum(value * tf.cast(weights, value.dtype)), tf.float64)
    return loss


def _is_array(tensor: Any) -> bool:
    return tensor.dtype not in (tf.resource, tf.variant, tf.string)


def _array(tensor: Any) -> Array:
    array: Array = np.empty(0) if tensor is None else tensor.numpy()
    return array
