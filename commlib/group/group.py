"""Group: run operations in order, as one rank among others. It knows no verb.

A group costs one split of MPI's and no shared memory until it is used. Its board, its nodes and its rails are made by
the first operation that needs them, which all ranks run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from typing import Any, NoReturn

from commlib.buffers.symmetric import SymmetricMemory
from commlib.devices.protocol import Device
from commlib.errors import CommlibError, MismatchError
from commlib.execution.streaming import Posted
from commlib.group.call_check import StallCheck
from commlib.group.call_sequence import CallSequence, number_of
from commlib.group.completion import Completion
from commlib.group.gathering import find_topology
from commlib.group.hierarchy import Hierarchy
from commlib.group.memories import Memories
from commlib.group.operation import Operation
from commlib.group.presence import Presence
from commlib.group.programs import Programs
from commlib.group.standing import Attached, Standing
from commlib.group.waits import Waits
from commlib.group.weak import weakly
from commlib.node.board import NodeBoard
from commlib.node.context import NodeContext
from commlib.observe.journal import Journal
from commlib.runtime.compiled import Task
from commlib.runtime.process import Runtime
from commlib.runtime.progress import Progress
from commlib.runtime.retired import Closable, Key, Retired
from commlib.runtime.watchdog import Watchdog
from commlib.runtime.work import Work
from commlib.topology import Topology
from commlib.transport.base import Space, Transport, WaitHook


class Group:
    """One rank's end of a group.

    key: a name that no other group of the job has. topology: which of its ranks share a node; by default the ranks find
    out, collectively. parents: who sees whether processes of this group live, until it has a board of its own. within:
    the group whose operations this one's are parts of; it owns the transport, and answers for what they wait for.
    ranks: its ranks' numbers in the world, by default the same.
    """

    def __init__(
        self,
        transport: Transport,
        runtime: Runtime,
        name: str,
        *,
        key: str = "",
        topology: Topology | None = None,
        parents: Presence | None = None,
        within: Group | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.size, self.name = transport.rank, transport.size, name
        self.transport, self.runtime, self.config = transport, runtime, runtime.config
        self.explain: Callable[[float, list[int]], str] | None = None
        self.purpose = ""
        """What its calls are parts of, in words, where nobody but one user of it makes any: said of what waits."""
        """Words the warning about a long wait, for a group whose calls are not its user's: see `speak_for`."""
        self.key = key or name
        self.ranks: Sequence[int] = range(self.size) if ranks is None else ranks
        self.part_of: str = "" if within is None else within.part_of or within.key
        """The key of the group that its user knows, if this one runs parts of that one's operations."""
        self.topology = find_topology(transport) if topology is None else topology
        self.one_node = len(self.topology.nodes) == 1
        self.p2p = transport.space(Space.MESSAGES)
        self._context: NodeContext | None = None
        self._presence = parents
        self._stall_check: StallCheck | None = None
        self._asked = None if within is None else within._stall_check  # in long waits
        if within is None and self.size > 1 and self.config.check != "never":
            self._asked = self._stall_check = StallCheck(transport.space(Space.CHECKS), name)
        self._standing = Standing(
            name, self.rank, self._stall_check, one_node=self.one_node, is_seen=parents is not None
        )
        self._calls = CallSequence(
            transport,
            name,
            self.config,
            self._standing,
            self._stall_check,
            one_node=self.one_node,
            needs_board=self.shares_memory,
            group=self,
            open=self.open,
        )
        self.journal = Journal(name, self.key, number_of(self._calls))
        # The thread of `progress` must neither keep the group alive nor outlive it.
        self.progress = Progress(weakly(self._standing.abandon), self.journal)
        weakref.finalize(self, self.progress.close).atexit = False
        self._programs = Programs(transport, self.hierarchy, self._calls, self.journal, self)
        # Found here without a frame more: they are on the way of every call that goes by messages.
        self.perform_call, self.execute = self._calls.perform, self._programs.execute
        self.gather_objects, self.gather_in_node = self._programs.gather_objects, self._programs.gather_in_node
        self._memories = Memories(self.hierarchy, self.gather_in_node, self.gather_objects)
        self.symmetric = self._memories.host
        runtime.groups.add(self)
        runtime.recording.add(self.progress)
        self._made_of: list[Closable] = [transport] if within is None else []
        noted = f"{runtime.token}.{self.key}", self.size
        self._retire = weakref.finalize(self, _retire, self._standing, runtime.retired, noted, self._made_of)
        self._retire.atexit = False

    def __repr__(self) -> str:
        return f"<Group {self.name}: rank {self.rank} of {self.size}>"

    # What it is made of

    @property
    def native(self) -> Any:
        """The mpi4py communicator underneath, or None where there is no MPI."""
        return self.transport.native

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks of the group meet on one board."""
        return self.one_node and self.size > 1 and self.config.node_path

    @property
    def is_hierarchical(self) -> bool:
        """Whether some of the group's nodes have several ranks, which can share memory."""
        return not self.one_node and self.config.node_path and not self.topology.is_flat

    @property
    def board(self) -> NodeBoard | None:
        """Where the ranks of this rank's node meet; None until it is made."""
        return self._standing.board

    @property
    def is_open(self) -> bool:
        """Whether the group has the board that it works on, if any."""
        return self._context is not None

    def open(self) -> NodeContext:
        """Return what collectives of this rank's node work with. Collective at first: within an operation."""
        if self._context is None:
            board = self._standing.board = NodeBoard(
                self.hierarchy.node,
                self.gather_in_node,
                slot_bytes=self.config.slot_kib * 1024,
                spins=self.runtime.spins,
                members=self.hierarchy.ranks,
                peer_reads=self.config.peer_reads,
            )
            board.enter(self.watch("set-up of shared memory"))  # from here on the board tells of a failure
            self._calls.meet_on(board)
            self._presence = Presence(board)
            self._standing.is_open = True
            completion = Completion(
                self.name, self.rank, self.one_node, self._standing, self._calls, self.progress, self
            )
            places, complete, abandon = self.symmetric.places, completion.complete, self._standing.abandon
            self._context = NodeContext(board, self.progress, places, complete, abandon)
        return self._context

    def prepare(self) -> None:
        """Make now what collectives would make when they are first called. Collective, before anything else is."""
        if self.shares_memory or (self.is_hierarchical and len(self.hierarchy.ranks) > 1):
            self.open()

    @cached_property
    def hierarchy(self) -> Hierarchy:
        """This rank's node and rail."""
        return Hierarchy.of(self.transport, self.topology)

    def symmetric_on(self, device: Device) -> SymmetricMemory:
        """Return the symmetric memory of a device."""
        return self._memories.on(device)

    def child(self, transport: Transport, name: str, key: str = "", *, private: bool = False) -> Group:
        """Return the group of a transport that was split from this one's. Not collective.

        private: what it runs are parts of this group's operations; the transport stays this group's.
        """
        members = range(self.size) if transport is self.transport else transport.members
        topology = Topology.of([self.topology.node(member) for member in members])
        parents = None if self._presence is None else self._presence.among(members)
        within, ranks = self if private else None, tuple(self.ranks[member] for member in members)
        return Group(
            transport, self.runtime, name, key=key, topology=topology, parents=parents, within=within, ranks=ranks
        )

    def attach(self, part: Attached) -> None:
        """Let what has an end of its own, its channels for example, end with the group."""
        self._standing.attach(part)

    def end_with(self, part: Closable) -> None:
        """Let a part be closed once all ranks have dropped the group: others may still need it when this one leaves."""
        self._made_of.append(part)

    def halt(self) -> None:
        """Let nothing run in this forked child."""
        self._standing.halt()
        self.progress.abandon()

    @property
    def named_memory(self) -> bool:
        """Whether the ranks of this node can share memory by names only, as far as is known."""
        return self._presence is not None and self._presence.board.named_memory

    # Waiting, and messages within operations

    def watch(self, text: str, peers: Collection[int] | None = None) -> Watchdog:
        """Return the watchdog for one wait: for `peers`, or for all ranks in a collective."""
        stall_check = self._asked if peers is None and not (self.is_open and self.one_node) else None
        return Watchdog(
            self.runtime,
            self._presence,
            self.rank,
            f"{self.name}: {self.purpose}: {text}" if self.purpose else f"{self.name}: {text}",
            peers,
            stall_check,
            explain=self.explain,
            did_last=self.did_last,
            group=self.key,
        )

    def did_last(self) -> str:
        """Return what this rank did last in the group, to be appended to a message; "" if nothing is recorded.

        Also where its calls are not its user's: the group's speaker says what was.
        """
        return "" if self.explain is not None else self.runtime.recording.did_last(self.name)

    def on_wait(self, text: str) -> WaitHook:
        """Return a hook for many waits, which watches each anew: what a wait that does not last can do without."""
        return Waits(self, text)

    @property
    def posted(self) -> Posted | None:
        """What is to be told of each round of messages; None if the operation is not recorded."""
        return self._programs.posted

    # Operations, one after another

    def run(self, operation: Operation) -> Any:
        """Run an operation, after everything that was launched before, and return its value."""
        execute = partial(self.perform, operation)
        if operation.meets and self.size > 1:
            value = self.progress.run_through(operation.text, execute)
        else:
            value = Task(self.progress, operation.text, execute).now(None, None)
        return value if operation.finish is None else operation.finish(value)

    def start(self, operation: Operation) -> Work:
        """Start an operation, to run after everything that was launched before."""

        def run() -> Any:
            value = self.perform(operation)
            return value if operation.finish is None else operation.finish(value)

        return self.progress.start(operation.text, run)

    def perform(self, operation: Operation) -> Any:
        """Run an operation whose turn has come: see `CallSequence.perform`."""
        return self.perform_call(operation.text, operation.run, meets=operation.meets)

    @property
    def call_number(self) -> int:
        """The number of the last call, from 1: all ranks count alike, mismatches included."""
        return self._calls.number

    @property
    def history(self) -> int:
        """A hash of the calls so far whose data travels by messages: what their messages carry."""
        return self._calls.history

    def different(self, text: str) -> MismatchError:
        """Return the error of ranks whose calls so far were not the same, as a message with another history told."""
        return self._calls.different(text)

    def is_awaited(self) -> bool:
        """Return whether some rank has begun a collective that this one has not come to.

        It may not see it: between nodes only the ranks that get a message first do. Never blocks.
        """
        if (board := self.board) is not None and board.is_ahead():
            return True
        if self.one_node and self.is_open:
            return False
        return self.transport.progress()

    # Failures

    @property
    def failure(self) -> CommlibError | None:
        """What the group has failed with: its ranks are out of step, and it runs no more calls."""
        return self._standing.failure

    def raise_failure(self, text: str) -> NoReturn:
        """Raise an error that says why the call `text` does not run: what the group failed with before."""
        self._standing.raise_failure(text)

    def abandon(self, text: str, error: BaseException) -> None:
        """Mark the group as failed with what came out of a call half-way: see `Standing.abandon`."""
        self._standing.abandon(text, error)

    def fail(self, error: CommlibError) -> None:
        """Let the group run no more calls because of an error between them; the other ranks are told. Idempotent."""
        self._standing.fail(error)

    def speak_for(self, explain: Callable[[float, list[int]], str]) -> None:
        """Let another speak for a group that makes calls which are not its user's.

        explain: words the warning about a long wait. The speaker tells the other ranks of a failure, by `leave`.
        """
        self.explain = explain
        self._standing.is_told = True

    # The end

    def leave(self, reason: str = "", deadline: float | None = None) -> str:
        """Tell the other ranks that this one comes no more: it has left, or, with a reason, failed.

        deadline: how long (`time.monotonic`) those are waited for that leave with it: a moment, unless it is given.
        Returns in words that some of them made other calls than this one, as far as is heard, or "".
        """
        return self._standing.leave(reason, deadline, history=self._calls.history)

    def announce(self, reason: str = "") -> None:
        """Tell the other ranks the same, without waiting."""
        self._standing.announce(reason, history=self._calls.history)

    def close(self) -> None:
        """Release everything. Collective, and only when no rank uses it any more.

        What it is made of is freed when the ranks next meet: see `Retired`.
        """
        self.runtime.groups.discard(self)
        self.progress.close()
        self.runtime.poller.forget(self)
        self._standing.close()
        self._memories.close()
        if self.board is not None:
            self.board.close()
        self.retire()

    def retire(self) -> None:
        """Note that this group is used no more: what it is made of is freed once all its ranks have noted it."""
        self._retire()


def _retire(standing: Standing, retired: Retired, key: Key, parts: Sequence[Closable]) -> None:
    """Note a group, unless messages of it may be under way for ever: MPI would give them to the next one it makes."""
    if standing.is_quiet:
        retired.note(key, parts)
