"""Communicator: a group of ranks and the verbs that they call together."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from numpy import empty, ndarray

from commlib import forks
from commlib.arguments import integer
from commlib.buffers.views import address_of, as_host
from commlib.collectives import hierarchical as hierarchy
from commlib.collectives import movement, objects
from commlib.collectives import reductions as reduction
from commlib.collectives.plan import Plan
from commlib.dtypes import Array, name_of, numpy_dtype
from commlib.errors import UsageError
from commlib.group.group import Group
from commlib.group.operation import Operation, apart, result
from commlib.kernels.host import node as kernels
from commlib.node.call import NodeCollective
from commlib.p2p import messages
from commlib.runtime.process import Runtime
from commlib.runtime.work import Work
from commlib.transport.base import Transport

if TYPE_CHECKING:
    from commlib.p2p.channel import Channel


def _are_plain(x: Any, out: Any) -> bool:
    """Return whether a result of `x`, a numpy array, may be written to `out` as it is; None is a new array."""
    if out is x:
        return bool(x.flags.carray)
    return bool(x.flags.c_contiguous) and (
        out is None or (type(out) is ndarray and out.dtype is x.dtype and out.shape == x.shape and out.flags.carray)
    )


class Communicator(Group):
    """A group of ranks.

    The verbs are collective unless they name a peer: every rank of the group calls the same verbs with the same
    arguments in the same order. Arrays are numpy arrays, or anything on the host with the buffer protocol,
    `__array_interface__` or `__dlpack__`, of any dtype in `commlib.dtypes`. `out=None` returns a new array, `out=x`
    works in place. Every verb has an `_async` twin that returns a `Work` at once and runs on the progress thread, in
    launch order; its arrays must not be touched until the work is done.

    Every verb raises UsageError for a bad argument (before anything is sent), MismatchError on all ranks if they call
    different things, PeerError if a rank is gone, StallError after COMMLIB_TIMEOUT, ShutdownError after `shutdown`.
    """

    def __init__(self, transport: Transport, runtime: Runtime, name: str = "world") -> None:
        super().__init__(transport, runtime, name)
        self._small_all_reduces = self.node_calls.small
        self._placed_all_reduces = self.node_calls.in_place
        self._meeting = NodeCollective(self, "barrier", kernels.barrier).counted() if self.on_board else None
        self._children = itertools.count(1)
        self._node: Communicator | None = None

    # Groups

    def split(self, color: int, key: int = 0) -> Communicator | None:
        """Return the communicator of the ranks that gave the same `color`, ordered by `key`, then by rank.

        A negative `color` takes part but joins no group and gets None.
        """
        for name, value in (("color", color), ("key", key)):
            if not -(2**31) <= integer("split", name, value) < 2**31:
                raise UsageError(f"split: {name} is {value}, expected a 32-bit integer")
        number = next(self._children)

        def run() -> Communicator | None:
            self.runtime.retired.free(self._gather_quietly)  # now that all ranks are here
            group = self._transport.split(color, key)
            return None if group is None else Communicator(group, self.runtime, f"{self.name}.split{number}({color})")

        return self._run(Operation("split", run, meets=True))  # type: ignore[no-any-return]

    def node(self) -> Communicator:
        """Return the communicator of the ranks of this group on this node (made by the first call)."""
        if self.one_node:
            return self
        if self._node is None:

            def run() -> Communicator:
                own = self._node_transport.split(0, self.rank)
                assert own is not None
                return Communicator(own, self.runtime, f"{self.name}.node")

            self._node = self._run(Operation("node", run, meets=True))
        return self._node

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Array:
        """Return a zeroed array in symmetric memory: memory that all ranks of the node map.

        Collective, with the same shape and dtype on all ranks. A collective on such arrays copies nothing. The memory
        is given back at a later call of `empty`, once the arrays of all ranks are gone.
        """
        kind = numpy_dtype(dtype)
        lengths = shape if isinstance(shape, Sequence) else (shape,)
        dimensions = tuple(integer("empty", "a length of the shape", length) for length in lengths)
        if min(dimensions, default=0) < 0:
            raise UsageError(f"empty: shape {dimensions} has a negative length")
        if math.prod(length or 1 for length in dimensions) * kind.itemsize > sys.maxsize:
            raise UsageError(f"empty: shape {dimensions} of {name_of(kind)} is more than can have addresses")
        nbytes = math.prod(dimensions) * kind.itemsize

        def run() -> Array:
            self.node_calls.forget_places()
            return self._symmetric.allocate(nbytes).view(kind).reshape(dimensions)  # type: ignore[no-any-return]

        return self._run(Operation(f"empty of shape {dimensions} {name_of(kind)}", run, meets=True))  # type: ignore[no-any-return]

    # Reductions

    def all_reduce(self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto") -> Any:
        """Combine `x` of all ranks element by element; every rank gets the result, the same to the last bit.

        op: sum, mean, min, max or prod (bool: sum and max are "or", prod and min "and"). The mean of integers
        truncates toward zero. float16 and bfloat16 are combined in float32 and rounded once, to nearest even.
        algorithm: "auto", "node" (shared memory), "native" (MPI's own), or a schedule ("ring", "double_tree", ...).
        """
        if type(x) is ndarray and algorithm == "auto":
            # What a small call costs is mostly what Python does before it: no view, no text, no object is made here.
            kind = x.dtype, x.size, op
            small = self._small_all_reduces.get(kind)
            if small is not None and (x.flags.carray if out is x else _are_plain(x, out)):
                if out is None:
                    out = empty(x.shape, x.dtype)
                small.between(x, out)
                return out
            known = self.known_small.get(kind)
            if known is not None and (x.flags.carray if out is x else _are_plain(x, out)):
                if out is None:
                    out = empty(x.shape, x.dtype)
                self.run_small(*known, x, out)
                return out
            if out is x and small is None:
                placed = self._placed_all_reduces.get((address_of(x), x.size, x.dtype, op))
                if placed is not None and x.flags.carray:
                    placed(x)
                    return x
            if (plain := self.node_calls.plain_all_reduce(x, op, out)) is not None:
                call, array = plain
                call.at(x, array)
                return array
        return self._run(reduction.all_reduce(self, x, op, out, algorithm))

    def all_reduce_async(self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto") -> Work:
        """Start `all_reduce`."""
        if type(x) is ndarray and algorithm == "auto":
            small = self._small_all_reduces.get((x.dtype, x.size, op))
            if small is not None and _are_plain(x, out):
                return small.start_between(x, empty(x.shape, x.dtype) if out is None else out)
            if (plain := self.node_calls.plain_all_reduce(x, op, out)) is not None:
                call, array = plain
                return call.start_at(x, array)
        return self._start(reduction.all_reduce(self, x, op, out, algorithm))

    def plan_all_reduce(self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto") -> Plan:
        """Prepare an `all_reduce` that will be run many times on the same, contiguous, memory.

        `plan()` runs it now, `plan.start()` on the progress thread. Not collective; running it is.
        """
        before, after = as_host(x, "plan_all_reduce"), as_host(x if out is None else out, "plan_all_reduce", "out")
        if not before.flags.c_contiguous or not after.flags.c_contiguous:
            raise UsageError("plan_all_reduce: x and out must be contiguous: a copy of them would not follow them")
        if apart(before, after) is not before:
            raise UsageError("plan_all_reduce: x and out overlap: they must be the same array, or apart")
        target = result(out, before.shape, before.dtype, "all_reduce")
        if self.takes_node_path("all_reduce", algorithm):
            call = self.node_calls.bound_all_reduce(before.reshape(-1), target.flat, op, algorithm)
            return Plan.on_node(self.progress, call, target.deliver(), (before, x))
        operation = reduction.all_reduce(self, before, op, target.array, algorithm)

        def execute() -> Any:
            self._execute(operation)
            return target.deliver()

        def now() -> None:
            small = self.find_prepared(operation.text)
            if small is None:
                self._run(operation)
            else:
                self.run_small(operation.text, small, before, target.array)

        return Plan(self.progress, Operation(operation.text, execute), now, target.deliver())

    def plan_program(self, text: str, run: Callable[[], Any]) -> Plan:
        """Prepare what uses other groups, and must have one place in the order of this one, as one operation.

        All ranks must give the same `text`. `run` may not use this group. Not collective; running it is.
        """

        def execute() -> Any:
            return self._execute(Operation(text, run))

        return Plan(self.progress, Operation(text, execute), lambda: self._run(Operation(text, run)), None)

    def reduce_scatter(self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto") -> Any:
        """Combine `x` of all ranks and give each rank its part of the result along dimension 0.

        If the length of dimension 0 is no multiple of the size, the first ranks get one row more.
        """
        if type(x) is ndarray:
            known = self.node_calls.plain(("reduce_scatter", x.dtype, x.shape, op, algorithm), x, out)
            if known is not None:
                return known
        return self._run(reduction.reduce_scatter(self, x, op, out, algorithm))

    def reduce_scatter_async(self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto") -> Work:
        """Start `reduce_scatter`."""
        return self._start(reduction.reduce_scatter(self, x, op, out, algorithm))

    def reduce(self, x: Any, op: str = "sum", root: int = 0, *, out: Any = None, algorithm: str = "auto") -> Any:
        """Combine `x` of all ranks; rank `root` gets the result, the others None."""
        return self._run(reduction.reduce(self, x, op, root, out, algorithm))

    def reduce_async(self, x: Any, op: str = "sum", root: int = 0, *, out: Any = None, algorithm: str = "auto") -> Work:
        """Start `reduce`."""
        return self._start(reduction.reduce(self, x, op, root, out, algorithm))

    # Movement

    def broadcast(self, x: Any, root: int = 0, *, algorithm: str = "auto") -> Any:
        """Overwrite `x` on all ranks with that of rank `root`, and return it."""
        if type(x) is ndarray and type(root) is int:
            known = self.node_calls.plain(("broadcast", x.dtype, x.shape, root, algorithm), x, x)
            if known is not None:
                return known
        return self._run(movement.broadcast(self, x, root, algorithm))

    def broadcast_async(self, x: Any, root: int = 0, *, algorithm: str = "auto") -> Work:
        """Start `broadcast`."""
        return self._start(movement.broadcast(self, x, root, algorithm))

    def all_gather(self, x: Any, *, out: Any = None, algorithm: str = "auto") -> Any:
        """Return `x` of all ranks, one after another along dimension 0. Shapes must agree (0-d: one element each)."""
        if type(x) is ndarray:
            known = self.node_calls.plain(("all_gather", x.dtype, x.shape, algorithm), x, out)
            if known is not None:
                return known
        return self._run(movement.all_gather(self, x, out, algorithm))

    def all_gather_async(self, x: Any, *, out: Any = None, algorithm: str = "auto") -> Work:
        """Start `all_gather`."""
        return self._start(movement.all_gather(self, x, out, algorithm))

    def all_gather_v(self, x: Any) -> Any:
        """Return `x` of all ranks, one after another along dimension 0, whose lengths may differ."""
        return self._run(movement.all_gather_v(self, x))

    def all_gather_v_async(self, x: Any) -> Work:
        """Start `all_gather_v`."""
        return self._start(movement.all_gather_v(self, x))

    def gather(self, x: Any, root: int = 0, *, out: Any = None, algorithm: str = "auto") -> Any:
        """Like `all_gather`, but only rank `root` gets the result, the others None."""
        return self._run(movement.gather(self, x, root, out, algorithm))

    def gather_async(self, x: Any, root: int = 0, *, out: Any = None, algorithm: str = "auto") -> Work:
        """Start `gather`."""
        return self._start(movement.gather(self, x, root, out, algorithm))

    def scatter(self, x: Any = None, root: int = 0, *, out: Any = None, algorithm: str = "auto") -> Any:
        """Return this rank's equal part of rank `root`'s `x` along dimension 0. The other ranks' `x` is ignored."""
        return self._run(movement.scatter(self, x, root, out, algorithm))

    def scatter_async(self, x: Any = None, root: int = 0, *, out: Any = None, algorithm: str = "auto") -> Work:
        """Start `scatter`."""
        return self._start(movement.scatter(self, x, root, out, algorithm))

    def all_to_all(self, x: Any, *, out: Any = None, algorithm: str = "auto") -> Any:
        """Send the i-th of `size` equal parts of `x` along dimension 0 to rank i; return what the ranks sent here."""
        if type(x) is ndarray:
            known = self.node_calls.plain(("all_to_all", x.dtype, x.shape, algorithm), x, out)
            if known is not None:
                return known
        return self._run(movement.all_to_all(self, x, out, algorithm))

    def all_to_all_async(self, x: Any, *, out: Any = None, algorithm: str = "auto") -> Work:
        """Start `all_to_all`."""
        return self._start(movement.all_to_all(self, x, out, algorithm))

    def all_to_all_v(self, x: Any, splits: Sequence[int]) -> Any:
        """Send `splits[i]` rows of `x` to rank i; return (what the ranks sent here, int64 rows from each rank)."""
        return self._run(movement.all_to_all_v(self, x, splits))

    def all_to_all_v_async(self, x: Any, splits: Sequence[int]) -> Work:
        """Start `all_to_all_v`."""
        return self._start(movement.all_to_all_v(self, x, splits))

    # Messages between two ranks. They match by (peer, tag), in order, and do not queue behind collectives.

    def send(self, x: Any, peer: int, tag: int = 0) -> None:
        """Send `x` to rank `peer`. Returns when `x` may be changed, perhaps before it has been received."""
        messages.send(self, x, peer, tag).complete()

    def send_async(self, x: Any, peer: int, tag: int = 0) -> Work:
        """Start `send`."""
        return self._look_after(messages.send(self, x, peer, tag))

    def recv(self, x: Any, peer: int, tag: int = 0) -> Any:
        """Receive into `x` what rank `peer` sends with this tag, and return `x`. The byte counts must agree."""
        return messages.recv(self, x, peer, tag).complete()

    def recv_async(self, x: Any, peer: int, tag: int = 0) -> Work:
        """Start `recv`."""
        return self._look_after(messages.recv(self, x, peer, tag))

    def send_recv(self, x: Any, peer: int, out: Any, source: int, tag: int = 0) -> Any:
        """Send `x` to rank `peer` while receiving into `out` from rank `source`; return `out`."""
        return messages.send_recv(self, x, peer, out, source, tag).complete()

    def send_recv_async(self, x: Any, peer: int, out: Any, source: int, tag: int = 0) -> Work:
        """Start `send_recv`."""
        return self._look_after(messages.send_recv(self, x, peer, out, source, tag))

    def channel(
        self,
        peer: int,
        edge: int | str,
        shape: int | Sequence[int],
        dtype: Any = "float32",
        depth: int = 2,
        *,
        codec: Any = None,
    ) -> Channel:
        """Open an edge to rank `peer`, which opens it too: arrays then go in both directions, in order.

        Not collective: it concerns two ranks and waits for nobody. `edge`, a number or a name, tells the edges of two
        ranks apart. Both sides give the same shape, dtype, depth and codec. `depth` messages fit into each direction;
        a shape may be another one later. codec: a name ("int8") or a codec of fixed length, for floats. On a node the
        sender writes into the receiver's memory, and `recv` returns a view of it: see `Channel`.
        """
        if codec is not None:
            from commlib.compress.codecs import codec_of  # few need it

            codec = codec_of(codec)
        return self.channels.open(peer, edge, shape, dtype, depth, codec)

    def _look_after(self, work: Work) -> Work:
        self.runtime.poller.watch(work, self)
        return work

    # Synchronisation and objects

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self._meeting is not None:
            self._meeting(None)
        else:
            self._run(self._barrier())

    def barrier_async(self) -> Work:
        """Start `barrier`; the work is done when all ranks have come."""
        return self._start(self._barrier())

    def _barrier(self) -> Operation:
        def run() -> None:
            self.execute(self.programs("barrier", "dissemination"), [[]], "barrier")

        if self._meeting is not None:
            return Operation("barrier", self._meeting.run, compares=True)
        if self.is_hierarchical:
            return Operation("barrier", lambda: hierarchy.barrier(self, "barrier"))
        return Operation("barrier", run)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return rank `root`'s picklable object on all ranks. Unpickling runs code: trust your ranks."""
        return self._run(objects.broadcast_object(self, value, root))

    def broadcast_object_async(self, value: Any, root: int = 0) -> Work:
        """Start `broadcast_object`."""
        return self._start(objects.broadcast_object(self, value, root))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the picklable objects of all ranks, in rank order. Unpickling runs code: trust your ranks."""
        return self._run(objects.all_gather_object(self, value))  # type: ignore[no-any-return]

    def all_gather_object_async(self, value: Any) -> Work:
        """Start `all_gather_object`."""
        return self._start(objects.all_gather_object(self, value))

    def close(self) -> None:
        """Release everything. Collective, and only when no rank uses it any more."""
        forks.check(f"close of {self.name}")
        if self._node is not None:
            self._node.close()
        super().close()
