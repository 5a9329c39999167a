"""Group: what every verb of a group of ranks is made of. `Communicator` adds the verbs."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Any

import numpy as np

from commlib.agreement import LateCheck, compare_messages, mismatch
from commlib.buffers.symmetric import SymmetricMemory
from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.errors import CommlibError, MismatchError, UsageError
from commlib.executor import Hook, Reducer, Region, execute, nothing
from commlib.kernels.node import MISMATCH
from commlib.observe.watchdog import Watchdog
from commlib.prepared import SmallAllReduce
from commlib.progress import Progress
from commlib.runtime import Runtime
from commlib.schedule import find, program
from commlib.schedule.ir import Program
from commlib.schedule.layout import even
from commlib.topology import Topology
from commlib.transport.base import Idle, Transport
from commlib.transport.shared import LEFT, Call, Kernel, NodeBoard
from commlib.tune.chooser import Choice, Kind
from commlib.verbs import objects
from commlib.verbs.node import Arithmetic, Exchange, NodeCall
from commlib.verbs.node_path import NodePath
from commlib.verbs.operation import Operation, signature
from commlib.work import Work

_MOST_PREPARED = 64


class Group:
    """One rank's place among others: its transport, its node's board, and how operations run there, in order."""

    def __init__(self, transport: Transport, runtime: Runtime, name: str) -> None:
        self.rank, self.size, self.name = transport.rank, transport.size, name
        self.runtime, self.config = runtime, runtime.config
        self.failure: CommlibError | None = None  # after it the group's ranks are out of step
        self.explain: Callable[[float, list[int]], str] | None = None  # words the warning about a long wait
        self.progress = Progress()
        weakref.finalize(self, self.progress.close).atexit = False  # its thread must not outlive the group
        self._transport = transport
        self._sequence = 0
        node_transport = transport.split_node()
        self._node_transport = node_transport
        self.one_node = node_transport.size == self.size
        self.topology = Topology((tuple(range(self.size)),)) if self.one_node else self._find_topology()
        self.mail = transport.split(0, self.rank)  # messages between two ranks, apart from the collectives'
        self.board: NodeBoard | None = None
        if node_transport.size > 1 and self.config.node_path:
            members = self.topology.nodes[self.topology.node(self.rank)]
            slot_bytes = self.config.slot_kib * 1024
            self.board = NodeBoard(node_transport, slot_bytes=slot_bytes, spins=runtime.spins, members=members)
        self._comparing = {"never": 0.0, "auto": self.config.check_first, "always": inf}[self.config.check]
        """Up to which call the ranks compare their calls before they send data: always, where they meet on a board."""
        if self.on_board and self.config.check != "never":
            self._comparing = inf
        self.column: Transport | None = None  # the ranks that this one stands for its node with, on the network
        if self.is_hierarchical:
            place = node_transport.rank
            node = self.topology.node(self.rank)
            self.column = transport.split(place if place < self.topology.columns else -1, node)
        self._late_check: LateCheck | None = None
        if not self.on_board and self.size > 1 and self.config.check != "never":
            aside = transport.split(0, self.rank)
            assert aside is not None
            self._late_check = LateCheck(aside, name)
        runtime.groups.add(self)
        self.node_path = NodePath(self)
        self._prepared: dict[str, SmallAllReduce] = {}
        self.known_small: dict[tuple[Any, int, str], tuple[str, SmallAllReduce]] = {}
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
        if not 0 <= root < self.size:
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
        look = self._late_check.look if self._late_check is not None and peers is None else None
        return Watchdog(
            self.runtime, self.board, self.rank, f"{self.name}: {text}", peers=peers, look=look, explain=self.explain
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
            tag=signature(text) + self.call_number * 0x9E3779B1 + part * 0x85EBCA6B,
            idle=self.watch(text),
            reducer=reducer,
            before=before,
            after=after,
        )

    def prepared(self, text: str, op: str, dtype: Any, make: Callable[[], SmallAllReduce]) -> SmallAllReduce:
        """Return the small all-reduce of calls with this text; made when the first is run."""
        found = self._prepared.get(text)
        if found is None:
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
                self.known_small.clear()
            found = self._prepared[text] = make()
            if text.endswith("algorithm=auto"):
                self.known_small[dtype, len(found.buffer), op] = text, found
        return found

    def find_prepared(self, text: str) -> SmallAllReduce | None:
        """Return the small all-reduce of calls with this text, if there is one already."""
        return self._prepared.get(text)

    def run_small(self, text: str, small: SmallAllReduce, x: Array, target: Array) -> None:
        """Run a prepared all-reduce of contiguous arrays: `_run` and `_execute`, written out: they are many."""
        if self.failure is not None or self._sequence < self._comparing or not self.progress.claim():
            self._run(Operation(text, lambda: small.run(x, target)))
            return
        try:
            self._sequence = sequence = self._sequence + 1
            if self._late_check is not None:
                self._late_check.note(sequence, text)
            small.run(x, target)
        except CommlibError as error:
            self._fail(error)
            raise
        finally:
            self.progress.running.release()

    def is_awaited(self) -> bool:
        """Return whether some rank has begun a collective that this one has not come to.

        It may not see it: between nodes only the ranks that get a message first do. Never blocks.
        """
        if self.board is not None and self.board.is_ahead():
            return True
        return (not self.one_node and self._transport.progress()) or (
            self.column is not None and self.column.progress()
        )

    def idle(self, text: str) -> Idle:
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
        NodeCall.exchange(self, text, exchange, arithmetic).run_at(source, target)

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
        """What all ranks count alike, mismatches included: on a board its meetings, else calls."""
        return self.board.epoch if self.on_board and self.board is not None else self._sequence

    def settle(self, kernel: Kernel, call: Call, status: int, text: str) -> int:
        """Finish a kernel that did not end well at once: go on waiting, or say who called what. Return its status."""
        assert self.board is not None
        if self.failure is not None:
            raise self.failure
        watch = self.watch(text)
        try:
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
        return status

    def _fail(self, error: CommlibError) -> None:
        self.failure = error
        if self._late_check is not None and isinstance(error, MismatchError):
            self._late_check.tell()
        if self.board is not None:
            self.board.fail()

    def _compare(self, text: str) -> None:
        if self.config.check == "never" or self.size == 1:
            return
        texts = None
        if self.on_board:
            assert self.board is not None
            if not self.board.meet(signature(text), watch := self.watch(text)):
                texts = self.board.exchange_texts(text, watch)
        elif self._sequence <= self._comparing:
            texts = compare_messages(self._transport, self._sequence, text, self.watch(text))
        if texts is not None:
            raise mismatch(self.name, self.call_number, self.rank, texts)

    def _execute(self, operation: Operation) -> Any:
        if self.failure is not None:
            raise self.failure
        self._sequence += 1
        if self._late_check is not None:
            self._late_check.note(self._sequence, operation.text)
        if not operation.compares:
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
        except MismatchError as error:
            if not operation.compares:
                self._fail(error)  # in the middle of it
            raise
        except CommlibError as error:
            self._fail(error)
            raise

    def _run(self, operation: Operation) -> Any:
        return self.progress.run(operation.text, lambda: self._execute(operation))

    def _start(self, operation: Operation) -> Work:
        return self.progress.start(operation.text, lambda: self._execute(operation))

    def _gather_quietly(self, value: Any) -> list[Any]:
        return objects.all_gather_object(self, value).run()  # type: ignore[no-any-return]  # within an operation

    def leave(self, reason: str = "") -> None:
        """Tell the other ranks that this one comes no more: it has left, or, with a reason, failed. Never blocks."""
        why = reason or LEFT
        if self.board is not None:
            self.board.leave(why)
        if self._late_check is not None:
            self._late_check.leave(why, finished=not reason and self.failure is None)

    def close(self) -> None:
        """Release everything. Collective, and only when no rank uses it any more."""
        self.runtime.groups.discard(self)
        self.progress.close()
        self.runtime.attendant.forget(self)
        self.node_path.clear()
        self._prepared.clear()
        self.known_small.clear()
        self._symmetric.close()
        if self.board is not None:
            self.board.close()
        for transport in (self.column, self._node_transport, self.mail, self._transport):
            if transport is not None:
                transport.close()


def _gather_integers(transport: Transport, value: int) -> list[int]:
    gathered = np.zeros(transport.size, np.int64)
    gathered[transport.rank] = value
    region = Region(gathered, even(transport.size, transport.size))
    bruck = program("all_gather", "bruck", transport.rank, transport.size)
    execute(bruck, [[region]], transport, tag=signature("topology"), idle=lambda: None)
    return [int(number) for number in gathered]
