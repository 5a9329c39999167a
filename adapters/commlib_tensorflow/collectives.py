"""The ordered verbs on TensorFlow's tensors: see `commlib.tensor_verbs.ordered_verbs`. They return new tensors.

They take tensors, variables and anything else that `tf.convert_to_tensor` takes, eagerly and in traced functions. In a
traced function they run when it runs, in trace order; graphs of TensorFlow 1 have no order (UsageError). GPU tensors
stay on the GPU (see `devices`); in a traced function only if no tensor of the call is int32.

`recv` and `send_recv` take shape and dtype of the received tensor from a tensor `like` it. Every verb has an `_async`
twin, for eager use only, that returns a `Work` at once. Errors are those of `commlib_tensorflow.errors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from commlib.dtypes import name_of
from commlib.errors import CommlibError, UsageError
from commlib.tensor_verbs import (
    NOTHING,
    OBJECT,
    RECEIVED,
    SAME,
    Bridge,
    OrderedVerbs,
    ReturningVerbs,
    TensorCall,
    TensorWork,
    VerbMaker,
)
from commlib_tensorflow._bridge import as_tensor, dtype_name, to_array, to_tensor
from commlib_tensorflow._device_calls import allocate_like, call_on_device
from commlib_tensorflow._host_calls import Spec, is_ordered, no_autograph
from commlib_tensorflow.devices import array_over, device_of, tensor_over
from commlib_tensorflow.errors import as_tensorflows

__all__ = (
    "Work", "all_gather", "all_gather_async", "all_gather_object", "all_gather_object_async", "all_gather_v",
    "all_gather_v_async", "all_reduce", "all_reduce_async", "all_to_all", "all_to_all_async", "all_to_all_v",
    "all_to_all_v_async", "barrier_async", "broadcast_async", "broadcast_object_async", "gather", "gather_async",
    "recv", "recv_async", "reduce", "reduce_async", "reduce_scatter", "reduce_scatter_async", "scatter",
    "scatter_async", "send", "send_async", "send_recv", "send_recv_async",
)  # fmt: skip

R = TypeVar("R")


class Work(TensorWork[R]):
    __doc__ = TensorWork.__doc__

    wait = no_autograph(TensorWork.wait)

    def exception(self) -> BaseException | None:
        """Return the exception of the operation, or None; waits until it has ended."""
        error = super().exception()
        return as_tensorflows(error) if isinstance(error, CommlibError) else error


def run(verb: TensorCall[R]) -> R:
    """Call a verb and wait; in a traced function, make a node that does so."""
    return verb.run() if tf.executing_eagerly() else _trace(verb)


def _start(verb: TensorCall[R]) -> Work[R]:
    if not tf.executing_eagerly():
        raise UsageError(
            f"{verb.verb}_async: a traced function cannot return a pending operation: call {verb.verb} instead"
        )
    return Work(verb.start(), lambda result: result)


def _trace(verb: TensorCall[Any]) -> Any:
    """Return the tensors that a verb will return when the graph being traced runs."""
    if verb.result is OBJECT:
        raise UsageError(f"{verb.verb}: a traced function handles tensors only: call this outside of it")
    if not is_ordered():
        raise UsageError(
            f"{verb.verb}: nothing orders the nodes of this graph, so ranks may run them in different orders: use "
            "operations by name (allreduce, allgather, ...) in it, or a tf.function"
        )
    inputs = [as_tensor(value) for value in verb.inputs]
    specs = _specs(verb, inputs)

    def host(*arrays: Any) -> Sequence[Any]:
        answer = verb.host(getattr(verb.comm, verb.verb), *arrays)
        if verb.result is NOTHING:
            return [np.zeros((), np.int64)]
        results = list(answer) if verb.result is RECEIVED else [answer]
        for result, spec in zip(results, specs, strict=True):
            if name_of(result.dtype) != dtype_name(spec.dtype):
                raise UsageError(f"{verb.verb}: received {result.dtype}, this rank passed {spec.dtype.name}")
        return results

    results = call_on_device(host, inputs, specs)
    if verb.result is NOTHING:
        return None
    return tuple(results) if verb.result is RECEIVED else results[0]


def _specs(verb: TensorCall[Any], inputs: Sequence[Any]) -> list[Spec]:
    if verb.result is NOTHING:
        return [Spec(tf.int64, ())]
    if not inputs:
        raise UsageError(f"{verb.verb}: in a traced function every rank passes a tensor with the dtype of the result")
    if verb.result is SAME:
        return [Spec.like(inputs[-1])]
    if verb.result is RECEIVED:
        return [Spec.rows_of(inputs[0]), Spec(tf.int64, (verb.comm.size,))]
    shape = inputs[0].shape
    if verb.verb == "scatter" or shape.rank is None:  # except on the root, a scattered tensor's shape is ignored
        return [Spec(inputs[0].dtype, tf.TensorShape(None))]
    return [Spec(inputs[0].dtype, tf.TensorShape([None, *shape[1:]]))]


def _read(value: Any) -> Any:
    tensor = as_tensor(value)
    device = device_of(tensor)
    return to_array(tensor) if device is None else array_over(tensor, device)


def _new(array: Any) -> tf.Tensor:
    return to_tensor(array) if type(array) is np.ndarray else tensor_over(array)


_BRIDGE: Bridge[Any] = Bridge(tf.Tensor, _read, _new, allocate_like)
verbs = OrderedVerbs(_BRIDGE)
_returning = ReturningVerbs(_BRIDGE)
_verb = VerbMaker(__name__, "tf.Tensor", run, _start, no_autograph)

all_reduce, all_reduce_async = _verb(verbs.all_reduce)
reduce_scatter, reduce_scatter_async = _verb(verbs.reduce_scatter)
reduce, reduce_async = _verb(verbs.reduce)
broadcast_async = _verb.starting(verbs.broadcast)
all_gather, all_gather_async = _verb(verbs.all_gather)
all_gather_v, all_gather_v_async = _verb(verbs.all_gather_v)
gather, gather_async = _verb(verbs.gather)
scatter, scatter_async = _verb(verbs.scatter)
all_to_all, all_to_all_async = _verb(verbs.all_to_all)
all_to_all_v, all_to_all_v_async = _verb(verbs.all_to_all_v)
send, send_async = _verb(verbs.send)
recv, recv_async = _verb(_returning.recv)
send_recv, send_recv_async = _verb(_returning.send_recv)
barrier_async = _verb.starting(verbs.barrier)
broadcast_object_async = _verb.starting(verbs.broadcast_object)
all_gather_object, all_gather_object_async = _verb(verbs.all_gather_object)
