"""The ordered verbs on torch tensors: see `commlib.tensor_verbs.ordered_verbs`.

Contiguous tensors are read and written in place, on the host or on this process's GPU; others may have any strides.
Every verb has an `_async` twin that returns a `Work` at once; do not touch its tensors before the wait has returned. On
a GPU a verb runs after the work on torch's current stream, and later work on that stream runs after the verb. The host
does not wait for the GPU, unless data goes through its memory, or `wait(host=True)` requests it. Every rank must have
its tensors on the same type of device.

The verbs differentiate; `commlib.tensor_verbs.gradients` has their backward. A tensor requires a gradient on every rank
or on none, and every rank uses the result in its loss: backward runs the verbs in the reverse order of their calls. The
`_async` twins, and the verbs that return None on some ranks, raise UsageError for a tensor that requires a gradient:
pass `tensor.detach()`, or call them within `torch.no_grad()`.
"""

from __future__ import annotations

from commlib_torch._call import Work
from commlib_torch._recorded_verbs import ordered, ordered_verb_maker, writing

__all__ = (
    "Work", "all_gather", "all_gather_async", "all_gather_object", "all_gather_object_async", "all_gather_v",
    "all_gather_v_async", "all_reduce", "all_reduce_", "all_reduce_async", "all_reduce_async_", "all_to_all",
    "all_to_all_async", "all_to_all_v", "all_to_all_v_async", "barrier_async", "broadcast_object_async", "exscan",
    "exscan_async", "gather", "gather_async", "recv", "recv_async", "reduce", "reduce_async", "reduce_scatter",
    "reduce_scatter_async", "reduce_scatter_v", "reduce_scatter_v_async", "scan", "scan_async", "scatter",
    "scatter_async", "send", "send_async", "send_recv", "send_recv_async",
)  # fmt: skip

_verb = ordered_verb_maker(__name__)

all_reduce, all_reduce_async = _verb(ordered.all_reduce)
all_reduce_, all_reduce_async_ = _verb(writing.all_reduce_)
reduce_scatter, reduce_scatter_async = _verb(ordered.reduce_scatter)
reduce_scatter_v, reduce_scatter_v_async = _verb(ordered.reduce_scatter_v)
reduce, reduce_async = _verb(ordered.reduce)
scan, scan_async = _verb(ordered.scan)
exscan, exscan_async = _verb(ordered.exscan)
all_gather, all_gather_async = _verb(ordered.all_gather)
all_gather_v, all_gather_v_async = _verb(ordered.all_gather_v)
gather, gather_async = _verb(ordered.gather)
scatter, scatter_async = _verb(ordered.scatter)
all_to_all, all_to_all_async = _verb(ordered.all_to_all)
all_to_all_v, all_to_all_v_async = _verb(ordered.all_to_all_v)
send, send_async = _verb(ordered.send)
recv, recv_async = _verb(writing.recv)
send_recv, send_recv_async = _verb(writing.send_recv)
barrier_async = _verb.starting(ordered.barrier)
broadcast_object_async = _verb.starting(ordered.broadcast_object)
all_gather_object, all_gather_object_async = _verb(ordered.all_gather_object)
