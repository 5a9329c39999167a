"""Group: one rank's member of a group, which runs operations in order. It is independent of the verbs.

A new group costs one MPI split and no shared memory. The first operation that needs its board, node and rail creates
them, on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from typing import Any, NoReturn

from commlib.buffers.symmetric_memory import SymmetricMemory
from commlib.devices.protocol import Device
from commlib.errors import CommlibError, MismatchError
from commlib.execution.streaming import Posted
from commlib.group.call_check import StallCheck
from commlib.group.call_sequence import CallSequence, number_of
from commlib.group.completion import Completion
from commlib.group.gathering import find_topology
from commlib.group.group_status import GroupPart, GroupStatus, Liveness
from commlib.group.hierarchy import Hierarchy, Memories
from commlib.group.operation import Operation
from commlib.group.programs import Programs
from commlib.group.waiting import Waiting
from commlib.group.weak_references import make_weak_method
from commlib.node.board import NodeBoard
from commlib.node.context import NodeContext
from commlib.observe.journal import Journal
from commlib.runtime.compiled_call import Task
from commlib.runtime.deferred_free import Closable, DeferredFree, Key
from commlib.runtime.process import Runtime
from commlib.runtime.progress import Progress
from commlib.runtime.watchdog import Watchdog
from commlib.runtime.work import Work
from commlib.topology import Topology
from commlib.transport.base import Space, Transport, WaitHook


class Group:
    """One rank's member of a group.

    key: a name unique in the job. topology: the ranks by node; by default the ranks find it collectively. parents: the
    liveness from the parent's board, used until this group has a board. within: the group of whose operations this
    private group runs parts; it owns the transport and checks the long waits. ranks: the ranks' numbers in the world,
    by default the same.
    """

    def __init__(
        self,
        transport: Transport,
        runtime: Runtime,
        name: str,
        *,
        key: str = "",
        topology: Topology | None = None,
        parents: Liveness | None = None,
        within: Group | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.size, self.name = transport.rank, transport.size, name
        self.transport, self.runtime, self.config = transport, runtime, runtime.config
        self.explain: Callable[[float, list[int]], str] | None = None
        self.purpose = ""
        """The purpose of its calls, if only one internal user makes calls here; it is part of the texts of waits."""
        """`explain` formats the warning about a long wait for a group with internal calls only: see `speak_for`."""
        self.key = key or name
        self.ranks: Sequence[int] = range(self.size) if ranks is None else ranks
        self.part_of: str = "" if within is None else within.part_of or within.key
        """The key of the user's group, if this group runs parts of that group's operations."""
        self.topology = find_topology(transport) if topology is None else topology
        self.one_node = len(self.topology.nodes) == 1
        self.p2p = transport.space(Space.MESSAGES)
        self._context: NodeContext | None = None
        self._presence = parents
        self._stall_check: StallCheck | None = None
        self._long_wait_check = None if within is None else within._stall_check  # the check used in long waits
        if within is None and self.size > 1 and self.config.check != "never":
            self._long_wait_check = self._stall_check = StallCheck(transport.space(Space.CHECKS), name)
        self._standing = GroupStatus(
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
        # The progress thread must neither keep the group alive nor outlive it.
        self.progress = Progress(make_weak_method(self._standing.abandon), self.journal)
        weakref.finalize(self, self.progress.close).atexit = False
        self._programs = Programs(transport, self.hierarchy, self._calls, self.journal, self)
        # Bound directly, which saves a Python frame: every call that uses messages goes through these.
        self.perform_call, self.execute = self._calls.perform, self._programs.execute
        self.gather_objects, self.gather_in_node = self._programs.gather_objects, self._programs.gather_in_node
        self._memories = Memories(self.hierarchy, self.gather_in_node, self.gather_objects)
        self.symmetric = self._memories.host
        runtime.groups.add(self)
        runtime.recording.add(self.progress)
        self._resources: list[Closable] = [transport] if within is None else []
        noted = f"{runtime.token}.{self.key}", self.size
        self._retire = weakref.finalize(self, _retire, self._standing, runtime.retired, noted, self._resources)
        self._retire.atexit = False

    def __repr__(self) -> str:
        return f"<Group {self.name}: rank {self.rank} of {self.size}>"

    # Resources

    @property
    def native(self) -> Any:
        """The underlying mpi4py communicator, or None without MPI."""
        return self.transport.native

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks of the group share one board."""
        return self.one_node and self.size > 1 and self.config.node_path

    @property
    def is_hierarchical(self) -> bool:
        """Whether there are several nodes, some with several ranks that share memory."""
        return not self.one_node and self.config.node_path and not self.topology.is_flat

    @property
    def board(self) -> NodeBoard | None:
        """The board of this rank's node; None until it is created."""
        return self._standing.board

    @property
    def is_open(self) -> bool:
        """Whether the group has created its board."""
        return self._context is not None

    def open(self) -> NodeContext:
        """Return the context of collectives within this node. The first call is collective, within an operation."""
        if self._context is None:
            board = self._standing.board = NodeBoard(
                self.hierarchy.node,
                self.gather_in_node,
                slot_bytes=self.config.slot_kib * 1024,
                spins=self.runtime.spins,
                members=self.hierarchy.ranks,
                peer_reads=self.config.peer_reads,
            )
            board.enter(self.watch("set-up of shared memory"))  # from here on the board shows failures
            self._calls.use_board(board)
            self._presence = Liveness(board)
            self._standing.is_open = True
            completion = Completion(
                self.name, self.rank, self.one_node, self._standing, self._calls, self.progress, self
            )
            places, complete, abandon = self.symmetric.places, completion.complete, self._standing.abandon
            self._context = NodeContext(board, self.progress, places, complete, abandon)
        return self._context

    def prepare(self) -> None:
        """Create now the resources that the first collective would create. Collective, before any other operation."""
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
        """Return the group of a transport that was split from this group's transport. Not collective.

        private: it runs parts of this group's operations, and this group keeps the transport.
        """
        members = range(self.size) if transport is self.transport else transport.members
        topology = Topology.of([self.topology.node(member) for member in members])
        parents = None if self._presence is None else self._presence.among(members)
        within, ranks = self if private else None, tuple(self.ranks[member] for member in members)
        return Group(
            transport, self.runtime, name, key=key, topology=topology, parents=parents, within=within, ranks=ranks
        )

    def attach(self, part: GroupPart) -> None:
        """Attach a part, such as the group's channels, that must end with the group."""
        self._standing.attach(part)

    def end_with(self, part: Closable) -> None:
        """Close a part once all ranks have dropped the group: other ranks may need it after this one leaves."""
        self._resources.append(part)

    def halt(self) -> None:
        """Disable the group in a forked child."""
        self._standing.halt()
        self.progress.abandon()

    @property
    def named_memory(self) -> bool:
        """Whether the ranks of this node can share memory only by name; False until a board has shown it."""
        return self._presence is not None and self._presence.board.named_memory

    # Waiting, and messages within operations

    def watch(self, text: str, peers: Collection[int] | None = None) -> Watchdog:
        """Return the watchdog for one wait: for `peers`, or for all ranks in a collective (None)."""
        stall_check = self._long_wait_check if peers is None and not (self.is_open and self.one_node) else None
        return Watchdog(
            self.runtime,
            self._presence,
            self.rank,
            f"{self.name}: {self.purpose}: {text}" if self.purpose else f"{self.name}: {text}",
            peers,
            stall_check,
            explain=self.explain,
            last_calls=self.last_calls,
            group=self.key,
        )

    def last_calls(self) -> str:
        """Return this rank's last calls in the group, as text to append to a message; "" if recording is off.

        Also "" for a group with internal calls only: its speaker reports them (`speak_for`).
        """
        return "" if self.explain is not None else self.runtime.recording.last_calls(self.name)

    def on_wait(self, text: str) -> WaitHook:
        """Return a hook for many waits. It makes a new watchdog for each long wait; short waits need none."""
        return Waiting(self, text)

    @property
    def posted(self) -> Posted | None:
        """A callback for each posted round of messages; None if the operation is not recorded."""
        return self._programs.posted

    # Operations, in launch order

    def run(self, operation: Operation) -> Any:
        """Run an operation after all earlier launches, and return its value."""
        execute = partial(self.perform, operation)
        if operation.must_match and self.size > 1:
            value = self.progress.run_uninterrupted(operation.text, execute)
        else:
            value = Task(self.progress, operation.text, execute).now(None, None)
        return value if operation.finish is None else operation.finish(value)

    def start(self, operation: Operation) -> Work:
        """Start an operation, to run after all earlier launches."""

        def run() -> Any:
            value = self.perform(operation)
            return value if operation.finish is None else operation.finish(value)

        return self.progress.start(operation.text, run)

    def perform(self, operation: Operation) -> Any:
        """Run an operation in its turn: see `CallSequence.perform`."""
        return self.perform_call(operation.text, operation.run, must_match=operation.must_match)

    @property
    def call_number(self) -> int:
        """The number of the last call, from 1, the same on all ranks; calls that did not match count too."""
        return self._calls.number

    @property
    def history(self) -> int:
        """Hash of all calls so far that use messages; their messages carry it."""
        return self._calls.history

    def different(self, text: str) -> MismatchError:
        """Return the error for a message whose history hash shows that the sender's calls so far differ."""
        return self._calls.different(text)

    def is_awaited(self) -> bool:
        """Return whether a rank is seen to have started a collective that this rank has not reached. Never blocks.

        Between nodes it is not always seen: only ranks that receive the collective's first messages see it.
        """
        if (board := self.board) is not None and board.is_ahead():
            return True
        if self.one_node and self.is_open:
            return False
        return self.transport.progress()

    # Failures

    @property
    def failure(self) -> CommlibError | None:
        """The error with which the group has failed: its ranks are out of step, and it runs no more calls."""
        return self._standing.failure

    def raise_failure(self, text: str) -> NoReturn:
        """Raise the group's failure again, with a note that the call `text` does not run because of it."""
        self._standing.raise_failure(text)

    def abandon(self, text: str, error: BaseException) -> None:
        """Mark the group as failed after an exception interrupted a call: see `GroupStatus.abandon`."""
        self._standing.abandon(text, error)

    def fail(self, error: CommlibError) -> None:
        """Mark the group as failed after an error outside its calls, and notify the other ranks. Idempotent."""
        self._standing.fail(error)

    def speak_for(self, explain: Callable[[float, list[int]], str]) -> None:
        """Let the caller speak for a group that has internal calls only: report its long waits and its failure.

        explain: formats the warning about a long wait. The caller reports a failure to the other ranks, by `leave`.
        """
        self.explain = explain
        self._standing.is_reported = True

    # The end

    def leave(self, reason: str = "", deadline: float | None = None) -> str:
        """Tell the other ranks that this rank makes no more calls: it has left or, with a reason, failed.

        deadline: until when (`time.monotonic`) to wait for ranks that leave too; by default a moment. Returns a text if
        some of them are known to have made different calls, else "".
        """
        return self._standing.leave(reason, deadline, history=self._calls.history)

    def announce(self, reason: str = "") -> None:
        """Tell the other ranks the same as `leave`, without waiting."""
        self._standing.announce(reason, history=self._calls.history)

    def close(self) -> None:
        """Release all resources. Collective; call it when no rank uses the group any more.

        Its transport is freed at the next collective free: see `DeferredFree`.
        """
        self.runtime.groups.discard(self)
        if self.runtime.closing:
            self.progress.close()
        else:
            self.progress.close(f"{self.name} is closed, by close() or by the end of its `with` block")
        self.runtime.poller.forget(self)
        self._standing.close()
        self._memories.close()
        if self.board is not None:
            self.board.close()
        self.retire()

    def retire(self) -> None:
        """Note that this rank has dropped the group; its resources are freed once all its ranks have."""
        self._retire()


def _retire(standing: GroupStatus, retired: DeferredFree, key: Key, parts: Sequence[Closable]) -> None:
    """Note a dropped group, unless messages in it may never be received: MPI would deliver them to its next group."""
    if standing.is_quiet:
        retired.note(key, parts)
