"""UnevenExchange: all_to_all_v among a node's ranks, compiled once for any arrays and counts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.errors import CommlibError, MismatchError, TransportError, UsageError
from commlib.kernels.fields import node, uneven_exchange
from commlib.kernels.machine_code import address as code_address
from commlib.kernels.machine_code import entry_point
from commlib.node.collective import ARRAYS_ARE_WHERE_EXPECTED, yield_core
from commlib.node.context import NodeContext
from commlib.node.signature import signature
from commlib.runtime.compiled_call import CompiledCall, Plan

_run, _run_on_arrays = entry_point("uneven_exchange.run"), entry_point("uneven_exchange.run_on_arrays", 3)

SPLITS = uneven_exchange.SPLITS
"""The index in a call's parts of the rows sent to each rank, followed by the rows received from each."""

_WRONG = uneven_exchange.UNEQUAL, uneven_exchange.UNFIT, uneven_exchange.UNREADABLE


class UnevenExchange(CompiledCall):
    """A compiled all_to_all_v of a node's ranks. known: each rank gives the numbers of rows to receive.

    It runs on an array and on a call's *parts*, numbers that describe the call (see `kernels.host.uneven_exchange`).
    Its value is the parts, or the result array if the call allocates one: rows of shape `row` with `row_bytes` each.
    None means that the arguments are inconsistent and nothing was done.
    """

    __slots__ = ("_call", "_context", "_fields", "_group", "_known", "_out", "_peers", "_ranges", "_row", "_row_bytes")

    def __init__(
        self,
        context: NodeContext,
        group: str,
        text: str,
        row: tuple[int, ...],
        row_bytes: int,
        *,
        known: bool,
        counted: bool = True,
    ) -> None:
        super().__init__(context.progress, text)
        board = context.board
        self._context, self._group, self._known, self._row, self._row_bytes = context, group, known, row, row_bytes
        self._out: Array | None = None
        self._call = board.new_call()[np.newaxis]
        self._call[0, [node.SIGNATURE, node.COUNTS]] = signature(text), counted
        self._fields, self._ranges = np.zeros(uneven_exchange.FIELDS, np.int64), np.zeros(4, np.int64)
        self._peers = np.zeros((board.size, uneven_exchange.PEER_FIELDS), np.int64)
        for field, value in (
            (uneven_exchange.CALL, address_of(self._call)),
            (uneven_exchange.PLACES, context.places),
            (uneven_exchange.ROW, row_bytes),
            (uneven_exchange.KNOWN, known),
            (uneven_exchange.READS, board.reads_peers),
            (uneven_exchange.PROCESSES, address_of(board.processes)),
            (uneven_exchange.PEERS, address_of(self._peers)),
            (uneven_exchange.RANGES, address_of(self._ranges)),
        ):
            self._fields[field] = value
        self._address = address_of(self._fields)
        if ARRAYS_ARE_WHERE_EXPECTED:
            self._step = _run_on_arrays

    def bind(self, x: Any, target: Any, *, value: Any = None, deliver: Callable[[Any], Any] | None = None) -> Plan:
        return Plan(self._clone(), x, target, value, deliver)

    def bind_to(self, x: Array, parts: Array, out: Array, value: Any) -> Plan:
        """Return a plan of it on fixed arrays, with the result `value`; the parts hold the `id` of the result array."""
        bound = self._clone()
        bound._out = out
        bound._place(x, parts)
        return Plan(bound, x, parts, value, None, code_address("uneven_exchange.run"))

    def _clone(self) -> UnevenExchange:
        """Return another instance, which can run at the same time."""
        return UnevenExchange(self._context, self._group, self.text, self._row, self._row_bytes, known=self._known)

    def perform(self, x: Any, target: Any) -> Any:
        self._place(x, target)
        try:
            if self._progress.in_background:
                with yield_core(self._call):
                    return self._end(_run(self._address), x, target)
            return self._end(_run(self._address), x, target)
        except BaseException as error:
            self._context.abandon(self.text, error)
            raise

    def _place(self, x: Array, parts: Array) -> None:
        out = int(parts[uneven_exchange.OUT])
        target = address_of(ctypes.cast(out, ctypes.py_object).value) if out else 0
        self._fields[[uneven_exchange.SOURCE, uneven_exchange.PARTS, uneven_exchange.TARGET]] = (
            address_of(x),
            address_of(parts),
            target,
        )

    def _go_on(self, status: int, x: Any, target: Any) -> Any:
        return self._end(status, x, target) if ARRAYS_ARE_WHERE_EXPECTED else self.perform(x, target)

    def _end(self, status: int, x: Array, parts: Array) -> Any:
        """Continue a kernel that returned `status` until it is done, and return the value of the call."""
        value = parts
        while status != node.DONE:
            if status == uneven_exchange.SIZED:
                value = np.empty((int(parts[uneven_exchange.OUT_ROWS]), *self._row), x.dtype)
                self._fields[uneven_exchange.TARGET] = address_of(value)
                status = _run(self._address)
            elif status == uneven_exchange.REFUSED:
                return None
            elif status in _WRONG:
                raise self._wrong(status, parts)
            else:
                status = self._context.complete(_run, self._address, self._call, status, self.text)
        return value

    def _wrong(self, status: int, parts: Array) -> CommlibError:
        """Return the error that this rank has found in a finished call; other ranks may have found none."""
        board, begin = self._context.board, uneven_exchange.SPLITS
        splits, takes = parts[begin : begin + board.size].tolist(), parts[begin + board.size :].tolist()
        if status == uneven_exchange.UNEQUAL:
            received, expected = self._peers[
                :, [uneven_exchange.RECEIVED_ROWS, uneven_exchange.EXPECTED_ROWS]
            ].T.tolist()
            return make_counts_error(self._group, board.rank, received, takes, splits, expected)
        if status == uneven_exchange.UNFIT:
            return make_length_error(self._group, board.rank, takes, int(parts[uneven_exchange.OUT_ROWS]))
        return TransportError(
            f"{self._group}: {self.text}: rank {board.rank} cannot read the memory of another rank any more: "
            "set COMMLIB_PEER_READS=0"
        )


def make_counts_error(
    group: str, rank: int, received: Sequence[int], takes: Sequence[int], splits: Sequence[int], expected: Sequence[int]
) -> MismatchError:
    """Return the error for different counts: rows received and expected per rank, sent and expected there."""
    lines = [
        f"  rank {peer} sent {_rows(here)} to rank {rank}, which expected {there}"
        for peer, (here, there) in enumerate(zip(received, takes, strict=True))
        if here != there
    ]
    lines += [
        f"  rank {rank} sent {_rows(here)} to rank {peer}, which expected {there}"
        for peer, (here, there) in enumerate(zip(splits, expected, strict=True))
        if here != there and peer != rank
    ]
    return MismatchError(
        f"{group}: all_to_all_v: the ranks do not agree on the numbers of rows (this is rank {rank}):\n"
        + "\n".join(lines)
        + "\ntakes= must equal the splits= of the other ranks. The group stays usable."
    )


def make_length_error(group: str, rank: int, received: Sequence[int], room: int) -> UsageError:
    """Return the error for a result array whose length differs from the number of received rows."""
    return UsageError(
        f"{group}: all_to_all_v: rank {rank} received {sum(received)} rows, {list(received)} from ranks 0, 1, ..., "
        f"but out has {room}; the other ranks have their data"
    )


def _rows(count: int) -> str:
    return "more rows" if count < 0 else f"{count} row{'s' if count != 1 else ''}"
