"""Group: what every verb of a group of ranks is made of. `Communicator` adds the verbs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from commlib.agreement import LateCheck, compare_messages, mismatch
from commlib.buffers.symmetric import SymmetricMemory
from commlib.dtypes import Array
from commlib.errors import CommlibError, MismatchError, UsageError
from commlib.executor import Reducer, Region, execute
from commlib.kernels.node import MISMATCH
from commlib.observe.watchdog import Watchdog
from commlib.runtime import Runtime
from commlib.schedule import program
from commlib.schedule.ir import Program
from commlib.schedule.layout import even
from commlib.transport.base import Transport
from commlib.transport.shared import Call, Kernel, NodeBoard
from commlib.verbs import objects
from commlib.verbs.operation import Operation, signature
from commlib.work import Work

Regions = Callable[..., list[Region]]


class Group:
    """One rank's place among others: its transport, the node's board, and how operations run there, in order."""

    def __init__(self, transport: Transport, runtime: Runtime, name: str) -> None:
        self.rank, self.size, self.name = transport.rank, transport.size, name
        self.runtime, self.config = runtime, runtime.config
        self.failure: CommlibError | None = None  # after it the group's ranks are out of step
        self._transport = transport
        self._sequence = 0
        node_transport = transport.split_node()
        self.one_node = node_transport.size == self.size
        self._node_transport = node_transport
        self.mail = transport.split(0, self.rank)  # messages between two ranks, apart from the collectives'
        self.board: NodeBoard | None = None
        if self.one_node and self.size > 1 and self.config.node_path:
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
        return f"<{type(self).__name__} {self.name}: rank {self.rank} of {self.size}>"

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
            tag=signature(text) + self.call_number * 0x9E3779B1 + part,
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
    def call_number(self) -> int:
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
                raise mismatch(self.name, self.call_number, self.rank, self.board.exchange_texts(text, watch))
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
            raise mismatch(self.name, self.call_number, self.rank, texts)

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

    def _gather_quietly(self, value: Any) -> list[Any]:
        return objects.all_gather_object(self, value).run()  # type: ignore[no-any-return]  # within an operation

    def leave(self) -> None:
        """Tell the other ranks that this one comes no more. Never blocks."""
        if self.board is not None:
            self.board.leave()
        if self._late_check is not None and self.failure is None:
            self._late_check.leave()

    def close(self) -> None:
        """Release everything. Collective, and only when no rank uses it any more."""
        self._symmetric.close()
        if self.board is not None:
            self.board.close()
        self._node_transport.close()
        if self.mail is not None:
            self.mail.close()
        self._transport.close()
