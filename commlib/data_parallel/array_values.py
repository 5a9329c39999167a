"""ArrayValues: take and give gradients as arrays, for a framework that has read-only tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from commlib.buffers.aligned import aligned_empty
from commlib.data_parallel.engine import Engine
from commlib.data_parallel.options import Gradient
from commlib.data_parallel.slots import Slots
from commlib.dtypes import Array


class ArrayValues:
    """Take gradients before each reduction, and give out results after it, as `Values`.

    An array that is given is only read, and must stay what it is until the reduction ends. A result is an array over
    the gradient's slot, which is not written again while the result is referred to.
    """

    accumulates = False
    hint = "Give each gradient once."

    def __init__(self, gradients: Sequence[Gradient]) -> None:
        self._gradients = gradients
        self._given: dict[int, Array] = {}
        self._rows: dict[int, tuple[Array, Array]] = {}
        self._results: dict[int, Array] = {}
        self._slots = Slots(len(gradients), self._view)

    def give(self, index: int, array: Array) -> None:
        """Take the gradient of this step, in the dtype that travels."""
        self._given[index] = array

    def give_rows(self, index: int, numbers: Array, rows: Array) -> None:
        """Take the sparse gradient of this step."""
        self._rows[index] = numbers, rows

    def result(self, index: int) -> Array | None:
        """Return what was reduced, and forget it; None where no rank had a gradient."""
        return self._results.pop(index, None)

    def rows_result(self, index: int) -> tuple[Array, Array]:
        """Return (numbers of rows, their values) of all ranks, and forget them."""
        return self._rows.pop(index)

    def forget_all(self) -> None:
        """Forget what was given and what was reduced."""
        self._given.clear()
        self._rows.clear()
        self._results.clear()

    def _view(self, index: int, slot: Array) -> Array:
        return slot.reshape(self._gradients[index].shape)

    # What a GradientReducer asks for

    def use(self, engine: Engine, members: Sequence[Sequence[int]]) -> None:
        """Take the slots of `engine`."""
        self._engine = engine
        self._slots.use(engine, members)

    def free(self) -> None:
        """Make sure that slots which are about to be written are no longer referred to."""
        self._slots.free(lambda index: None)

    def exists(self, index: int) -> bool:
        """Tell whether a gradient was given."""
        return index in self._given or index in self._rows

    def put(self, index: int) -> None:
        """Copy a gradient into its slot."""
        array, slot = self._given[index], self._engine.slot(index)
        if array.dtype == slot.dtype and array.flags.c_contiguous:
            self._engine.write(index, array.ctypes.data)
        else:
            slot[...] = array.reshape(-1)

    def take(self, index: int) -> None:
        """Make what was reduced the result: the slot itself, or a copy where an earlier result was kept."""
        lent = self._slots.lend(index)
        if index in self._slots.copied:
            copy = aligned_empty(lent.shape, lent.dtype)
            copy[...] = lent
            lent = copy
        self._results[index] = lent

    def forget(self) -> None:
        """Forget what was given."""
        self._given.clear()

    def hide(self, indices: Iterable[int]) -> None:
        """Do nothing: gradients are not accumulated here."""

    def detach(self) -> None:
        """Do nothing: slots are freed by `free`."""

    def scale(self, index: int, factor: float) -> None:
        """Multiply a gradient: not in place, since it belongs to the caller."""
        self._given[index] = np.multiply(self._given[index], self._given[index].dtype.type(factor))

    def sparse_dimensions(self, index: int) -> int | None:
        """Return 1 for a gradient that was given as rows, else None."""
        return 1 if index in self._rows else None

    def make_sparse(self, index: int, dimensions: int = 1) -> None:
        """Make rows of a gradient that was given as an array."""
        array = self._given.pop(index, None)
        if array is not None:
            self._rows[index] = np.arange(len(array)), array

    def make_dense(self, index: int) -> None:
        """Make an array of a gradient that was given as rows, which are added up."""
        numbers, rows = self._rows.pop(index)
        dense = np.zeros(self._gradients[index].shape, rows.dtype)
        np.add.at(dense, numbers, rows)
        self._given[index] = dense

    def rows(self, index: int, wire: str) -> tuple[Array, Array]:
        """Return the rows that were given."""
        return self._rows[index]

    def take_rows(self, index: int, numbers: Array, rows: Array, divisor: int) -> None:
        """Make the rows of all ranks the result."""
        self._rows[index] = numbers, rows if divisor == 1 else (rows / divisor).astype(rows.dtype)

    def compress(self, index: int) -> Array:
        """Raise AssertionError: compressors work on tensors, before they are given."""
        raise AssertionError("a compressor of the user's works on tensors")

    def decompress(self, index: int, array: Array) -> Any:
        """Raise AssertionError: see `compress`."""
        raise AssertionError("a compressor of the user's works on tensors")
