"""What the ranks of a node do together: compiled calls, prepared once and run as often as wanted.

A `NodeCollective` is one collective of one group on arrays of one size. It is made once for each kind of call, checks
nothing and holds no array: whoever runs it gives it the arrays, which it keeps alive until it has run, also in the
queue.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import Array, kernel_operation, name_of
from commlib.group.operation import signature
from commlib.kernels.host import node as kernels
from commlib.kernels.host.reduce import reduce_function
from commlib.runtime.work import Work
from commlib.schedule.layout import Layout

if TYPE_CHECKING:
    from commlib.group.group import Group

# Up to here one meeting and P reads beat two meetings and one share each.
SMALL_BYTES = 4096

# On the progress thread a wait must leave the core to the training thread.
_BACKGROUND_SPINS, _BACKGROUND_YIELDS = 50, 20

# What a call changes while it runs.
_RUNNING = [
    kernels.STATE,
    kernels.POSITION,
    kernels.PARITY,
    kernels.BACKWARD,
    kernels.SPINS,
    kernels.YIELDS,
    kernels.NAPS,
]

_exchange_arrays = kernels.entry_point(kernels.exchange_arrays, 3)
_begin_exchange = kernels.entry_point(kernels.begin_exchange)
_begin_exchange_of_arrays = kernels.entry_point(kernels.begin_exchange_of_arrays, 3)
_SOURCE, _TARGET = kernels.SOURCE, kernels.TARGET

Range = tuple[int, int]  # (offset, length) in bytes


def ranges(layout: Layout, item_bytes: int) -> list[Range]:
    """Return where each chunk of a layout is, in bytes."""
    return [
        (offset * item_bytes, count * item_bytes) for offset, count in zip(layout.offsets, layout.counts, strict=False)
    ]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank publishes of its array, and where in its result what it takes from each rank goes.

    sends: one part that all ranks take, or one for each rank. takes: what this rank takes from each, in rank order;
    in a reduction only its own entry counts, for all have the same. longest: bytes of the longest part of any rank.
    """

    sends: Sequence[Range]
    takes: Sequence[Range]
    longest: int


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How an exchange, or an all-reduce, combines what it takes: the function of `kernels.arithmetic` for it."""

    dtype: str
    operation: str
    item_bytes: int
    divisor: int

    @classmethod
    def of(cls, dtype: Any, op: str, divisor: int) -> Arithmetic:
        """Return that of a verb's `op`. Raises UsageError if the dtype has no such operation."""
        name = name_of(dtype)
        return cls(name, kernel_operation(name, op), dtype.itemsize, divisor)


class NodeCollective:
    """A compiled call. `bind` makes one for fixed addresses out of one for any."""

    __slots__ = (
        "_acquire",
        "_address",
        "_arrays",
        "_call",
        "_fallback",
        "_group",
        "_keep",
        "_kernel",
        "_progress",
        "_release",
        "_symmetric_kernel",
        "can_begin",
        "text",
    )

    def __init__(self, group: Group, text: str, kernel: Any) -> None:
        assert group.board is not None
        self._group, self.text = group, text
        self._call = group.board.new_call()
        self._call[kernels.SIGNATURE] = signature(text)
        self._kernel, self._address = kernels.entry_point(kernel), self._call.ctypes.data
        self._progress = group.progress
        self._acquire, self._release = group.progress.running.acquire, group.progress.running.release
        self._symmetric_kernel: Any = kernels.exchange_symmetric  # what does the same on symmetric memory
        self.can_begin = False  # it is of one piece
        self._fallback: NodeCollective | None = None
        self._keep: list[Any] = []
        self._arrays: Any = None

    def _set(self, **fields: int) -> None:
        for name, value in fields.items():
            self._call[getattr(kernels, name)] = value

    def _set_tables(self, **tables: Sequence[int]) -> None:
        for name, values in tables.items():
            table = np.array(values, np.int64)
            self._keep.append(table)
            self._call[getattr(kernels, name)] = table.ctypes.data

    def _set_arithmetic(self, arithmetic: Arithmetic | None) -> None:
        if arithmetic is not None:
            function = reduce_function(arithmetic.dtype, arithmetic.operation)
            self._set(REDUCE=function.address, ITEM_BYTES=arithmetic.item_bytes, DIVISOR=arithmetic.divisor)

    @classmethod
    def exchange(
        cls, group: Group, text: str, exchange: Exchange, arithmetic: Arithmetic | None = None
    ) -> NodeCollective:
        """Return an exchange through the slots."""
        call = cls(group, text, kernels.exchange_staged)
        call._set_exchange(exchange, arithmetic)
        return call

    def _set_exchange(self, exchange: Exchange, arithmetic: Arithmetic | None) -> None:
        board = self._group.board
        assert board is not None
        parts = len(exchange.sends)
        self._set_tables(
            SEND_OFFSETS=[offset for offset, _ in exchange.sends],
            SEND_LENGTHS=[length for _, length in exchange.sends],
            RECV_OFFSETS=[offset for offset, _ in exchange.takes],
            RECV_LENGTHS=[length for _, length in exchange.takes],
            INPUTS=[0] * board.size,
            OUTPUTS=[0],
        )
        self._set(
            PARTS=parts,
            PART_BYTES=board.slot_bytes // parts // 64 * 64,
            TAKE=0 if parts == 1 else board.rank,
            LONGEST=exchange.longest,
            ITEM_BYTES=1,
        )
        self._set_arithmetic(arithmetic)

    @classmethod
    def broadcast(cls, group: Group, text: str, nbytes: int, root: int) -> NodeCollective:
        """Return a broadcast of ordinary arrays of `nbytes`."""
        rank, size = group.rank, group.size
        takes = [(0, nbytes if peer == root and peer != rank else 0) for peer in range(size)]
        call = cls.exchange(group, text, Exchange([(0, nbytes if rank == root else 0)], takes, nbytes))
        call._symmetric_kernel = kernels.broadcast_symmetric
        call._set(COUNT=nbytes, ROOT=root)
        return call

    @classmethod
    def all_reduce(cls, group: Group, text: str, count: int, arithmetic: Arithmetic) -> NodeCollective:
        """Return an all-reduce of ordinary arrays of `count` elements."""
        nbytes = count * arithmetic.item_bytes
        assert group.board is not None
        if nbytes <= SMALL_BYTES:
            own = [(0, nbytes)] * group.board.size
            call = cls.exchange(group, text, Exchange([(0, nbytes)], own, nbytes), arithmetic)
            call.can_begin = nbytes <= group.board.slot_bytes
            return call
        call = cls(group, text, kernels.all_reduce_staged)
        call._symmetric_kernel = kernels.all_reduce_symmetric
        call._set_tables(INPUTS=[0] * group.board.size, OUTPUTS=[0] * group.board.size)
        call._set(COUNT=count)
        call._set_arithmetic(arithmetic)
        return call

    def bind(self, source: int, target: int) -> NodeCollective:
        """Return a call that is always run at these addresses."""
        bound = NodeCollective(self._group, self.text, kernels.barrier)
        bound._kernel, bound._keep, bound.can_begin = self._kernel, self._keep, self.can_begin
        fresh = bound._call[_RUNNING].copy()
        bound._call[:] = self._call
        bound._call[_RUNNING] = fresh  # this one may be running now
        bound._call[kernels.SOURCE], bound._call[kernels.TARGET] = source, target
        return bound

    def on_symmetric(
        self, place: int, source: int, target: int, inputs: Sequence[int], outputs: Sequence[int] = (0,)
    ) -> NodeCollective:
        """Return a call on symmetric memory, which runs this one instead should the ranks' places differ.

        `inputs` are the addresses of all ranks' arrays (in an exchange: of the part in each that this rank takes);
        `outputs`, in an all-reduce, those of all ranks' results. `place` must be the same where they correspond.
        """
        bound = self.bind(source, target)
        symmetric = bound.bind(source, target)
        bound._set(COUNTS=0)
        symmetric._kernel = kernels.entry_point(self._symmetric_kernel)
        symmetric._keep = list(self._keep)
        symmetric._set_tables(INPUTS=inputs, OUTPUTS=outputs)
        symmetric._set(PLACE=place)
        symmetric._fallback = bound
        return symmetric

    def __call__(self, arrays: Any = None) -> None:
        """Run it where it is bound to, in this thread, after everything that was launched before.

        `arrays` are what it works on, unless it is `holding` them.
        """
        # Progress.run, written out: a call by name costs a good part of what the meeting of two ranks does.
        try:
            if self._acquire(False):
                if not self._progress.pending:
                    if status := self._kernel(self._address):
                        self._go_on(status)
                    self._release()
                    return
                self._release()
        except BaseException as error:
            self._progress.break_off(self.text, error)
            raise
        self._progress.run_queued(self.text, self.running_on(self._arrays if arrays is None else arrays))

    def between(self, x: Array, target: Array) -> None:
        """Run it, where it is `can_begin`, on contiguous numpy arrays, in this thread, like `__call__`."""
        try:
            if self._acquire(False):
                if not self._progress.pending:
                    if status := _exchange_arrays(self._address, id(x), id(target)):
                        self._go_on(status)
                    self._release()
                    return
                self._release()
        except BaseException as error:
            self._progress.break_off(self.text, error)
            raise
        self._progress.run_queued(self.text, lambda: self.run_at(address_of(x), address_of(target)))

    def at(self, x: Array, target: Array) -> None:
        """Run it on contiguous numpy arrays, in this thread, after everything that was launched before."""
        try:
            if self._acquire(False):
                if not self._progress.pending:
                    call = self._call
                    call[_SOURCE], call[_TARGET] = address_of(x), address_of(target)
                    if status := self._kernel(self._address):
                        self._go_on(status)
                    self._release()
                    return
                self._release()
        except BaseException as error:
            self._progress.break_off(self.text, error)
            raise
        self._progress.run_queued(self.text, lambda: self.run_at(address_of(x), address_of(target)))

    def start_between(self, x: Array, target: Array) -> Work:
        """Begin it, where it is `can_begin`, on contiguous numpy arrays, after everything that was launched before."""

        def begin() -> bool:
            return self._has_ended(_begin_exchange_of_arrays(self._address, id(x), id(target)))

        def finish() -> Any:
            self.run_at(address_of(x), address_of(target))
            return target

        return self._progress.begin(self.text, begin, finish, target)

    def start_at(self, x: Array, target: Array) -> Work:
        """Start it on contiguous arrays, after everything that was launched before."""

        def run() -> Any:
            self.run_at(address_of(x), address_of(target))
            return target

        return self._progress.start(self.text, run)

    def counted(self) -> NodeCollective:
        """Return this one, which is now a call of the user's, and no part of one."""
        self._set(COUNTS=1)
        return self

    def holding(self, arrays: Any) -> NodeCollective:
        """Return the same call for one who always runs it on these arrays, which it keeps alive."""
        same = copy.copy(self)
        same._arrays = arrays
        return same

    def running_on(self, arrays: Any) -> Callable[[], None]:
        """Return what runs it where it is bound to, within an operation, and keeps `arrays` alive."""

        def run(arrays: Any = arrays) -> None:
            self.run()

        return run

    def run(self) -> None:
        """Run it where it is bound to, within an operation."""
        try:
            if self._progress.in_background:
                self._run_in_background()
            elif status := self._kernel(self._address):
                self._go_on(status)
        except BaseException as error:
            self._group.abandon(self.text, error)
            raise

    def run_at(self, source: int, target: int) -> None:
        """Run it on the arrays at these addresses, within an operation."""
        call = self._call
        call[_SOURCE], call[_TARGET] = source, target
        self.run()

    def begin(self) -> bool:
        """Publish this rank's data, and return whether the call is done; if not, `run` goes on with it.

        Only where `can_begin`: what the peers need of this rank is then there, whenever it goes on.
        """
        return self._has_ended(_begin_exchange(self._address))

    def _has_ended(self, status: int) -> bool:
        if status not in (kernels.DONE, kernels.WAITING):
            self._go_on(status)
        return status != kernels.WAITING

    def _go_on(self, status: int) -> None:
        if self._group.complete(self._kernel, self._call, status, self.text) == kernels.APART:
            # Another rank's array is not in symmetric memory, or elsewhere in it: all ranks have seen that.
            (self._fallback or self).run()

    def _run_in_background(self) -> None:
        call = self._call
        spins, yields = call[kernels.SPINS], call[kernels.YIELDS]
        call[kernels.SPINS], call[kernels.YIELDS] = min(spins, _BACKGROUND_SPINS), _BACKGROUND_YIELDS
        try:
            if status := self._kernel(self._address):
                self._go_on(status)
        finally:
            call[kernels.SPINS], call[kernels.YIELDS] = spins, yields
