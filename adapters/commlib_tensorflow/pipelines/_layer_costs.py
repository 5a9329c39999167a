"""Layer costs: time each unit of a Keras model on one microbatch, and count its stored and returned bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from commlib.pipeline.schedule.auto import LayerCosts
from commlib_tensorflow.pipelines._parts import SplitModel, StageLayer
from commlib_tensorflow.pipelines._stage_functions import Named, StageFunctions

_TIMES = 4  # runs of each function; the fastest counts, and the first one, which compiles it, never does


def layer_costs(cut: SplitModel, inputs: Sequence[tf.Tensor]) -> LayerCosts:
    """Return the cost of each part of a model for a microbatch of these inputs. It changes no variable."""
    values: Named = dict(zip(cut.inputs, inputs, strict=True))
    call = _seconds(tf.function(lambda: tf.zeros(())))  # the overhead of any TensorFlow call
    rows = [_measure(number, part, cut, values, call) for number, part in enumerate(cut.parts)]
    forward, of_inputs, weights, memory, outputs = zip(*rows, strict=True)
    # A tape computes the gradients of inputs and weights in one pass: split, each recomputes the forward.
    return LayerCosts(forward, of_inputs, weights, memory, outputs, again=True)


def _measure(
    number: int, part: StageLayer, cut: SplitModel, values: Named, call: float
) -> tuple[float, float, float, int, int]:
    """Return the seconds of F, I and W, and the bytes of activations and of results; add the results to `values`."""
    wanted = [name for link, names in cut.values.items() if link.target == number for name in names]
    input_names = [*wanted, *(cut.inputs if number == 0 else ())]
    given = {name: values[name] for name in input_names}
    functions = StageFunctions(
        number, part, wanted=wanted, outputs=(), loss=None, regularized=(), shared=(), again=False
    )
    weights, state = ([tf.convert_to_tensor(v.value) for v in own] for own in (functions.trainable, functions.state))
    arguments: tuple[Any, ...] = (weights, state, given)
    forward = _seconds(lambda: functions.forward(*arguments, None, None, training=True, has_loss=False))
    outputs = functions.forward(*arguments, None, None, training=True, has_loss=False)
    results: Named = outputs[0]
    values |= results
    gradients = {name: tf.ones_like(result) for name, result in results.items() if result.dtype.is_floating}
    shares = tf.ones((), tf.float64), tf.ones(0 if outputs[2] is None else len(outputs[2]), tf.float64)

    def backward(*, inputs: bool) -> Callable[[], Any]:
        return lambda: functions.backward(
            *arguments, gradients, None, None, shares, [], has_loss=False, wants_weights=True, wants_inputs=inputs
        )

    alone = max(0.0, _seconds(backward(inputs=False)) - forward) if weights else 0.0
    whole = max(0.0, _seconds(backward(inputs=True)) - forward) if wanted else alone
    memory = _saved_bytes(functions, *arguments)
    return max(0.0, forward - call), max(0.0, whole - alone), min(whole, alone), memory, _nbytes(results.values())


def _seconds(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def _saved_bytes(functions: StageFunctions, weights: Sequence[tf.Tensor], state: Any, given: Named) -> int:
    """Return the bytes of the forward's values that a backward reads, except weights and constants."""
    sizes: list[int] = []

    def both(weights: Sequence[tf.Tensor], state: Any, given: Named) -> tf.Tensor:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            sources = [*weights, *(tensor for tensor in given.values() if tensor.dtype.is_floating)]
            tape.watch(sources)
            results, _, _ = functions.call(weights, state, given, training=True)
        graph = tf.compat.v1.get_default_graph()
        forward = set(graph.get_operations())
        tape.gradient([result for result in results.values() if result.dtype.is_floating], sources)
        read = {tensor.ref() for one in graph.get_operations() if one not in forward for tensor in one.inputs}
        others = {tensor.ref() for tensor in weights}
        tensors = [ref.deref() for ref in read - others if ref.deref().op in forward]
        sizes.append(sum(_static_bytes(tensor) for tensor in tensors if tensor.op.type != "Const"))
        return tf.zeros(())

    tf.function(both, autograph=False)(weights, state, given)
    return sizes[-1]


def _static_bytes(tensor: tf.Tensor) -> int:
    elements: int = tensor.shape.num_elements() or 0
    width: int = max(0, tensor.dtype.size)
    return elements * width


def _nbytes(tensors: Any) -> int:
    return sum(int(tf.size(tensor)) * tensor.dtype.size for tensor in tensors)
