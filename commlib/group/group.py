"""Group: what every verb of a group of ranks is made of. `Communicator` adds the verbs."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Any, NoReturn

import numpy as np

from commlib.arguments import integer
from commlib.buffers.symmetric import SymmetricMemory
from commlib.buffers.views import address_of
from commlib.collectives import objects
from commlib.cost.chooser import Choice, Kind
from commlib.dtypes import Array
from commlib.errors import CommlibError, MismatchError, ShutdownError, UsageError
from commlib.execution.persistent import PersistentAllReduce
from commlib.execution.streaming import Hook, Reducer, Region, execute, nothing
from commlib.group.call_check import StallCheck, compare_messages, mismatch
from commlib.group.operation import Operation, follow, signature
from commlib.kernels.host.node import BROKEN, MISMATCH
from commlib.node.board import LEFT, Call, Kernel, NodeBoard
from commlib.node.call import Arithmetic, Exchange, NodeCollective
from commlib.node.calls import NodeCalls
from commlib.p2p.channels import Channels
from commlib.runtime.process import Runtime
from commlib.runtime.progress import Progress
from commlib.runtime.watchdog import Watchdog
from commlib.runtime.work import Work
from commlib.schedule import find, program
from commlib.schedule.ir import Program
from commlib.schedule.layout import even
from commlib.topology import Topology
from commlib.transport.base import Transport, WaitHook

log = logging.getLogger("commlib")

_MOST_PREPARED = 64

_EXPLAINING = 5.0  # seconds in which to learn from the others what they called instead


class Group:
    """One rank's place among others: its transport, its node's board, and how operations run there, in order."""

    def __init__(self, transport: Transport, runtime: Runtime, name: str) -> None:
        self.rank, self.size, self.name = transport.rank, transport.size, name
        self.runtime, self.config = runtime, runtime.config
        self.failure: CommlibError | None = None  # after it the group's ranks are out of step
        self.explain: Callable[[float, list[int]], str] | None = None
        """Words the warning about a long wait, for a group whose calls are not its user's; `leave` then tells the other
        ranks of a failure, in words of its caller's."""
        self.progress = Progress(_weakly(self.abandon))  # its thread must not keep the group alive
        weakref.finalize(self, self.progress.close).atexit = False  # its thread must not outlive the group
        self._transport = transport
        self._sequence = 0
        self._history = 0
        """A hash of all calls so far whose data travels by messages. Every message carries it, in its tag or beside its
        data, so that ranks which once called different things never take each other's data for what they expect."""
        made_of: list[Transport] = []
        node_transport = transport.split_node()
        self._node_transport = node_transport
        self.one_node = node_transport.size == self.size
        self.topology = Topology((tuple(range(self.size)),)) if self.one_node else self._find_topology()
        self.p2p = transport.split(0, self.rank)  # messages between two ranks, apart from the collectives'
        self.board: NodeBoard | None = None
        if node_transport.size > 1 and self.config.node_path:
            members = self.topology.nodes[self.topology.node(self.rank)]
            slot_bytes = self.config.slot_kib * 1024
            self.board = NodeBoard(node_transport, slot_bytes=slot_bytes, spins=runtime.spins, members=members)
        self._comparing = {"never": 0.0, "auto": self.config.check_first, "always": inf}[self.config.check]
        """Up to which call the ranks compare their calls before they send data: always, where they meet on a board."""
        if self.on_board and self.config.check != "never":
            self._comparing = inf
        self.rail: Transport | None = None  # the ranks that this one stands for its node with, on the network
        if self.is_hierarchical:
            place = node_transport.rank
            node = self.topology.node(self.rank)
            self.rail = transport.split(place if place < self.topology.rails else -1, node)
        self._stall_check: StallCheck | None = None
        if not self.on_board and self.size > 1 and self.config.check != "never":
            aside = transport.split(0, self.rank)
            assert aside is not None
            self._stall_check = StallCheck(aside, name)
            made_of.append(aside)
        runtime.groups.add(self)
        made_of += [part for part in (self.rail, node_transport, self.p2p, transport) if part is not None]
        self._retire = weakref.finalize(self, runtime.retired.note, (f"{runtime.token}.{name}", self.size), made_of)
        self._retire.atexit = False
        self.node_calls = NodeCalls(self)
        self.channels = Channels(self)
        self._prepared: dict[str, PersistentAllReduce] = {}
        self.known_small: dict[tuple[Any, int, str], tuple[str, PersistentAllReduce]] = {}
        """Texts and all-reduces of kinds that were called before, by (dtype, count, op)."""
        self._symmetric = SymmetricMemory(node_transport.rank, node_transport.share, self._gather_quietly)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: rank {self.rank} of {self.size}>"

    @property
    def native(self) -> Any:
        """The mpi4py communicator underneath, or None where there is no MPI."""
        return self._transport.native

    @property
    def transport(self) -> Transport:
        """What moves this group's bytes."""
        return self._transport

    @property
    def on_board(self) -> bool:
        """Whether all ranks of the group meet on one board."""
        return self.one_node and self.board is not None

    @property
    def is_hierarchical(self) -> bool:
        """Whether some of the group's nodes have several ranks, which can share memory."""
        return not self.one_node and self.config.node_path and not self.topology.is_flat

    def _find_topology(self) -> Topology:
        leader = min(_gather_integers(self._node_transport, self.rank))
        return Topology.of(_gather_integers(self._transport, leader))

    def check_root(self, verb: str, root: int) -> None:
        """Raise UsageError unless `root` is a rank of this group."""
        if not 0 <= integer(verb, "root", root) < self.size:
            raise UsageError(f"{verb}: root is {root}, but {self.name} has the ranks 0 to {self.size - 1}")

    def takes_node_path(self, verb: str, algorithm: str) -> bool:
        """Return whether a verb runs on the board. Raises UsageError if it was asked to and cannot."""
        if algorithm == "node" and not self.on_board and self.size > 1:
            raise UsageError(
                f"{verb}: algorithm 'node': {self.name} has no shared memory: "
                "its ranks are on several nodes, or COMMLIB_NODE_PATH=0"
            )
        return algorithm in ("auto", "node") and self.on_board

    def takes_hierarchy(self, verb: str, algorithm: str) -> bool:
        """Return whether a verb runs in nodes and between them. Raises UsageError if it was asked to and cannot."""
        if algorithm == "hierarchical" and not self.is_hierarchical and self.size > 1:
            raise UsageError(
                f"{verb}: algorithm 'hierarchical': {self.name} is on one node, has one rank on each, "
                "or COMMLIB_NODE_PATH=0"
            )
        return algorithm in ("auto", "hierarchical") and self.is_hierarchical

    def choose(self, verb: str, algorithm: str, size: int, nbytes: int, *, sharing: int = 1) -> Choice:
        """Return by which algorithm `size` ranks do a verb on `nbytes`, and in how many segments.

        sharing: how many such groups share a node's way to the network. Raises UsageError for an unknown algorithm.
        """
        among = None
        if algorithm not in ("auto", "node", "hierarchical"):
            among = (find(verb, algorithm).name,)
        kind: Kind = "node" if self.one_node else "network"
        return self.runtime.chooser.choose(verb, size, nbytes, kind=kind, sharing=sharing, among=among)

    def programs(self, verb: str, name: str, *, root: int = 0, segments: int = 1) -> Program:
        """Return this rank's program of an algorithm. Raises UsageError for an unknown one."""
        return program(verb, name, self.rank, self.size, root=root, segments=segments)

    def symmetric_place(self, array: Array) -> tuple[int, list[int]] | None:
        """Return the place of a contiguous array in this group's symmetric memory, or None.

        The place is (a number that is the same on all ranks exactly if their arrays correspond, the addresses of the
        corresponding arrays of the node's ranks in this process).
        """
        return self._symmetric.find(address_of(array), array.nbytes)

    def symmetric_places(self, x: Array, target: Array) -> tuple[int, list[int], list[int]]:
        """Return (one number for the places of both arrays, both's addresses), or 0 if one of them has none."""
        first = self.symmetric_place(x)
        second = first if address_of(target) == address_of(x) else self.symmetric_place(target)
        if first is None or second is None:
            return 0, [], []
        place = first[0] if second is first else signature(f"{first[0]} {second[0]}")
        return place, first[1], second[1]

    def watch(self, text: str, peers: Collection[int] | None = None) -> Watchdog:
        """Return the watchdog for one wait: for `peers`, or for all ranks in a collective."""
        stall_check = self._stall_check if peers is None else None
        return Watchdog(
            self.runtime, self.board, self.rank, f"{self.name}: {text}", peers, stall_check, explain=self.explain
        )

    def execute(
        self,
        program: Program,
        blocks: Sequence[Sequence[Region]],
        text: str,
        reducer: Reducer | None = None,
        *,
        part: int = 0,
        transport: Transport | None = None,
        before: Hook = nothing,
        after: Hook = nothing,
    ) -> None:
        """Run a program over blocks of the data, by messages of the group or of `transport`: see `executor.execute`.

        `part` numbers the programs of one call.
        """
        execute(
            program,
            blocks,
            transport or self._transport,
            tag=self._history + signature(text) + part * 0x85EBCA6B,
            on_wait=self.watch(text),
            reducer=reducer,
            before=before,
            after=after,
        )

    def find_prepared(self, text: str) -> PersistentAllReduce | None:
        """Return the small all-reduce of calls with this text, if there is one already."""
        return self._prepared.get(text)

    def run_small(self, text: str, small: PersistentAllReduce, x: Array, target: Array) -> None:
        """Run a prepared all-reduce of contiguous arrays: `_run` and `_execute`, written out: they are many."""
        self.progress.refuse_nested(text)
        try:
            if self.failure is None and self._sequence >= self._comparing and self.progress.claim():
                self._sequence = sequence = self._sequence + 1
                if self._stall_check is not None:
                    self._stall_check.note(sequence, text)
                self._history = follow(self._history, text)
                self._run_prepared(text, small, x, target)
                self.progress.running.release()
                return
        except BaseException as error:
            if isinstance(error, CommlibError):
                self._fail(error)
            self.progress.break_off(text, error)
            raise
        self._run(Operation(text, lambda: self._run_prepared(text, small, x, target)))

    def run_prepared(
        self, text: str, op: str, x: Array, target: Array, make: Callable[[], PersistentAllReduce]
    ) -> None:
        """Run the small all-reduce of calls with this text, within an operation; made when the first is run."""
        small = self._prepared.get(text)
        if small is None:
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
                self.known_small.clear()
            small = self._prepared[text] = make()
            if text.endswith("algorithm=auto"):
                self.known_small[x.dtype, len(small.buffer), op] = text, small
        self._run_prepared(text, small, x, target)

    def _run_prepared(self, text: str, small: PersistentAllReduce, x: Array, target: Array) -> None:
        if not small.run(x, target, self._history):
            raise self._explain_difference(text)

    def _explain_difference(self, text: str) -> MismatchError:
        """Return the error of ranks whose calls so far were not the same, as a message with another history told."""
        general = MismatchError(
            f"{self.name}: {text}: rank {self.rank}: another rank has called something else in this group, now or "
            f"before (this is call number {self.call_number}). All ranks of a group must make the same calls in the "
            "same order. The group cannot be used any more; COMMLIB_CHECK=always finds the call that differs before "
            "anything is sent."
        )
        if self._stall_check is None:
            return general
        deadline = time.monotonic() + _EXPLAINING
        try:
            while time.monotonic() < deadline:  # until the other rank comes to compare its calls too
                self._stall_check.look()
                time.sleep(0.01)
        except MismatchError as error:
            return error
        except CommlibError:
            pass
        return general

    def is_awaited(self) -> bool:
        """Return whether some rank has begun a collective that this one has not come to.

        It may not see it: between nodes only the ranks that get a message first do. Never blocks.
        """
        if self.board is not None and self.board.is_ahead():
            return True
        return (not self.one_node and self._transport.progress()) or (self.rail is not None and self.rail.progress())

    def on_wait(self, text: str) -> WaitHook:
        """Return a callback for many waits, which watches each anew: what a wait that does not last can do without."""
        watch, last = None, 0.0

        def look() -> None:
            nonlocal watch, last
            now = time.monotonic()
            if watch is None or now - last > 1.0:  # in a wait it is called every 20 ms or so
                watch = self.watch(text)
            last = now
            watch()

        return look

    def exchange(
        self, text: str, exchange: Exchange, source: int, target: int, arithmetic: Arithmetic | None = None
    ) -> None:
        """Exchange among this node's ranks, within an operation; `source` and `target` are addresses."""
        NodeCollective.exchange(self, text, exchange, arithmetic).run_at(source, target)

    def exchange_bytes(self, data: bytes, root: int, text: str) -> bytes:
        """Broadcast bytes, whose number only `root` knows, within an operation."""
        at_root = self.rank == root
        length = np.array([len(data)], np.int64)
        if self.on_board:
            self._broadcast_on_board(length, root, text)
            array = np.frombuffer(data, np.uint8) if at_root else np.empty(int(length[0]), np.uint8)
            self._broadcast_on_board(array, root, text)
            return array.tobytes()
        tree = self.programs("broadcast", "binomial_tree", root=root)
        self.execute(tree, [[Region(length, even(1, 1))]], text, part=0)
        array = np.frombuffer(data, np.uint8) if at_root else np.empty(int(length[0]), np.uint8)
        self.execute(tree, [[Region(array, even(len(array), 1))]], text, part=1)
        return array.tobytes()

    def _broadcast_on_board(self, array: Array, root: int, text: str) -> None:
        whole, nothing = (0, array.nbytes), (0, 0)
        at_root = self.rank == root
        takes = [whole if rank == root and not at_root else nothing for rank in range(self.size)]
        exchange = Exchange([whole if at_root else nothing], takes, array.nbytes)
        self.exchange(text, exchange, address_of(array), address_of(array))

    @property
    def call_number(self) -> int:
        """The number of the last call, from 1: all ranks count alike, mismatches included."""
        return self.board.calls if self.on_board and self.board is not None else self._sequence

    def complete(self, kernel: Kernel, call: Call, status: int, text: str) -> int:
        """Finish a kernel that did not end well at once: go on waiting, or say who called what. Return its status."""
        assert self.board is not None
        if self.failure is not None:
            self.raise_failure(text)
        try:
            with self.progress.set_aside():
                watch = self.watch(text)
                status = self.board.resume(kernel, call, status, watch)
                if status == MISMATCH:
                    texts = self.board.exchange_texts(text, watch)
                    raise mismatch(self.name, self.call_number, self.rank, texts, self.board.members)
        except MismatchError as error:
            if not self.on_board:
                self._fail(error)  # the other nodes do not know
            raise
        except CommlibError as error:
            self._fail(error)
            raise
        except BaseException as error:
            self.abandon(text, error)
            raise
        if status == BROKEN:  # another thread's call has failed meanwhile
            self.raise_failure(text)
        return status

    def _fail(self, error: CommlibError) -> None:
        """Let no call of this group run any more, and tell the other ranks: they are out of step."""
        self.failure = error
        self.channels.leave(f"has given up this group ({type(error).__name__}: {error})")
        if self.board is not None:
            self.board.fail()
        if isinstance(error, MismatchError):
            if self._stall_check is not None:
                self._stall_check.tell()
        elif self.explain is None:
            self.leave(f"has given up this group ({type(error).__name__}: {error})")

    def abandon(self, text: str, error: BaseException) -> None:
        """Mark the group as failed: `error`, none of ours, came out of the call `text` before it had run to its end.

        Or so it may be: nobody can tell at which instruction a signal handler has raised.
        """
        if self.failure is not None or isinstance(error, CommlibError):
            return
        what = f"{self.name}: {text}: rank {self.rank}: ended half-way by {type(error).__name__}"
        self._fail(ShutdownError(f"{what}; the group runs no more calls"))
        if self.explain is None:
            error.add_note(
                f"commlib: {what}; the other ranks are told, and the group runs no more calls: "
                "make a new one (commlib.shutdown and commlib.init, or split) on all ranks"
            )

    def raise_failure(self, text: str) -> NoReturn:
        """Raise an error that says why the call `text` does not run: what the group failed with before."""
        failure = self.failure
        assert failure is not None
        error = type(failure)(str(failure))  # a new one: each would add its traceback to the same
        error.missing = failure.missing
        error.add_note(
            f"commlib: {self.name}: {text}: not run on rank {self.rank}: an earlier call of the group failed"
        )
        raise error

    def _compare(self, operation: Operation) -> None:
        if self.size == 1 or (self.config.check == "never" and not operation.meets):
            return
        text, texts = operation.text, None
        if self.on_board:
            assert self.board is not None
            if not self.board.meet(signature(text), watch := self.watch(text)):
                texts = self.board.exchange_texts(text, watch)
        elif operation.meets or self._sequence <= self._comparing:
            texts = compare_messages(self._transport, self._sequence, text, self.watch(text))
        if texts is not None:
            raise mismatch(self.name, self.call_number, self.rank, texts)

    def _execute(self, operation: Operation) -> Any:
        if self.failure is not None:
            self.raise_failure(operation.text)
        sending, number = False, self.call_number + 1
        try:
            self._sequence += 1
            self._count(operation, number)
            if self._stall_check is not None:
                self._stall_check.note(self._sequence, operation.text)
            if not operation.compares:
                self._compare(operation)
                sending = True
                self._history = follow(self._history, operation.text)
            return operation.run()
        except MismatchError as error:
            if sending:
                self._fail(error)  # in the middle of it; else all ranks have it, and nothing was sent
            raise
        except CommlibError as error:
            self._fail(error)
            raise
        except BaseException as error:
            self.abandon(operation.text, error)
            raise
        finally:
            self._count(operation, number)  # whatever its parts have counted

    def _count(self, operation: Operation, number: int) -> None:
        if self.board is not None and not operation.compares:  # else its kernel counts
            self.board.calls = number

    def _run(self, operation: Operation) -> Any:
        run = self.progress.run_through if operation.meets and self.size > 1 else self.progress.run
        value = run(operation.text, lambda: self._execute(operation))
        return value if operation.finish is None else operation.finish(value)

    def _start(self, operation: Operation) -> Work:
        def run() -> Any:
            value = self._execute(operation)
            return value if operation.finish is None else operation.finish(value)

        return self.progress.start(operation.text, run)

    def _gather_quietly(self, value: Any) -> list[Any]:
        gathering = objects.all_gather_object(self, value)  # within an operation
        assert gathering.finish is not None
        return gathering.finish(gathering.run())  # type: ignore[no-any-return]

    def leave(self, reason: str = "") -> None:
        """Tell the other ranks that this one comes no more: it has left, or, with a reason, failed. Never blocks."""
        self.channels.leave(reason)
        if self.board is not None:
            self.board.leave(reason or LEFT)
        if self._stall_check is None:
            return
        finished = not reason and self.failure is None
        history = self._history if finished else -1
        if odd := self._stall_check.leave(reason or LEFT, finished=finished, history=history):
            log.error(
                "%s: rank %d and %s made different calls, which no later one brought to light: results may be wrong; "
                "COMMLIB_CHECK=always finds the call that differs",
                self.name,
                self.rank,
                odd,
            )

    def close(self) -> None:
        """Release everything. Collective, and only when no rank uses it any more."""
        self.runtime.groups.discard(self)
        self.progress.close()
        self.runtime.poller.forget(self)
        self.channels.close()
        self.node_calls.clear()
        self._prepared.clear()
        self.known_small.clear()
        self._symmetric.close()
        if self.board is not None:
            self.board.close()
        if (retirement := self._retire.detach()) is not None:
            for transport in retirement[2][1]:
                transport.close()

    def retire(self) -> None:
        """Note that this group is used no more: what it is made of is freed once all its ranks have noted it."""
        if self.failure is None:  # else messages may be under way for ever
            self._retire()


def _weakly(method: Callable[[str, BaseException], None]) -> Callable[[str, BaseException], None]:
    """Return the same without a reference to the method's object."""
    weak = weakref.WeakMethod(method)

    def call(text: str, error: BaseException) -> None:
        if (found := weak()) is not None:
            found(text, error)

    return call


def _gather_integers(transport: Transport, value: int) -> list[int]:
    gathered = np.zeros(transport.size, np.int64)
    gathered[transport.rank] = value
    region = Region(gathered, even(transport.size, transport.size))
    bruck = program("all_gather", "bruck", transport.rank, transport.size)
    execute(bruck, [[region]], transport, tag=signature("topology"), on_wait=lambda: None)
    return [int(number) for number in gathered]
