"""The ordered verbs on TensorFlow's tensors: see `commlib.tensor_verbs.ordered_verbs`. They return new tensors.

They take tensors, variables and anything else that `tf.convert_to_tensor` takes, eagerly and in traced functions. In a
traced function they run when it runs, in trace order; graphs of TensorFlow 1 have no order (UsageError). GPU tensors
stay on the GPU (see `devices`); in a traced function only if no tensor of the call is int32.

`recv` and `send_recv` take shape and dtype of the received tensor from a tensor `like` it. Every verb has an `_async`
twin, for eager use only, that returns a `Work` at once. Errors are in `commlib_tensorflow.errors`.

The verbs differentiate; `commlib.tensor_verbs.gradients` has their backward. A tape watches the tensor on every rank or
on none, every rank uses the result in its loss, and all ranks compute the same function. The `_async` twins, and the
verbs that return None on some ranks, raise UsageError for a tensor that a tape watches: pass
`tf.stop_gradient(tensor)`. A traced function does not see a tape outside of it: there such a verb raises on the ranks
with a result, once its gradient is computed. `send` never has a result: with such a tape it passes no gradient.
"""

from __future__ import annotations

from typing import TypeVar

import tensorflow as tf

from commlib.errors import CommlibError, UsageError
from commlib.tensor_verbs import TensorCall, TensorWork, VerbMaker
from commlib_tensorflow._host_calls import no_autograph
from commlib_tensorflow._recorded_verbs import check_async, ordered, returning, run
from commlib_tensorflow.errors import as_tensorflows

__all__ = (
    "Work", "all_gather", "all_gather_async", "all_gather_object", "all_gather_object_async", "all_gather_v",
    "all_gather_v_async", "all_reduce", "all_reduce_async", "all_to_all", "all_to_all_async", "all_to_all_v",
    "all_to_all_v_async", "barrier_async", "broadcast_async", "broadcast_object_async", "exscan", "exscan_async",
    "gather", "gather_async", "recv", "recv_async", "reduce", "reduce_async", "reduce_scatter", "reduce_scatter_async",
    "reduce_scatter_v", "reduce_scatter_v_async", "scan", "scan_async", "scatter", "scatter_async", "send",
    "send_async", "send_recv", "send_recv_async",
)  # fmt: skip

R = TypeVar("R")


class Work(TensorWork[R]):
    __doc__ = TensorWork.__doc__

    wait = no_autograph(TensorWork.wait)

    def exception(self) -> BaseException | None:
        """Return the exception of the operation, or None; waits until it has ended."""
        error = super().exception()
        return as_tensorflows(error) if isinstance(error, CommlibError) else error


def _start(verb: TensorCall[R]) -> Work[R]:
    if not tf.executing_eagerly():
        raise UsageError(
            f"{verb.verb}_async: a traced function cannot return a pending operation: call {verb.verb} instead"
        )
    check_async(verb)
    return Work(verb.start(), lambda result: result)


_verb = VerbMaker(__name__, "tf.Tensor", run, _start, no_autograph)

all_reduce, all_reduce_async = _verb(ordered.all_reduce)
reduce_scatter, reduce_scatter_async = _verb(ordered.reduce_scatter)
reduce_scatter_v, reduce_scatter_v_async = _verb(ordered.reduce_scatter_v)
reduce, reduce_async = _verb(ordered.reduce)
scan, scan_async = _verb(ordered.scan)
exscan, exscan_async = _verb(ordered.exscan)
broadcast_async = _verb.starting(ordered.broadcast)
all_gather, all_gather_async = _verb(ordered.all_gather)
all_gather_v, all_gather_v_async = _verb(ordered.all_gather_v)
gather, gather_async = _verb(ordered.gather)
scatter, scatter_async = _verb(ordered.scatter)
all_to_all, all_to_all_async = _verb(ordered.all_to_all)
all_to_all_v, all_to_all_v_async = _verb(ordered.all_to_all_v)
send, send_async = _verb(ordered.send)
recv, recv_async = _verb(returning.recv)
send_recv, send_recv_async = _verb(returning.send_recv)
barrier_async = _verb.starting(ordered.barrier)
broadcast_object_async = _verb.starting(ordered.broadcast_object)
all_gather_object, all_gather_object_async = _verb(ordered.all_gather_object)
