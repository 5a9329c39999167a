"""Communicator: a group of ranks and the verbs that they call together."""

from __future__ import annotations

import ctypes
import itertools
import operator
import pickle
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from commlib.agreement import LateCheck, compare_messages, mismatch
from commlib.buffers.symmetric import SymmetricMemory
from commlib.buffers.views import as_host
from commlib.dtypes import Array, name_of, numpy_dtype
from commlib.errors import CommlibError, MismatchError, UsageError
from commlib.executor import Reducer, Region, execute
from commlib.kernels.node import MISMATCH
from commlib.observe.watchdog import Watchdog
from commlib.plan import Plan
from commlib.runtime import Runtime
from commlib.schedule import program
from commlib.schedule.ir import Program
from commlib.schedule.layout import even
from commlib.transport.base import Transport
from commlib.transport.shared import Call, Kernel, NodeBoard
from commlib.verbs import messages, movement, reduction
from commlib.verbs.node import NodeAllReduce
from commlib.verbs.operation import Operation, Result, apart, result, signature, source
from commlib.work import Work

Regions = Callable[..., list[Region]]


class Communicator:
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
        self.rank, self.size, self.name = transport.rank, transport.size, name
        self.runtime, self.config = runtime, runtime.config
        self.failure: CommlibError | None = None  # after it the group's ranks are out of step
        self._transport = transport
        self._sequence = 0
        self._prepared: dict[int, tuple[Any, str, Any, int, Any, int, NodeAllReduce]] = {}
        self._children = itertools.count(1)
        node_transport = transport.split_node()
        self._one_node = node_transport.size == self.size
        self._node: Communicator | None = None
        self._node_transport = node_transport
        self.mail = transport.split(0, self.rank)  # messages between two ranks, apart from the collectives'
        self.board: NodeBoard | None = None
        if self._one_node and self.size > 1 and self.config.node_path:
            slot_bytes = self.config.slot_kib * 1024
            self.board = NodeBoard(node_transport, slot_bytes=slot_bytes, spins=runtime.spins)
        self._late_check: LateCheck | None = None
        if self.board is None and self.size > 1 and self.config.check != "never":
            aside = transport.split(0, self.rank)
            assert aside is not None
            self._late_check = LateCheck(aside, name)
        runtime.groups.add(self)
        self._symmetric = SymmetricMemory(node_transport.rank, node_transport.share, self._gather_quietly)

    def __repr__(self) -> str:
        return f"<Communicator {self.name}: rank {self.rank} of {self.size}>"

    # Groups

    def split(self, color: int, key: int = 0) -> Communicator | None:
        """Return the communicator of the ranks that gave the same `color`, ordered by `key`, then by rank.

        A negative `color` takes part but joins no group and gets None.
        """
        for name, value in (("color", color), ("key", key)):
            if not -(2**31) <= value < 2**31:
                raise UsageError(f"split: {name} is {value}, expected a 32-bit integer")
        number = next(self._children)

        def run() -> Communicator | None:
            group = self._transport.split(color, key)
            return None if group is None else Communicator(group, self.runtime, f"{self.name}.split{number}({color})")

        return self._run(Operation("split", run))  # type: ignore[no-any-return]

    def node(self) -> Communicator:
        """Return the communicator of the ranks of this group on this node (made by the first call)."""
        if self._one_node:
            return self
        if self._node is None:

            def run() -> Communicator:
                return Communicator(self._node_transport, self.runtime, f"{self.name}.node")

            self._node = self._run(Operation("node", run))
        return self._node

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Array:
        """Return a zeroed array in symmetric memory: memory that all ranks of the node map.

        Collective, with the same shape and dtype on all ranks. A collective on such arrays copies nothing. The memory
        is given back at a later call of `empty`, once the arrays of all ranks are gone.
        """
        kind = numpy_dtype(dtype)
        dimensions = tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)
        if min(dimensions, default=0) < 0:
            raise UsageError(f"empty: shape {dimensions} has a negative length")
        nbytes = int(np.prod(dimensions, dtype=np.int64)) * kind.itemsize
        if not self._one_node:
            return self.node().empty(dimensions, kind)

        def run() -> Array:
            return self._symmetric.allocate(nbytes).view(kind).reshape(dimensions)  # type: ignore[no-any-return]

        return self._run(Operation(f"empty of shape {dimensions} {name_of(kind)}", run))  # type: ignore[no-any-return]

    # Reductions

    def all_reduce(self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto") -> Any:
        """Combine `x` of all ranks element by element; every rank gets the result, the same to the last bit.

        op: sum, mean, min, max or prod (bool: sum and max are "or", prod and min "and"). The mean of integers
        truncates toward zero. float16 and bfloat16 are combined in float32 and rounded once, to nearest even.
        algorithm: "auto", "node" (shared memory), "native" (MPI's own), or a schedule ("ring", "double_tree", ...).
        """
        if out is x:
            # The usual call of a training loop: the same array again. Everything is known but what is in it.
            prepared = self._prepared.get(id(x))
            if prepared is not None:
                reference, known_op, dtype, size, pointer, address, call = prepared
                if (
                    reference() is x
                    and op == known_op
                    and algorithm == "auto"
                    and x.dtype is dtype
                    and x.size == size
                    and pointer.value == address
                    and x.flags.writeable
                ):
                    call()
                    return x
        on_node = self._all_reduce_on_node(x, op, out, algorithm)
        if on_node is None:
            return self._run(self._all_reduce(x, op, out, algorithm))
        call, target, _ = on_node
        call()
        return target.deliver()

    def all_reduce_async(self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto") -> Work:
        """Start `all_reduce`."""
        on_node = self._all_reduce_on_node(x, op, out, algorithm)
        if on_node is None:
            return self._start(self._all_reduce(x, op, out, algorithm))
        call, target, keep = on_node

        def run(keep: Any = keep) -> Any:
            call.run()
            return target.deliver()

        return self.runtime.progress.start(call.text, run)

    def plan_all_reduce(self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto") -> Plan:
        """Prepare an `all_reduce` that will be run many times on the same, contiguous, memory.

        `plan()` runs it now, `plan.start()` on the progress thread. Not collective; running it is.
        """
        before, after = as_host(x, "plan_all_reduce"), as_host(x if out is None else out, "plan_all_reduce", "out")
        if not before.flags.c_contiguous or not after.flags.c_contiguous:
            raise UsageError("plan_all_reduce: x and out must be contiguous: a copy of them would not follow them")
        if apart(before, after) is not before:
            raise UsageError("plan_all_reduce: x and out overlap: they must be the same array, or apart")
        on_node = self._all_reduce_on_node(x, op, out, algorithm)
        if on_node is not None:
            call, target, keep = on_node
            return Plan.on_node(self.runtime.progress, call, target.deliver(), keep)
        operation = self._all_reduce(x, op, out, algorithm)
        return Plan(self.runtime.progress, Operation(operation.text, lambda: self._execute(operation)), (x, out))

    def _all_reduce(self, x: Any, op: str, out: Any, algorithm: str) -> Operation:
        if algorithm == "native":
            return reduction.native_all_reduce(self, x, op, out)
        return reduction.all_reduce(self, x, op, out, algorithm)

    def _all_reduce_on_node(
        self, x: Any, op: str, out: Any, algorithm: str
    ) -> tuple[NodeAllReduce, Result, Any] | None:
        """Return (the compiled call, its result, what must stay alive), or None where the node path does not apply."""
        if algorithm not in ("auto", "node"):
            return None
        if self.board is None:
            if algorithm == "node" and self.size > 1:
                raise UsageError(
                    f"all_reduce: algorithm 'node': {self.name} has no shared memory: "
                    "its ranks are on several nodes, or COMMLIB_NODE_PATH=0"
                )
            return None
        array = source(x, "all_reduce")
        target = result(out, array.shape, array.dtype, "all_reduce")
        flat = array.reshape(-1)
        if apart(flat, target.flat) is not flat:
            return None  # overlapping arrays: rare enough for the general way
        call = NodeAllReduce(self, flat, target.flat, op, algorithm)
        if out is x and isinstance(x, np.ndarray) and target.flat.ctypes.data == x.ctypes.data and algorithm == "auto":
            key, prepared = id(x), self._prepared
            reference = weakref.ref(x, lambda _: prepared.pop(key, None))
            # An array may move its memory (ndarray.resize). Asking numpy where it is takes longer than the reduction,
            # so look into the object: the pointer comes first in numpy's C struct, after the object's head.
            pointer = ctypes.c_void_p.from_address(key + object.__basicsize__)
            prepared[key] = (reference, op, x.dtype, x.size, pointer, x.ctypes.data, call)
        return call, target, (x, out, array)

    def reduce_scatter(self, x: Any, op: str = "sum", *, out: Any = None, algorithm: str = "auto") -> Any:
        """Combine `x` of all ranks and give each rank its part of the result along dimension 0.

        If the length of dimension 0 is no multiple of the size, the first ranks get one row more.
        """
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
        return self._run(movement.broadcast(self, x, root, algorithm))

    def broadcast_async(self, x: Any, root: int = 0, *, algorithm: str = "auto") -> Work:
        """Start `broadcast`."""
        return self._start(movement.broadcast(self, x, root, algorithm))

    def all_gather(self, x: Any, *, out: Any = None, algorithm: str = "auto") -> Any:
        """Return `x` of all ranks, one after another along dimension 0. Shapes must agree (0-d: one element each)."""
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
        messages.send(self, x, peer, tag).wait()

    def send_async(self, x: Any, peer: int, tag: int = 0) -> Work:
        """Start `send`."""
        return self._look_after(messages.send(self, x, peer, tag))

    def recv(self, x: Any, peer: int, tag: int = 0) -> Any:
        """Receive into `x` what rank `peer` sends with this tag, and return `x`. The byte counts must agree."""
        return messages.recv(self, x, peer, tag).wait()

    def recv_async(self, x: Any, peer: int, tag: int = 0) -> Work:
        """Start `recv`."""
        return self._look_after(messages.recv(self, x, peer, tag))

    def send_recv(self, x: Any, peer: int, out: Any, source: int, tag: int = 0) -> Any:
        """Send `x` to rank `peer` while receiving into `out` from rank `source`; return `out`."""
        return messages.send_recv(self, x, peer, out, source, tag).wait()

    def send_recv_async(self, x: Any, peer: int, out: Any, source: int, tag: int = 0) -> Work:
        """Start `send_recv`."""
        return self._look_after(messages.send_recv(self, x, peer, out, source, tag))

    def _look_after(self, work: Work) -> Work:
        self.runtime.progress.watch(work)
        return work

    # Synchronisation and objects

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._run(self._barrier())

    def barrier_async(self) -> Work:
        """Start `barrier`; the work is done when all ranks have come."""
        return self._start(self._barrier())

    def _barrier(self) -> Operation:
        def run() -> None:
            self.execute(self.programs("barrier", "dissemination"), list, "barrier")

        # On a node, comparing the calls is a barrier.
        if self.board is not None and self.config.check != "never":
            return Operation("barrier", lambda: None)
        return Operation("barrier", run)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return rank `root`'s picklable object on all ranks. Unpickling runs code: trust your ranks."""
        return self._run(self._broadcast_object(value, root))

    def broadcast_object_async(self, value: Any, root: int = 0) -> Work:
        """Start `broadcast_object`."""
        return self._start(self._broadcast_object(value, root))

    def _broadcast_object(self, value: Any, root: int) -> Operation:
        self.check_root("broadcast_object", root)
        text = f"broadcast_object, root={root}"
        data = pickle.dumps(value) if self.rank == root else b""
        return Operation(text, lambda: pickle.loads(self.exchange_bytes(data, root, text)))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the picklable objects of all ranks, in rank order. Unpickling runs code: trust your ranks."""
        return self._run(self._all_gather_object(value))  # type: ignore[no-any-return]

    def all_gather_object_async(self, value: Any) -> Work:
        """Start `all_gather_object`."""
        return self._start(self._all_gather_object(value))

    def _all_gather_object(self, value: Any) -> Operation:
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        gathering = movement.all_gather_v(self, data)
        lengths = movement.all_gather(self, np.array([len(data)], np.int64), None, "auto")

        def run() -> list[Any]:
            stops = np.cumsum(lengths.run())
            everything = gathering.run()
            parts = np.split(everything, stops[:-1])
            return [pickle.loads(part.tobytes()) for part in parts]

        return Operation("all_gather_object", run)

    def _gather_quietly(self, value: Any) -> list[Any]:
        return self._all_gather_object(value).run()  # type: ignore[no-any-return]  # within an operation

    # What the verbs are made of

    @property
    def native(self) -> Any:
        """The mpi4py communicator underneath, or None where there is no MPI."""
        return self._transport.native

    @property
    def transport(self) -> Transport:
        """What moves this group's bytes."""
        return self._transport

    def check_root(self, verb: str, root: int) -> None:
        """Raise UsageError unless `root` is a rank of this group."""
        if not 0 <= root < self.size:
            raise UsageError(f"{verb}: root is {root}, but {self.name} has the ranks 0 to {self.size - 1}")

    def programs(self, verb: str, name: str, *, root: int = 0, segments: int = 1) -> Program:
        """Return this rank's program of an algorithm. Raises UsageError for an unknown one."""
        return program(verb, name, self.rank, self.size, root=root, segments=segments)

    def symmetric_place(self, array: Array) -> tuple[int, list[int]] | None:
        """Return the place of a contiguous array in this group's symmetric memory, or None."""
        return self._symmetric.find(array.ctypes.data, array.nbytes)

    def watch(self, text: str, peers: Collection[int] | None = None) -> Watchdog:
        """Return the watchdog for one wait: for `peers`, or for all ranks in a collective."""
        look = self._late_check.look if self._late_check is not None and peers is None else None
        return Watchdog(self.runtime, self.board, self.rank, f"{self.name}: {text}", peers=peers, look=look)

    def execute(
        self, program: Program, regions: Regions, text: str, reducer: Reducer | None = None, *, part: int = 0
    ) -> None:
        """Run a program; `regions` maps its chunk counts to memory. `part` numbers the programs of one call."""
        execute(
            program,
            regions(*program.regions),
            self._transport,
            tag=signature(text) + self._call_number * 0x9E3779B1 + part,
            idle=self.watch(text),
            reducer=reducer,
        )

    def exchange_bytes(self, data: bytes, root: int, text: str) -> bytes:
        """Broadcast bytes, whose number only `root` knows, within an operation."""
        at_root = self.rank == root
        length = np.array([len(data)], np.int64)
        tree = self.programs("broadcast", "binomial_tree", root=root)
        self.execute(tree, lambda chunks: [Region(length, even(1, chunks))], text, part=0)
        array = np.frombuffer(data, np.uint8) if at_root else np.empty(int(length[0]), np.uint8)
        self.execute(tree, lambda chunks: [Region(array, even(len(array), chunks))], text, part=1)
        return array.tobytes()

    @property
    def _call_number(self) -> int:
        """What all ranks count alike, mismatches included: on a node its meetings, else calls."""
        return self._sequence if self.board is None else self.board.epoch

    def settle(self, kernel: Kernel, call: Call, status: int, text: str) -> None:
        """Finish a kernel that did not end well at once: go on waiting, or say who called what."""
        assert self.board is not None
        if self.failure is not None:
            raise self.failure
        watch = self.watch(text)
        try:
            if self.board.resume(kernel, call, status, watch) == MISMATCH:
                raise mismatch(self.name, self._call_number, self.rank, self.board.exchange_texts(text, watch))
        except MismatchError:
            raise
        except CommlibError as error:
            self._fail(error)
            raise

    def _fail(self, error: CommlibError) -> None:
        self.failure = error
        if self.board is not None:
            self.board.fail()

    def _compare(self, text: str) -> None:
        check = self.config.check
        if check == "never" or self.size == 1:
            return
        texts = None
        if self.board is not None:
            if not self.board.meet(signature(text), watch := self.watch(text)):
                texts = self.board.exchange_texts(text, watch)
        elif check == "always" or self._sequence <= self.config.check_first:
            texts = compare_messages(self._transport, self._sequence, text, self.watch(text))
        if texts is not None:
            raise mismatch(self.name, self._call_number, self.rank, texts)

    def _execute(self, operation: Operation) -> Any:
        if self.failure is not None:
            raise self.failure
        self._sequence += 1
        if self._late_check is not None:
            self._late_check.note(self._sequence, operation.text)
        try:
            self._compare(operation.text)
        except MismatchError:
            raise  # all ranks have it, and nothing was sent
        except CommlibError as error:
            self._fail(error)
            raise
        try:
            return operation.run()
        except UsageError:
            raise
        except CommlibError as error:
            self._fail(error)
            raise

    def _run(self, operation: Operation) -> Any:
        return self.runtime.progress.run(operation.text, lambda: self._execute(operation))

    def _start(self, operation: Operation) -> Work:
        return self.runtime.progress.start(operation.text, lambda: self._execute(operation))

    def leave(self) -> None:
        """Tell the other ranks that this one comes no more. Never blocks."""
        if self.board is not None:
            self.board.leave()
        if self._late_check is not None and self.failure is None:
            self._late_check.leave()

    def close(self) -> None:
        """Release everything. Collective, and only when no rank uses it any more."""
        self._prepared.clear()
        self._symmetric.close()
        if self.board is not None:
            self.board.close()
        if self._node is not None:
            self._node.close()
        else:
            self._node_transport.close()
        if self.mail is not None:
            self.mail.close()
        self._transport.close()
