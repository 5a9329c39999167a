"""Group: one rank's member of a group, which runs operations in order. It is independent of the verbs.

A new group costs one MPI split and no shared memory. The first operation that needs its board, node and rail creates
them, on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from commlib.buffers.symmetric_memory import SymmetricMemory
from commlib.devices.protocol import Device
from commlib.errors import CommlibError
from commlib.group.call_check import StallCheck
from commlib.group.call_sequence import CallSequence
from commlib.group.gathering import find_topology
from commlib.group.group_status import GroupPart, GroupStatus, Liveness
from commlib.group.hierarchy import Hierarchy
from commlib.group.local_node import LocalNode
from commlib.group.operation import Operation
from commlib.group.programs import Programs
from commlib.group.waits import Waits
from commlib.node.context import NodeContext
from commlib.observe.journal import Journal
from commlib.runtime.compiled_call import Task
from commlib.runtime.deferred_free import Closable, DeferredFree, Key
from commlib.runtime.process import Runtime
from commlib.runtime.progress import Progress
from commlib.runtime.work import Work
from commlib.topology import Topology
from commlib.transport.base import Space, Transport


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
        self.rank, self.size, self.name, self.key = transport.rank, transport.size, name, key or name
        self.transport, self.runtime, self.config = transport, runtime, runtime.config
        self.ranks: Sequence[int] = range(self.size) if ranks is None else ranks
        self.part_of: str = "" if within is None else within.part_of or within.key
        """The key of the user's group, if this group runs parts of that group's operations."""
        self.topology = find_topology(transport) if topology is None else topology
        self.one_node = len(self.topology.nodes) == 1
        self.hierarchy = Hierarchy.of(transport, self.topology)
        stall_check = None
        if within is None and self.size > 1 and self.config.check != "never":
            stall_check = StallCheck(transport.space(Space.CHECKS), name)
        status = self.status = GroupStatus(
            name, self.rank, stall_check, one_node=self.one_node, is_seen=parents is not None
        )
        long_wait_check = stall_check if within is None else within.status.stall_check
        waits = self.waits = Waits(runtime, status, self.key, parents, long_wait_check)
        journal = Journal(name, self.key, lambda: status.call_number)
        self.progress = Progress(status.abandon, journal)
        # The progress thread must not outlive the group.
        weakref.finalize(self, self.progress.close).atexit = False
        self.programs = Programs(transport, self.hierarchy.node, status, waits, journal)
        self.local_node = LocalNode(runtime, self.hierarchy, status, waits, self.programs, self.progress)
        self.calls = CallSequence(
            transport, self.config, status, waits, self.local_node.open if self.shares_memory else None
        )
        runtime.groups.add(self)
        runtime.recording.add(self.progress)
        self._resources: list[Closable] = [transport] if within is None else []
        noted = f"{runtime.token}.{self.key}", self.size
        self._retire = weakref.finalize(self, _retire, status, runtime.retired, noted, self._resources)
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

    def open(self) -> NodeContext:
        """Return the context of collectives within this node. The first call is collective, within an operation."""
        board, node, progress = self.local_node.open(), self.local_node, self.progress
        return NodeContext(self, board, progress, node.places, node.complete, self.status.abandon)

    def prepare(self) -> None:
        """Create now the resources that the first collective would create. Collective, before any other operation."""
        if self.shares_memory or (self.is_hierarchical and len(self.hierarchy.ranks) > 1):
            self.local_node.open()

    def symmetric_on(self, device: Device) -> SymmetricMemory:
        """Return the symmetric memory of a device."""
        return self.local_node.symmetric_on(device)

    def child(self, transport: Transport, name: str, key: str = "", *, private: bool = False) -> Group:
        """Return the group of a transport that was split from this group's transport. Not collective.

        private: it runs parts of this group's operations, and this group keeps the transport.
        """
        members = range(self.size) if transport is self.transport else transport.members
        topology = Topology.of([self.topology.node(member) for member in members])
        liveness = self.waits.liveness
        parents = None if liveness is None else liveness.among(members)
        within, ranks = self if private else None, tuple(self.ranks[member] for member in members)
        return Group(
            transport, self.runtime, name, key=key, topology=topology, parents=parents, within=within, ranks=ranks
        )

    def attach(self, part: GroupPart) -> None:
        """Attach a part, such as the group's channels, that must end with the group. Its owner keeps it alive."""
        self.status.attach(part)

    def end_with(self, part: Closable) -> None:
        """Close a part once all ranks have dropped the group: other ranks may need it after this one leaves.

        The part must not hold the group.
        """
        self._resources.append(part)

    def halt(self) -> None:
        """Disable the group in a forked child."""
        self.status.halt()
        self.progress.abandon()

    @property
    def named_memory(self) -> bool:
        """Whether the ranks of this node can share memory only by name; False until a board has shown it."""
        return self.waits.liveness is not None and self.waits.liveness.board.named_memory

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
        return self.calls.perform(operation.text, operation.run, must_match=operation.must_match)

    @property
    def call_number(self) -> int:
        """The number of the last call, from 1, the same on all ranks; calls that did not match count too."""
        return self.status.call_number

    def is_awaited(self) -> bool:
        """Return whether a rank is seen to have started a collective that this rank has not reached. Never blocks.

        Between nodes it is not always seen: only ranks that receive the collective's first messages see it.
        """
        if (board := self.status.board) is not None and board.is_ahead():
            return True
        if self.one_node and self.status.is_open:
            return False
        return self.transport.progress()

    # Failures

    @property
    def failure(self) -> CommlibError | None:
        """The error with which the group has failed: its ranks are out of step, and it runs no more calls."""
        return self.status.failure

    def raise_failure(self, text: str) -> NoReturn:
        """Raise the group's failure again, with a note that the call `text` does not run because of it."""
        self.status.raise_failure(text)

    def abandon(self, text: str, error: BaseException) -> None:
        """Mark the group as failed after an exception interrupted a call: see `GroupStatus.abandon`."""
        self.status.abandon(text, error)

    def fail(self, error: CommlibError) -> None:
        """Mark the group as failed after an error outside its calls, and notify the other ranks. Idempotent."""
        self.status.fail(error)

    def speak_for(self, explain: Callable[[float, list[int]], str]) -> None:
        """Let the caller speak for a group that has internal calls only: report its long waits and its failure.

        explain: formats the warning about a long wait. The caller reports a failure to the other ranks, by `leave`.
        """
        self.waits.explain = explain
        self.status.is_reported = True

    # The end

    def leave(self, reason: str = "", deadline: float | None = None) -> str:
        """Tell the other ranks that this rank makes no more calls: it has left or, with a reason, failed.

        deadline: until when (`time.monotonic`) to wait for ranks that leave too; by default a moment. Returns a text if
        some of them are known to have made different calls, else "".
        """
        return self.status.leave(reason, deadline)

    def announce(self, reason: str = "") -> None:
        """Tell the other ranks the same as `leave`, without waiting."""
        self.status.announce(reason)

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
        self.status.close()
        self.local_node.close()
        self.retire()

    def retire(self) -> None:
        """Note that this rank has dropped the group; its resources are freed once all its ranks have."""
        self._retire()


def _retire(standing: GroupStatus, retired: DeferredFree, key: Key, parts: Sequence[Closable]) -> None:
    """Note a dropped group, unless messages in it may never be received: MPI would deliver them to its next group."""
    if standing.is_quiet:
        retired.note(key, parts)
