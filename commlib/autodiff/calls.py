"""Calls of verbs on arrays. The backward of a call is a call too, which has a backward in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from commlib.autodiff.reversed_ranks import reversed_ranks
from commlib.autodiff.rules import TRANSPOSED, Rules, find_rule
from commlib.buffers.views import as_host
from commlib.coordinator.scaling import scale
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.literals import Op
from commlib.schedule.layout import even

if TYPE_CHECKING:
    from commlib.communicator import Communicator


@dataclass(frozen=True, slots=True)
class VerbCall:
    """A verb and its arguments, except the array; a backward also holds facts of the forward.

    rows: for all_to_all_v the number of rows to each rank; for reduce_scatter_v that of each rank, and for all_gather
    and reduce_scatter too, if uneven. takes: for all_to_all_v the number of rows from each rank, if all ranks know it.
    shape, dtype: of the result on this rank, if the array does not determine them. factor: on the result. reverse: scan
    from the last rank to the first.
    """

    verb: str
    op: Op = "sum"
    root: int = 0
    peer: int = -1
    source: int = -1
    tag: int = 0
    rows: tuple[int, ...] = ()
    takes: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    dtype: Any = None
    factor: float = 1.0
    reverse: bool = False


def apply(comm: Communicator, call: VerbCall, x: Any, rules: Rules = TRANSPOSED) -> tuple[Any, VerbCall]:
    """Return (the verb's result, its backward: the call that turns the result's gradient into the gradient of `x`).

    Collective, or between peers, like the verb. x: as for the verb, or None on a rank without input: off the root of a
    scatter; for recv, off the root of a broadcast, and in the backward of a rank without output, with `shape` and
    `dtype` instead. The result is a new array, or None on a rank without output: a send, off the root of a reduce or
    gather, the first rank of an exscan. In a backward it is zeros instead, if the rank passed an array that the forward
    ignored. Raises UsageError, and the errors of the verb.
    """
    rule = find_rule(call.verb, call.op, rules)
    array = None if x is None and call.verb in _MAY_LACK else as_host(x, call.verb)
    result, facts = _RUN[call.verb](comm, call, array)
    if result is None and call.shape is not None and call.verb in _MAY_ANSWER_NONE:
        result = np.zeros(call.shape, call.dtype)
    if result is not None:
        result = result if call.shape is None else result.reshape(call.shape)
        scale(result, call.factor)
    shape, dtype = (None, None) if array is None else (array.shape, array.dtype)
    factor = call.factor * rule.factor(comm.size)
    known = {"root": call.root, "peer": call.peer, "tag": call.tag, "shape": shape, "dtype": dtype, **facts}
    known["reverse"] = call.reverse != rule.reverse
    return result, VerbCall(rule.verb, cast(Op, rule.op or "sum"), factor=factor, **known)


_MAY_LACK = frozenset(("broadcast", "scatter", "recv", "exscan"))  # on some ranks
_MAY_ANSWER_NONE = frozenset(("reduce", "gather", "exscan"))  # on some ranks

_Facts = dict[str, Any]  # facts of the forward that the backward needs, in addition to shape and dtype


def _all_reduce(comm: Communicator, call: VerbCall, x: Any) -> tuple[Any, _Facts]:
    return comm.all_reduce(x, call.op), {}


def _reduce_scatter(comm: Communicator, call: VerbCall, x: Any) -> tuple[Any, _Facts]:
    shares = even(len(x) if x.ndim else 0, comm.size).counts
    rows = call.rows or shares
    if rows == shares:
        return comm.reduce_scatter(x, call.op), {"rows": rows}
    _check_rows(comm, call, len(x), sum(rows))
    return comm.reduce_scatter_v(x, rows, call.op), {"rows": rows}


def _reduce_scatter_v(comm: Communicator, call: VerbCall, x: Any) -> tuple[Any, _Facts]:
    return comm.reduce_scatter_v(x, call.rows, call.op), {"rows": tuple(call.rows)}


def _all_gather(comm: Communicator, call: VerbCall, x: Any) -> tuple[Any, _Facts]:
    length = len(x) if x.ndim else 1
    rows = call.rows or (length,) * comm.size
    _check_rows(comm, call, length, rows[comm.rank])
    return comm.all_gather(x) if len(set(rows)) == 1 else comm.all_gather_v(x), {"rows": rows}


def _all_gather_v(comm: Communicator, call: VerbCall, x: Any) -> tuple[Any, _Facts]:
    rows = comm.all_gather(np.array([len(x)], np.int64)) if x.ndim else ()  # a 0-d array is refused next
    return comm.all_gather_v(x), {"rows": tuple(map(int, rows))}


def _scan(comm: Communicator, call: VerbCall, x: Any) -> tuple[Any, _Facts]:
    ranks = reversed_ranks(comm) if call.reverse else comm
    if x is None and call.shape is not None:  # the first rank of an exscan has no result, so its gradient is zero
        x = np.zeros(call.shape, call.dtype)
    return getattr(ranks, call.verb)(x, call.op), {}


def _reduce(comm: Communicator, call: VerbCall, x: Any) -> tuple[Any, _Facts]:
    return comm.reduce(x, call.op, call.root), {}


def _broadcast(comm: Communicator, call: VerbCall, x: Any) -> tuple[Any, _Facts]:
    own = np.array(as_host(x, "broadcast")) if comm.rank == call.root else _room(comm, call, x)
    return comm.broadcast(own, call.root), {}


def _gather(comm: Communicator, call: VerbCall, x: Any) -> tuple[Any, _Facts]:
    return comm.gather(x, call.root), {}


def _scatter(comm: Communicator, call: VerbCall, x: Any) -> tuple[Any, _Facts]:
    return comm.scatter(x, call.root), {}


def _all_to_all(comm: Communicator, call: VerbCall, x: Any) -> tuple[Any, _Facts]:
    return comm.all_to_all(x), {}


def _all_to_all_v(comm: Communicator, call: VerbCall, x: Any) -> tuple[Any, _Facts]:
    result, received = comm.all_to_all_v(x, call.rows, takes=call.takes)
    return result, {"rows": tuple(received.tolist()), "takes": tuple(call.rows)}


def _send(comm: Communicator, call: VerbCall, x: Any) -> tuple[Any, _Facts]:
    comm.send(x, call.peer, call.tag)
    return None, {}


def _recv(comm: Communicator, call: VerbCall, x: Any) -> tuple[Any, _Facts]:
    return comm.recv(_room(comm, call, x), call.peer, call.tag), {}


def _send_recv(comm: Communicator, call: VerbCall, x: Any) -> tuple[Any, _Facts]:
    room = _room(comm, call, x)
    result = comm.send_recv(x, call.peer, room, call.source, call.tag)
    return result, {"peer": call.source, "source": call.peer}


_RUN: Mapping[str, Callable[[Communicator, VerbCall, Any], tuple[Any, _Facts]]] = MappingProxyType({
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather_v": _all_gather_v,
    "reduce_scatter_v": _reduce_scatter_v,
    "scan": _scan,
    "exscan": _scan,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_v": _all_to_all_v,
    "send": _send,
    "recv": _recv,
    "send_recv": _send_recv,
})  # fmt: skip


def _room(comm: Communicator, call: VerbCall, x: Any) -> Array:
    """Return an array to receive into: of the call's shape and dtype, or of those of `x`."""
    if call.shape is not None and call.dtype is not None:
        return np.empty(call.shape, call.dtype)
    if x is None:
        raise UsageError(f"{comm.name}: {call.verb}, rank {comm.rank}: pass an array, or shape= and dtype=")
    return np.empty_like(x)


def _check_rows(comm: Communicator, call: VerbCall, length: int, expected: int) -> None:
    if length != expected:
        raise UsageError(
            f"{comm.name}: {call.verb}, rank {comm.rank}: x has {length} rows, expected {expected}: rows={call.rows}"
        )
