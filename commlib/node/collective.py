"""NodeCollective: a compiled collective of a node's ranks, for any arrays of one dtype and size.

It is one collective of one group on arrays of one size. Arrays in symmetric memory are used in place; data of other
arrays goes through the slots of the board. The kernels decide this in each call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.execution.reduce_function import ReduceFunction
from commlib.kernels.fields import call_routes
from commlib.kernels.fields import node as kernels
from commlib.kernels.fields.arrays import are_where_expected
from commlib.kernels.machine_code import address as code_address
from commlib.kernels.machine_code import entry_point
from commlib.node.context import NodeContext
from commlib.node.signature import signature
from commlib.runtime.compiled_call import CompiledCall, Plan
from commlib.schedule.layout import Layout

# Up to this size one barrier and reading all P arrays is faster than two barriers and reducing one share each.
SMALL_BYTES = 4096

# On the progress thread a wait must yield the core to the training thread.
_BACKGROUND_SPINS, _BACKGROUND_YIELDS = 50, 20

_run, _run_on_arrays = entry_point("call_routes.run"), entry_point("call_routes.run_on_arrays", 3)
_begin, _begin_on_arrays = entry_point("call_routes.begin"), entry_point("call_routes.begin_on_arrays", 3)
_SOURCE, _TARGET = kernels.SOURCE, kernels.TARGET
# The fields that a running call changes.
_RUNNING = [
    kernels.STATE,
    kernels.POSITION,
    kernels.PARITY,
    kernels.BACKWARD,
    kernels.SPINS,
    kernels.YIELDS,
    kernels.NAPS,
    kernels.NAP_MICROSECONDS,
]
_SPINS_AND_YIELDS = slice(kernels.SPINS, kernels.YIELDS + 1)
ARRAYS_ARE_WHERE_EXPECTED = are_where_expected()


@contextmanager
def yield_core(calls: Any) -> Iterator[None]:
    """Make calls, one row each, wait politely within the block, as the progress thread must."""
    patience = calls[:, _SPINS_AND_YIELDS]
    usual = patience.copy()
    patience[:] = min(usual[0, 0], _BACKGROUND_SPINS), _BACKGROUND_YIELDS
    try:
        yield
    finally:
        patience[:] = usual


Range = tuple[int, int]  # (offset, length) in bytes
NOTHING: Range = (0, 0)


def ranges(layout: Layout, item_bytes: int) -> list[Range]:
    """Return the range of each chunk of a layout, in bytes."""
    return [
        (offset * item_bytes, count * item_bytes) for offset, count in zip(layout.offsets, layout.counts, strict=False)
    ]


@dataclass(frozen=True, slots=True)
class Exchange:
    """The parts of its array that one rank publishes, and the ranges in its result for the parts of each rank.

    sends: one part that all ranks read, or one part per rank. takes: the range for the part from each rank, in rank
    order; in a reduction only this rank's entry counts, because all are equal. longest: bytes of the longest part of
    any rank. offsets: byte offset in each rank's array, of `nbytes`, of the part for this rank; None: do not look
    whether the arrays are symmetric. in_target: these arrays are the results, and the ranks publish parts of them.
    operands: of a reduction, the number of ranks, from the first on, whose parts are combined; None: all.
    """

    sends: Sequence[Range]
    takes: Sequence[Range]
    longest: int
    offsets: Sequence[int] | None = None
    nbytes: int = 0
    in_target: bool = False
    operands: int | None = None

    @classmethod
    def broadcast(cls, nbytes: int, root: int, rank: int, size: int) -> Exchange:
        """Return the exchange of a broadcast."""
        takes = [(0, nbytes) if peer == root != rank else NOTHING for peer in range(size)]
        return cls([(0, nbytes if rank == root else 0)], takes, nbytes, [0] * size, nbytes)


class NodeCollective(CompiledCall):
    """A compiled collective of a node's ranks. counted: it is a call of the user, not a part of another call."""

    __slots__ = ("_calls", "_context", "_keep", "_route")

    def __init__(self, context: NodeContext, text: str, kind: int, *, counted: bool) -> None:
        super().__init__(context.progress, text)
        self._context = context
        self._calls = np.stack([context.board.new_call() for _ in range(2)])  # through the slots; on symmetric memory
        self._route = np.zeros(call_routes.ROUTE_FIELDS, np.int64)
        self._address = address_of(self._route)
        self._keep: list[Any] = []
        if ARRAYS_ARE_WHERE_EXPECTED:
            self._step = _run_on_arrays
        staged, symmetric = (address_of(call) for call in self._calls)
        self._set(SIGNATURE=signature(text), COUNTS=int(counted))
        self._set_route(KIND=kind, STAGED=staged, SYMMETRIC=symmetric, RANKS=context.board.size, COUNTED=int(counted))

    @property
    def kernel(self) -> int:
        return code_address("call_routes.run_on_arrays") if ARRAYS_ARE_WHERE_EXPECTED else 0

    def _set(self, **fields: int) -> None:
        for name, value in fields.items():
            self._calls[:, getattr(kernels, name)] = value

    def _set_route(self, **fields: int) -> None:
        for name, value in fields.items():
            self._route[getattr(call_routes, name)] = value

    def _set_tables(self, **tables: Sequence[int]) -> None:
        for name, values in tables.items():
            self._set(**{name: self._table(values)})

    def _table(self, values: Sequence[int]) -> int:
        table = np.array(values, np.int64)
        self._keep.append(table)
        return address_of(table)

    def _set_reduce_op(self, op: ReduceFunction | None) -> None:
        if op is not None:
            self._set(REDUCE=op.address, ITEM_BYTES=op.item_bytes, DIVISOR=op.divisor)

    @classmethod
    def exchange(
        cls,
        context: NodeContext,
        text: str,
        exchange: Exchange,
        op: ReduceFunction | None = None,
        *,
        counted: bool = False,
    ) -> NodeCollective:
        """Return an exchange."""
        call = cls(context, text, call_routes.EXCHANGE, counted=counted)
        call._set_exchange(exchange, op)
        if exchange.offsets is not None and exchange.nbytes > SMALL_BYTES:
            looked_up = _TARGET if exchange.in_target else _SOURCE
            call._set_route(PLACES=context.places, NBYTES=exchange.nbytes, LOOKED_UP=looked_up)
            if any(exchange.offsets):
                call._set_route(OFFSETS=call._table(exchange.offsets))
        return call

    def _set_exchange(self, exchange: Exchange, op: ReduceFunction | None) -> None:
        board = self._context.board
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
            OPERANDS=board.size if exchange.operands is None else exchange.operands,
        )
        self._set_reduce_op(op)

    @classmethod
    def broadcast(cls, context: NodeContext, text: str, nbytes: int, root: int) -> NodeCollective:
        """Return a broadcast of `nbytes`, in place."""
        rank, size = context.board.rank, context.board.size
        call = cls.exchange(context, text, Exchange.broadcast(nbytes, root, rank, size), counted=True)
        call._set_route(KIND=call_routes.BROADCAST)
        call._set(COUNT=nbytes, ROOT=root)
        return call

    @classmethod
    def all_reduce(cls, context: NodeContext, text: str, count: int, op: ReduceFunction) -> NodeCollective:
        """Return an all-reduce of `count` elements."""
        nbytes, board = count * op.item_bytes, context.board
        if nbytes <= SMALL_BYTES:
            exchange = Exchange([(0, nbytes)], [(0, nbytes)] * board.size, nbytes)
            call = cls.exchange(context, text, exchange, op, counted=True)
            call.can_begin = nbytes <= board.slot_bytes
            return call
        call = cls(context, text, call_routes.ALL_REDUCE, counted=True)
        call._set_route(PLACES=context.places, NBYTES=nbytes, LOOKED_UP=_SOURCE)
        call._set_tables(INPUTS=[0] * board.size, OUTPUTS=[0] * board.size)
        call._set(COUNT=count)
        call._set_reduce_op(op)
        return call

    @classmethod
    def barrier(cls, context: NodeContext, text: str) -> NodeCollective:
        """Return a barrier of all ranks."""
        return cls(context, text, call_routes.BARRIER, counted=True)

    def bind(self, x: Any, target: Any, *, value: Any = None, deliver: Callable[[Any], Any] | None = None) -> Plan:
        bound = copy.copy(self)
        bound._calls, bound._route = self._calls.copy(), self._route.copy()
        bound._calls[:, _RUNNING] = self._context.board.new_call()[_RUNNING]  # `self` may be running now
        bound._calls[0, _SOURCE], bound._calls[0, _TARGET] = address_of(x), address_of(target)
        bound._address = address_of(bound._route)
        staged, symmetric = (address_of(call) for call in bound._calls)
        bound._set_route(STAGED=staged, SYMMETRIC=symmetric, ACTIVE=0)
        return Plan(bound, x, target, value, deliver, code_address("call_routes.run"))

    def perform(self, x: Any, target: Any) -> Any:
        self.run_at(address_of(x), address_of(target))
        return target

    def run_at(self, source: int, target: int) -> None:
        """Run the collective within an operation, on the arrays at these addresses."""
        self._calls[0, _SOURCE], self._calls[0, _TARGET] = source, target
        try:
            if self._progress.in_background:
                self._run_in_background()
            elif status := _run(self._address):
                self._complete(status)
        except BaseException as error:
            self._context.abandon(self.text, error)
            raise

    def begin(self, x: Any, target: Any) -> bool:
        """Publish this rank's data, and return whether the call is done; if not, `perform` continues it."""
        if ARRAYS_ARE_WHERE_EXPECTED:
            status = _begin_on_arrays(self._address, id(x), id(target))
        else:
            self._calls[0, _SOURCE], self._calls[0, _TARGET] = address_of(x), address_of(target)
            status = _begin(self._address)
        if status not in (kernels.DONE, kernels.WAITING):
            self._complete(status)
        return status != kernels.WAITING

    def _go_on(self, status: int, x: Any, target: Any) -> Any:
        if self._step is _run_on_arrays:
            self._complete(status)
        else:
            self.run_at(address_of(x), address_of(target))
        return target

    def _complete(self, status: int) -> None:
        self._context.complete(_run, self._address, self._calls, status, self.text)

    def _run_in_background(self) -> None:
        with yield_core(self._calls):
            if status := _run(self._address):
                self._complete(status)
