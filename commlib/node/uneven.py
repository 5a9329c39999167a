"""UnevenExchange: run all_to_all_v among a node's ranks, as often as wanted, on any arrays and counts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.errors import CommlibError, TransportError
from commlib.kernels.host import node, uneven
from commlib.node.collective import ARRAYS_ARE_WHERE_EXPECTED, leaving_the_core
from commlib.node.context import NodeContext
from commlib.node.counts import unequal, unfit
from commlib.node.signature import signature
from commlib.runtime.compiled import Compiled, Plan

_run, _run_on_arrays = node.entry_point(uneven.run), node.entry_point(uneven.run_on_arrays, 3)

SPLITS = uneven.SPLITS
"""Where in a call's parts the rows begin that go to each rank, and then come from each."""

_WRONG = uneven.UNEQUAL, uneven.UNFIT, uneven.UNREADABLE


class UnevenExchange(Compiled):
    """A compiled all_to_all_v of a node's ranks. known: each says how many rows come from each.

    It runs on an array and on a call's *parts*, the numbers that describe the rest of it (see `kernels.host.uneven`).
    Its value is the parts, or the result if it had to be made: rows of shape `row`, each of `row_bytes`. None says that
    the call is not right in itself, and nothing has been done.
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
        self._fields, self._ranges = np.zeros(uneven.FIELDS, np.int64), np.zeros(4, np.int64)
        self._peers = np.zeros((board.size, uneven.PEER_FIELDS), np.int64)
        for field, value in (
            (uneven.CALL, address_of(self._call)),
            (uneven.PLACES, context.places),
            (uneven.ROW, row_bytes),
            (uneven.KNOWN, known),
            (uneven.READS, board.reads_peers),
            (uneven.PROCESSES, address_of(board.processes)),
            (uneven.PEERS, address_of(self._peers)),
            (uneven.RANGES, address_of(self._ranges)),
        ):
            self._fields[field] = value
        self._address = address_of(self._fields)
        if ARRAYS_ARE_WHERE_EXPECTED:
            self._step = _run_on_arrays

    def bind(self, x: Any, target: Any, *, value: Any = None, deliver: Callable[[Any], Any] | None = None) -> Plan:
        return Plan(self._another(), x, target, value, deliver)

    def bind_to(self, x: Array, parts: Array, out: Array, value: Any) -> Plan:
        """Return what runs it always on these arrays, with this result, whose `id` the parts hold."""
        bound = self._another()
        bound._out = out
        bound._place(x, parts)
        return Plan(bound, x, parts, value, None, _run)

    def _another(self) -> UnevenExchange:
        """Return one that can run while this one does."""
        return UnevenExchange(self._context, self._group, self.text, self._row, self._row_bytes, known=self._known)

    def perform(self, x: Any, target: Any) -> Any:
        self._place(x, target)
        try:
            if self._progress.in_background:
                with leaving_the_core(self._call):
                    return self._end(_run(self._address), x, target)
            return self._end(_run(self._address), x, target)
        except BaseException as error:
            self._context.abandon(self.text, error)
            raise

    def _place(self, x: Array, parts: Array) -> None:
        out = int(parts[uneven.OUT])
        target = address_of(ctypes.cast(out, ctypes.py_object).value) if out else 0
        self._fields[[uneven.SOURCE, uneven.PARTS, uneven.TARGET]] = address_of(x), address_of(parts), target

    def _go_on(self, status: int, x: Any, target: Any) -> Any:
        return self._end(status, x, target) if ARRAYS_ARE_WHERE_EXPECTED else self.perform(x, target)

    def _end(self, status: int, x: Array, parts: Array) -> Any:
        """Go on with the kernel that returned `status` until it has ended well, and return the value of the call."""
        value = parts
        while status != node.DONE:
            if status == uneven.SIZED:
                value = np.empty((int(parts[uneven.OUT_ROWS]), *self._row), x.dtype)
                self._fields[uneven.TARGET] = address_of(value)
                status = _run(self._address)
            elif status == uneven.REFUSED:
                return None
            elif status in _WRONG:
                raise self._wrong(status, parts)
            else:
                status = self._context.complete(_run, self._address, self._call, status, self.text)
        return value

    def _wrong(self, status: int, parts: Array) -> CommlibError:
        """Return what this rank has found, and others may not have, in a call that has ended."""
        board, begin = self._context.board, uneven.SPLITS
        splits, takes = parts[begin : begin + board.size].tolist(), parts[begin + board.size :].tolist()
        if status == uneven.UNEQUAL:
            came, expected = self._peers[:, [uneven.CAME, uneven.EXPECTS]].T.tolist()
            return unequal(self._group, board.rank, came, takes, splits, expected)
        if status == uneven.UNFIT:
            return unfit(self._group, board.rank, takes, int(parts[uneven.OUT_ROWS]))
        return TransportError(
            f"{self._group}: {self.text}: rank {board.rank} cannot read the memory of another rank any more: "
            "COMMLIB_PEER_READS=0 does without"
        )
