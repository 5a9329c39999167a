"""Group: one rank's place among others, and how operations run there, in order. It knows no verb.

A group costs one split of MPI's and no shared memory until it is used. Its board, its nodes and its rails are made by
the first operation that needs them, which all ranks run.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from math import inf
from time import monotonic
from typing import Any, NoReturn, Protocol

from commlib import forks
from commlib.arguments import integer
from commlib.buffers.symmetric import SymmetricMemory
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.errors import CommlibError, MismatchError, ShutdownError, UsageError
from commlib.execution.reduce_op import ReduceOp
from commlib.execution.streaming import Hook, Posted, Region, execute, nothing
from commlib.group.call_check import StallCheck, compare_messages, explain_difference, mismatch
from commlib.group.gathering import find_topology, gather_objects
from commlib.group.hierarchy import Hierarchy
from commlib.group.operation import Operation
from commlib.group.presence import Presence
from commlib.group.waits import Waits
from commlib.kernels.host.node import BROKEN, MISMATCH
from commlib.node.board import LEFT, Call, Kernel, NodeBoard
from commlib.node.context import NodeContext
from commlib.observe.journal import Journal
from commlib.runtime.compiled import Task
from commlib.runtime.process import PARTING, Runtime
from commlib.runtime.progress import Progress
from commlib.runtime.retired import Closable
from commlib.runtime.watchdog import Watchdog
from commlib.runtime.work import Work
from commlib.schedule.ir import Program
from commlib.signature import follow, signature
from commlib.topology import Topology
from commlib.transport.base import Space, Transport, WaitHook

log = logging.getLogger("commlib")


class Attached(Protocol):
    """What ends with a group."""

    def leave(self, reason: str) -> None:
        """End on this rank: the group has failed, for a reason, or leaves."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...

    def halt(self) -> None:
        """Let nothing move any more, in a forked child."""
        ...


class Group:
    """One rank's end of a group.

    key: a name that no other group of the job has. topology: which of its ranks share a node; by default the ranks find
    out, collectively. parents: who sees whether processes of this group live, until it has a board of its own. within:
    the group whose operations this one's are parts of; it owns the transport, and answers for what they wait for.
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
    ) -> None:
        self.rank, self.size, self.name = transport.rank, transport.size, name
        self.transport, self.runtime, self.config = transport, runtime, runtime.config
        self.failure: CommlibError | None = None  # after it the group's ranks are out of step
        self.explain: Callable[[float, list[int]], str] | None = None
        """Words the warning about a long wait, for a group whose calls are not its user's; `leave` then tells the other
        ranks of a failure, in words of its caller's."""
        self.key = key or name
        self.journal = Journal(name, self.key, _call_number(self))
        self.progress = Progress(_weakly(self.abandon), self.journal)  # its thread must not keep the group alive
        weakref.finalize(self, self.progress.close).atexit = False  # its thread must not outlive the group
        self.topology = find_topology(transport) if topology is None else topology
        self.one_node = len(self.topology.nodes) == 1
        self.p2p = transport.space(Space.MESSAGES)
        self.board: NodeBoard | None = None
        self._context: NodeContext | None = None
        self._needs_board = self.shares_memory
        self._presence = parents
        self._sequence = 0
        self._history = 0
        """A hash of all calls so far whose data travels by messages. Every message carries it, in its tag or beside its
        data, so that ranks which once called different things never take each other's data for what they expect."""
        self._comparing = {"never": 0.0, "auto": self.config.check_first, "always": inf}[self.config.check]
        """Up to which call the ranks compare their calls before they send data, where they do not meet on a board."""
        self._stall_check: StallCheck | None = None
        self._asked = None if within is None else within._stall_check  # in long waits
        if within is None and self.size > 1 and self.config.check != "never":
            self._asked = self._stall_check = StallCheck(transport.space(Space.CHECKS), name)
        self.symmetric = SymmetricMemory(self.hierarchy.place, self._share, self.gather_objects)
        self._symmetric_on: dict[Any, SymmetricMemory] = {HOST: self.symmetric}
        runtime.groups.add(self)
        runtime.recording.add(self.progress)
        self._attached: list[Attached] = []
        self._made_of: list[Closable] = [transport] if within is None else []
        noted = f"{runtime.token}.{self.key}", self.size
        self._retire = weakref.finalize(self, runtime.retired.note, noted, self._made_of)
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
    def is_open(self) -> bool:
        """Whether the group has the board that it works on, if any."""
        return self._context is not None

    def open(self) -> NodeContext:
        """Return what collectives of this rank's node work with. Collective at first: within an operation."""
        if self._context is None:
            self.board = NodeBoard(
                self.hierarchy.node,
                self._gather_in_node,
                slot_bytes=self.config.slot_kib * 1024,
                spins=self.runtime.spins,
                members=self.hierarchy.ranks,
            )
            self.board.enter(self.watch("set-up of shared memory"))  # from here on the board tells of a failure
            self.board.calls = self._sequence
            self._presence = Presence(self.board)
            if self.one_node and self.config.check != "never":
                self._comparing = inf
            self._needs_board = False
            self._context = NodeContext(self.board, self.progress, self.symmetric.places, self.complete, self.abandon)
        return self._context

    def prepare(self) -> None:
        """Make now what collectives would make when they are first called. Collective, before anything else is."""
        if self.shares_memory or (self.is_hierarchical and len(self.hierarchy.ranks) > 1):
            self.open()

    @cached_property
    def hierarchy(self) -> Hierarchy:
        """This rank's node and rail."""
        return Hierarchy.of(self.transport, self.topology)

    def _share(self, nbytes: int) -> Any:
        return self.hierarchy.node.share(nbytes, self._gather_in_node)

    def symmetric_on(self, device: Device) -> SymmetricMemory:
        """Return the symmetric memory of a device."""
        found = self._symmetric_on.get(device)
        if found is None:
            place, gather = self.hierarchy.place, self._gather_in_node
            found = SymmetricMemory(place, lambda n: device.share(n, place, gather), self.gather_objects)
            self._symmetric_on[device] = found
        return found

    def child(self, transport: Transport, name: str, key: str = "", *, private: bool = False) -> Group:
        """Return the group of a transport that was split from this one's. Not collective.

        private: what it runs are parts of this group's operations; the transport stays this group's.
        """
        members = range(self.size) if transport is self.transport else transport.members
        topology = Topology.of([self.topology.node(member) for member in members])
        parents = None if self._presence is None else self._presence.among(members)
        within = self if private else None
        return Group(transport, self.runtime, name, key=key, topology=topology, parents=parents, within=within)

    def attach(self, part: Attached) -> None:
        """Let what has an end of its own, its channels for example, end with the group."""
        self._attached.append(part)

    def end_with(self, part: Closable) -> None:
        """Let a part be closed once all ranks have dropped the group: others may still need it when this one leaves."""
        self._made_of.append(part)

    def halt(self) -> None:
        """Let nothing run in this forked child."""
        self.failure = forks.refusal(self.name)
        for part in self._attached:
            part.halt()
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
            f"{self.name}: {text}",
            peers,
            stall_check,
            explain=self.explain,
            did_last=self.did_last,
        )

    def did_last(self) -> str:
        """Return what this rank did last in the group, to be appended to a message; "" if nothing is recorded.

        Also where its calls are not its user's: whoever explains them says what was.
        """
        return "" if self.explain is not None else self.runtime.recording.did_last(self.name)

    def on_wait(self, text: str) -> WaitHook:
        """Return a hook for many waits, which watches each anew: what a wait that does not last can do without."""
        return Waits(self, text)

    def execute(
        self,
        program: Program,
        blocks: Sequence[Sequence[Region]],
        text: str,
        reduce_op: ReduceOp | None = None,
        *,
        part: int = 0,
        transport: Transport | None = None,
        before: Hook = nothing,
        after: Hook = nothing,
    ) -> None:
        """Run a program over blocks of the data, by messages of the group or of `transport`: see `streaming.execute`.

        `part` numbers the programs of one call.
        """
        execute(
            program,
            blocks,
            transport or self.transport,
            tag=self._history + signature(text) + part * 0x85EBCA6B,
            on_wait=self.watch(text),
            reduce_op=reduce_op,
            before=before,
            after=after,
            posted=self.posted,
        )

    @property
    def posted(self) -> Posted | None:
        """What is to be told of each round of messages; None if the operation is not recorded."""
        record = self.journal.current
        if record is None:
            return None
        return lambda block, number: record.round(f"round {number + 1} of block {block + 1} posted")

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the picklable objects of all ranks, by messages, within an operation."""
        return gather_objects(value, self.transport, self.execute)

    def _gather_in_node(self, value: Any) -> list[Any]:
        return gather_objects(value, self.hierarchy.node, self.execute)

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
        """Run an operation whose turn has come: compare it with the other ranks' where that is due, then do it."""
        return self.perform_call(operation.text, operation.run, meets=operation.meets)

    def perform_call(self, text: str, run: Callable[..., Any], *arguments: Any, meets: bool = False) -> Any:
        """Do the same for a call that is given by its text and what does it."""
        if self.failure is not None:
            self.raise_failure(text)
        board = self.board
        number = 1 + (self._sequence if board is None or not self.one_node else board.calls)
        # A group's first collective makes its board; what only sets up (split, empty) needs none.
        opening = self._needs_board and not meets
        sending = False
        try:
            self._sequence += 1
            if board is not None:
                board.calls = number
            if self._stall_check is not None:
                self._stall_check.note(self._sequence, text)
            if meets or opening or self._sequence <= self._comparing:
                self._compare(text, meets or opening)
            sending = True
            if opening:
                self.open()
            self._history = follow(self._history, text)
            return run(*arguments)
        except BaseException as error:
            self._note(text, error, out_of_step=sending)  # else all ranks have it, and nothing was sent
            raise
        finally:
            if self.board is not None:
                self.board.calls = number  # whatever its parts have counted

    def _compare(self, text: str, meets: bool) -> None:
        if self.size == 1 or (self.config.check == "never" and not meets):
            return
        texts = None
        if self.one_node and self.board is not None:
            if not self.board.meet(signature(text), watch := self.watch(text)):
                texts = self.board.exchange_texts(text, watch)
        else:
            texts = compare_messages(self.transport, self._sequence, text, self.watch(text))
        if texts is not None:
            raise mismatch(self.name, self.call_number, self.rank, texts)

    @property
    def call_number(self) -> int:
        """The number of the last call, from 1: all ranks count alike, mismatches included."""
        return self.board.calls if self.one_node and self.board is not None else self._sequence

    @property
    def history(self) -> int:
        """A hash of the calls so far whose data travels by messages: what their messages carry."""
        return self._history

    def different(self, text: str) -> MismatchError:
        """Return the error of ranks whose calls so far were not the same, as a message with another history told."""
        return explain_difference(self.name, text, self.rank, self.call_number, self._stall_check)

    def is_awaited(self) -> bool:
        """Return whether some rank has begun a collective that this one has not come to.

        It may not see it: between nodes only the ranks that get a message first do. Never blocks.
        """
        if self.board is not None and self.board.is_ahead():
            return True
        if self.one_node and self.is_open:
            return False
        return self.transport.progress()

    # Failures

    def complete(self, kernel: Kernel, argument: int, calls: Call, status: int, text: str) -> int:
        """Finish a kernel that did not end well at once: go on waiting, or say who called what. Return its status."""
        assert self.board is not None
        if self.failure is not None:
            self.raise_failure(text)
        try:
            with self.progress.set_aside():
                if self.journal.current is not None:
                    self.journal.current.round("waits on its node")
                watch = self.watch(text)
                status = self.board.resume(kernel, argument, calls, status, watch)
                if status == MISMATCH:
                    texts = self.board.exchange_texts(text, watch)
                    raise mismatch(self.name, self.call_number, self.rank, texts, self.board.members)
        except BaseException as error:
            self._note(text, error, out_of_step=not self.one_node)  # the other nodes do not know
            raise
        if status == BROKEN:  # another thread's call has failed meanwhile
            self.raise_failure(text)
        return status

    def _note(self, text: str, error: BaseException, *, out_of_step: bool) -> None:
        """Let the group fail with what came out of the call `text`; out_of_step: with a mismatch, too."""
        if not isinstance(error, CommlibError):
            self.abandon(text, error)
        elif out_of_step or not isinstance(error, MismatchError):
            self._fail(error)

    def _fail(self, error: CommlibError) -> None:
        """Let no call of this group run any more, and tell the other ranks: they are out of step."""
        self.failure = error
        for part in self._attached:
            part.leave(f"has given up this group ({type(error).__name__}: {error})")
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

    # The end

    def leave(self, reason: str = "", deadline: float | None = None) -> None:
        """Tell the other ranks that this one comes no more: it has left, or, with a reason, failed.

        deadline: how long (`time.monotonic`) those are waited for that leave with it: a moment, unless it is given.
        """
        self.announce(reason)
        if self._stall_check is None:
            return
        if odd := self._stall_check.part(monotonic() + PARTING if deadline is None else deadline):
            log.error(
                "%s: rank %d and %s made different calls, which no later one brought to light: results may be wrong; "
                "COMMLIB_CHECK=always finds the call that differs",
                self.name,
                self.rank,
                odd,
            )

    def announce(self, reason: str = "") -> None:
        """Tell the other ranks the same, and wait for nobody."""
        for part in self._attached:
            part.leave(reason)
        if self.board is not None:
            self.board.leave(reason or LEFT)
        seen = self.is_open or (self._presence is not None and not reason)  # on a board, this one's or a parent's
        if self._stall_check is not None and not (self.one_node and seen):
            finished = not reason and self.failure is None
            self._stall_check.leave(reason or LEFT, finished=finished, history=self._history if finished else -1)

    def close(self) -> None:
        """Release everything. Collective, and only when no rank uses it any more."""
        self.runtime.groups.discard(self)
        self.progress.close()
        self.runtime.poller.forget(self)
        for part in self._attached:
            part.close()
        for symmetric in self._symmetric_on.values():
            symmetric.close()
        if self.board is not None:
            self.board.close()
        if (retirement := self._retire.detach()) is not None:
            for part in retirement[2][1]:
                part.close()

    def retire(self) -> None:
        """Note that this group is used no more: what it is made of is freed once all its ranks have noted it."""
        if self.failure is None:  # else messages may be under way for ever
            self._retire()


def checked_root(group: Group, verb: str, root: Any) -> int:
    """Return `root` as an int. Raises UsageError unless it is a rank of the group."""
    rank = integer(verb, "root", root)
    if not 0 <= rank < group.size:
        raise UsageError(f"{verb}: root is {root}, but {group.name} has the ranks 0 to {group.size - 1}")
    return rank


def _weakly(method: Callable[[str, BaseException], None]) -> Callable[[str, BaseException], None]:
    """Return the same without a reference to the method's object."""
    weak = weakref.WeakMethod(method)

    def call(text: str, error: BaseException) -> None:
        if (found := weak()) is not None:
            found(text, error)

    return call


def _call_number(group: Group) -> Callable[[], int]:
    """Return what returns the number of the last call, without a reference to the group."""
    weak = weakref.ref(group)
    return lambda: 0 if (found := weak()) is None else found.call_number
