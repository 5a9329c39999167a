"""all_reduce among the ranks of a node: one compiled call, prepared once and run as often as wanted."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from commlib.dtypes import Array, kernel_operation, name_of
from commlib.errors import UsageError
from commlib.kernels import node as kernels
from commlib.kernels.arithmetic import reduce_function
from commlib.verbs.operation import Result, apart, describe, result, signature, source

if TYPE_CHECKING:
    from commlib.group import Group

# Up to here one meeting and P reads beat two meetings and one share each.
_EXCHANGE_BYTES = 4096

# On the progress thread a wait must leave the core to the training thread.
_BACKGROUND_SPINS, _BACKGROUND_YIELDS = 50, 20


class NodeAllReduce:
    """A prepared all-reduce of `count` elements from one address to another, in which all ranks of a node join.

    It holds addresses only: whoever keeps it keeps the arrays alive.
    """

    __slots__ = ("_acquire", "_address", "_call", "_comm", "_kernel", "_progress", "_release", "_tables", "text")

    def __init__(self, comm: Group, x: Array, target: Array, op: str, algorithm: str) -> None:
        board = comm.board
        assert board is not None
        dtype = name_of(x.dtype)
        operation = kernel_operation(dtype, op)
        details = [f"op={op}", f"algorithm={algorithm}"]
        places = [comm.symmetric_place(array) for array in (x, target)] if x.nbytes > _EXCHANGE_BYTES else [None]
        call = board.new_call()
        if places[0] is not None and places[-1] is not None:
            kernel = kernels.all_reduce_symmetric
            tables = [addresses for _, addresses in places]  # type: ignore[misc]  # neither is None
            details.append("symmetric at " + " and ".join(f"{number:x}" for number, _ in places))  # type: ignore[misc]
        else:
            small = x.nbytes <= _EXCHANGE_BYTES
            kernel = kernels.all_reduce_exchange if small else kernels.all_reduce_staged
            tables = [[0] * board.size, [0]]
            call[kernels.SOURCE], call[kernels.TARGET] = x.ctypes.data, target.ctypes.data
        self._tables = [np.array(table, np.int64) for table in tables]
        call[kernels.INPUTS], call[kernels.OUTPUTS] = (table.ctypes.data for table in self._tables)
        call[kernels.REDUCE] = reduce_function(dtype, operation).address
        call[kernels.COUNT], call[kernels.ITEM_BYTES] = x.size, x.itemsize
        call[kernels.DIVISOR] = board.size
        self.text = describe("all_reduce", x, *details)
        call[kernels.SIGNATURE] = signature(self.text)
        self._kernel, self._address = kernels.entry_point(kernel), call.ctypes.data
        self._call, self._comm, self._progress = call, comm, comm.runtime.progress
        self._acquire, self._release = self._progress.running.acquire, self._progress.running.release

    def __call__(self) -> None:
        """Run it in this thread, after everything that was launched before."""
        # Progress.run, written out: a call by name costs as much as the meeting of two ranks.
        if self._progress.pending or not self._acquire(False):
            self._progress.start(self.text, self.run).wait()
            return
        try:
            if status := self._kernel(self._address):
                self._comm.settle(self._kernel, self._call, status, self.text)
        finally:
            self._release()

    def run(self) -> None:
        """Run it in the progress thread."""
        call = self._call
        spins, yields = call[kernels.SPINS], call[kernels.YIELDS]
        call[kernels.SPINS], call[kernels.YIELDS] = min(spins, _BACKGROUND_SPINS), _BACKGROUND_YIELDS
        try:
            if status := self._kernel(self._address):
                self._comm.settle(self._kernel, call, status, self.text)
        finally:
            call[kernels.SPINS], call[kernels.YIELDS] = spins, yields


class Prepared:
    """The node's all-reduces of one group, remembered for arrays that are reduced in place again and again."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._known: dict[int, tuple[Any, str, Any, int, Any, int, NodeAllReduce]] = {}

    def find(self, x: Any, op: str, algorithm: str) -> NodeAllReduce | None:
        """Return the call for `x` in place if it was made before and still holds: this is what a small call costs."""
        entry = self._known.get(id(x))
        if entry is None:
            return None
        reference, known_op, dtype, size, pointer, address, call = entry
        if (
            reference() is x
            and op == known_op
            and algorithm == "auto"
            and x.dtype is dtype
            and x.size == size
            and pointer.value == address
            and x.flags.writeable
        ):
            return call
        return None

    def make(self, x: Any, op: str, out: Any, algorithm: str) -> tuple[NodeAllReduce, Result, Any] | None:
        """Return (the compiled call, its result, what must stay alive), or None where the node path does not apply."""
        if algorithm not in ("auto", "node"):
            return None
        group = self._group
        if group.board is None:
            if algorithm == "node" and group.size > 1:
                raise UsageError(
                    f"all_reduce: algorithm 'node': {group.name} has no shared memory: "
                    "its ranks are on several nodes, or COMMLIB_NODE_PATH=0"
                )
            return None
        array = source(x, "all_reduce")
        target = result(out, array.shape, array.dtype, "all_reduce")
        flat = array.reshape(-1)
        if apart(flat, target.flat) is not flat:
            return None  # overlapping arrays: rare enough for the general way
        call = NodeAllReduce(group, flat, target.flat, op, algorithm)
        if out is x and isinstance(x, np.ndarray) and target.flat.ctypes.data == x.ctypes.data and algorithm == "auto":
            self._remember(x, op, call)
        return call, target, (x, out, array)

    def _remember(self, x: Array, op: str, call: NodeAllReduce) -> None:
        key, known = id(x), self._known
        reference = weakref.ref(x, lambda _: known.pop(key, None))
        # An array may move its memory (ndarray.resize). Asking numpy where it is takes longer than the reduction, so
        # look into the object: the pointer comes first in numpy's C struct, after the object's head.
        pointer = ctypes.c_void_p.from_address(key + object.__basicsize__)
        known[key] = (reference, op, x.dtype, x.size, pointer, x.ctypes.data, call)

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
