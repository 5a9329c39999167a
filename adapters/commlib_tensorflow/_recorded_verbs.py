"""Ordered verbs with gradients: see `commlib.tensor_verbs.gradients` for the backward of each.

Eagerly a verb has a gradient if a tape or a forward accumulator watches its tensor; the accumulator runs the backward
and the backward of that at once, so forward mode sends three times the data. In a graph every verb on floating-point
numbers has one, as gradients may be requested later. A tape runs the backwards of a graph or a thread in the reverse
order of the calls: the same order on all ranks, see `_BackwardOrder`. In a traced function they are nodes, in the order
in which they were made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.dtypes import name_of
from commlib.errors import UsageError
from commlib.tensor_verbs import (
    NOTHING,
    OBJECT,
    RECEIVED,
    SAME,
    WITH_GRADIENT,
    Bridge,
    OrderedVerbs,
    ResultOrZeros,
    ReturningVerbs,
    TensorCall,
    VerbGradients,
)
from commlib_tensorflow._bridge import as_tensor, dtype_name, to_array, to_tensor
from commlib_tensorflow._device_calls import allocate_like, call_on_device
from commlib_tensorflow._host_calls import Spec, is_ordered, is_recorded, is_recording, refuse_vectorized
from commlib_tensorflow.devices import array_over, device_of, finish_reads, tensor_over


def _read(value: Any) -> Any:
    tensor = as_tensor(value)
    device = device_of(tensor)
    return to_array(tensor) if device is None else array_over(tensor, device)


def _new(array: Any) -> tf.Tensor:
    return to_tensor(array) if type(array) is np.ndarray else tensor_over(array)


_BRIDGE: Bridge[Any] = Bridge(tf.Tensor, _read, _new, allocate_like, settle=finish_reads)
ordered = OrderedVerbs(_BRIDGE)
returning = ReturningVerbs(_BRIDGE)


def run(call: TensorCall[Any], label: str = "") -> Any:
    """Call a verb and wait; in a traced function, make a node that does so. label: see `Communicator.labelled`."""
    if not tf.executing_eagerly():
        return _trace(call, label)
    if call.operands and is_recording() and is_recorded(operand := call.convert(call.operands[:1], as_tensor)[0]):
        GRADIENTS.check(call)
        others = call.inputs[1:]

        def forward(x: Any) -> Any:
            call.inputs = (x, *others)
            results = call.run(label or WITH_GRADIENT)
            call.inputs = ()  # the backward needs no input
            return results

        return _with_gradient(call, forward, operand, label)
    return call.run(label)


def check_async(call: TensorCall[Any]) -> None:
    """Raise UsageError if a call to be started would lose a gradient."""
    if call.operands and is_recording() and is_recorded(call.convert(call.operands[:1], as_tensor)[0]):
        raise GRADIENTS.refuse_async(call)


GRADIENTS: VerbGradients[Any] = VerbGradients(
    _BRIDGE, returning.send_recv, run, "pass tf.stop_gradient(tensor), or call it within tape.stop_recording()"
)


class _TensorForm:
    """See `InputForm`. Its shape is a tensor if it is unknown in tracing."""

    def __init__(self, tensor: Any) -> None:
        self.static, self._dtype = tensor.shape, tensor.dtype
        self.shape: Any = tuple(tensor.shape) if tensor.shape.is_fully_defined() else tf.shape(tensor, tf.int64)

    @property
    def length(self) -> int | None:
        return self.static[0] if self.static.rank else None

    def zeros(self) -> Any:
        return self.like(tf.zeros(self.shape, self._dtype))

    def rows(self) -> Any:
        return tf.reshape(tf.cast(self.shape[0], tf.int64), [1])

    def like(self, gradient: Any) -> Any:
        """Return a gradient in the input's shape."""
        if gradient.shape.is_fully_defined() and gradient.shape == self.static:
            return gradient
        gradient = tf.reshape(gradient, self.shape)
        gradient.set_shape(self.static)
        return gradient


class _BackwardOrder:
    """Order of backwards: tokens through which a tape reaches recorded verbs in the reverse order of their calls.

    Every recorded verb returns a token too, and takes that of the verb before it. A tape runs the backward of an
    operation once it has run those of all users of its results, so a later verb's backward runs first.
    """

    def __init__(self) -> None:
        self._eager = threading.local()

    def last(self) -> list[Any]:
        """Return the token of the last verb in this graph or thread, unless there is none that a tape watches."""
        token = getattr(self._owner(), "commlib_token", None)
        return [] if token is None or not is_recorded(token) else [token]

    def append(self, token: Any) -> None:
        """Make a token the last one."""
        self._owner().commlib_token = token

    def _owner(self) -> Any:
        return self._eager if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


_ORDER = _BackwardOrder()


def _with_gradient(call: TensorCall[Any], forward: Callable[[Any], Any], x: Any, label: str) -> Any:
    """Return `forward(x)`, the results of a call, with its gradient."""
    # A rank may trace a function more often than another.
    owner = call.comm if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def differentiable(x: Any, *before: Any) -> tuple[Any, Callable[..., Any]]:
        form, results = _TensorForm(x), forward(x)
        received = results[1] if call.result is RECEIVED else None
        recorded = GRADIENTS.record(call, label, received, owner=owner)

        def backward(gradient: Any, *_: Any) -> Any:
            GRADIENTS.check(call)
            given = form.like(GRADIENTS.gradient(recorded, form, tf.convert_to_tensor(gradient)))
            return given, *(None for _ in before)

        token = tf.zeros((), tf.float32)
        return (*results, token) if call.result is RECEIVED else (results, token), backward

    *results, token = tf.custom_gradient(differentiable)(x, *_ORDER.last())
    _ORDER.append(token)
    if not label:
        GRADIENTS.continue_forward(owner)
    return tuple(results) if call.result is RECEIVED else results[0]


def _trace(call: TensorCall[Any], label: str) -> Any:
    """Return the tensors that a verb will return when the graph being traced runs."""
    if call.result is OBJECT:
        raise UsageError(f"{call.verb}: a traced function handles tensors only: call this outside of it")
    if not is_ordered() and not label:
        raise UsageError(
            f"{call.verb}: nothing orders the nodes of this graph, so ranks may run them in different orders: use "
            "operations by name (allreduce, allgather, ...) in it, or a tf.function"
        )
    inputs = call.convert(call.inputs, as_tensor)
    if not call.operands or not (inputs[0].dtype.is_floating or inputs[0].dtype.is_complex):
        return _node(call, label, inputs)
    refuse_vectorized()
    if is_recorded(inputs[0]):  # by a tape in this function; one outside of it is not seen here
        GRADIENTS.check(call)
    if call.result is NOTHING:
        return _node(call, label, inputs)
    # A tensor of another graph is out of scope in the graph of the gradient's gradient; a copy in this graph is not.
    others = [tf.identity(tensor) for tensor in inputs[1:]]
    copies = {id(given): copy for given, copy in zip(call.inputs[1:], others, strict=True)}
    options = {name: copies.get(id(value), value) for name, value in call.options().items()}
    call.options = lambda: options
    return _with_gradient(call, lambda x: _node(call, label, [x, *others]), inputs[0], label)


def _node(call: TensorCall[Any], label: str, inputs: Sequence[Any]) -> Any:
    specs = _specs(call, inputs)
    comm = call.comm.labelled(label) if label else call.comm

    def host(*arrays: Any) -> Sequence[Any]:
        answer = call.host(getattr(comm, call.verb), *arrays)
        if answer is None:
            return [np.zeros((), np.int64)]
        results = list(answer) if call.result is RECEIVED else [answer]
        for result, spec in zip(results, specs, strict=True):
            if name_of(result.dtype) != dtype_name(spec.dtype):
                raise UsageError(f"{call.verb}: received {result.dtype}, this rank passed {spec.dtype.name}")
        return results

    # A node of a backward is ordered even in the graph that TensorFlow derives to compute gradients outside.
    results = call_on_device(host, inputs, specs, what=call.verb if label else "")
    if call.result is NOTHING:
        return None
    if isinstance(call.result, ResultOrZeros) and not _is_root(call):
        with tf.control_dependencies(results):  # a node whose results nobody uses might not run
            return call.result.zeros()
    return tuple(results) if call.result is RECEIVED else results[0]


def _is_root(call: TensorCall[Any]) -> bool:
    return bool(call.comm.rank == call.options()["root"])


def _specs(call: TensorCall[Any], inputs: Sequence[Any]) -> list[Spec]:
    if call.result is NOTHING or (isinstance(call.result, ResultOrZeros) and not _is_root(call)):
        return [Spec(tf.int64, ())]
    if not inputs:
        raise UsageError(f"{call.verb}: in a traced function every rank passes a tensor with the dtype of the result")
    if call.result is SAME:
        return [Spec.like(inputs[-1])]
    if call.result is RECEIVED:
        return [Spec.rows_of(inputs[0]), Spec(tf.int64, (call.comm.size,))]
    shape = inputs[0].shape
    if call.verb == "scatter" or shape.rank is None:  # except on the root, a scattered tensor's shape is ignored
        return [Spec(inputs[0].dtype, tf.TensorShape(None))]
    return [Spec(inputs[0].dtype, tf.TensorShape([None, *shape[1:]]))]
