"""ArrayValues: take and give gradients as arrays, for a framework that has read-only tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from commlib.buffers.aligned import aligned_empty
from commlib.data_parallel.engine import Engine
from commlib.data_parallel.options import Gradient
from commlib.data_parallel.slots import Slots
from commlib.devices.array import DeviceArray
from commlib.devices.copies import brought, fetched
from commlib.dtypes import Array
from commlib.execution.reduce_op import ReduceOp


def _unwatched(text: str) -> Callable[[], None]:
    return lambda: None


class ArrayValues:
    """Take gradients before each reduction, and give out results after it, as `Values`.

    An array that is given is only read, and must stay what it is until the reduction ends. A result is an array over
    the gradient's slot, which is not written again while the result is referred to. Where slots are on a device,
    results are DeviceArrays; what is given may be on the host all the same. watch: see `Ranks.watch`.
    """

    accumulates = False
    hint = "Give each gradient once."

    def __init__(self, gradients: Sequence[Gradient], watch: Callable[[str], Callable[[], None]] = _unwatched) -> None:
        self._gradients, self._watch = gradients, watch
        self._given: dict[int, Any] = {}
        self._rows: dict[int, tuple[Any, Any]] = {}
        self._results: dict[int, Any] = {}
        self._slots = Slots(len(gradients), self._view)

    def give(self, index: int, array: Any) -> None:
        """Take the gradient of this step, in the dtype that travels."""
        self._given[index] = array

    def give_rows(self, index: int, numbers: Any, rows: Any) -> None:
        """Take the sparse gradient of this step, arrays of the host or of the device where its kind is."""
        self._rows[index] = numbers, rows

    def result(self, index: int) -> Any:
        """Return what was reduced, and forget it; None where no rank had a gradient."""
        return self._results.pop(index, None)

    def rows_result(self, index: int) -> tuple[Any, Any]:
        """Return (numbers of rows, their values) of all ranks, and forget them."""
        return self._rows.pop(index)

    def forget_all(self) -> None:
        """Forget what was given and what was reduced."""
        self._given.clear()
        self._rows.clear()
        self._results.clear()

    def _view(self, index: int, slot: Any) -> Any:
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
        if type(slot) is DeviceArray:
            _put_there(array, slot)
        elif array.dtype == slot.dtype and array.flags.c_contiguous:
            self._engine.write(index, array.ctypes.data)
        else:
            slot[...] = array.reshape(-1)

    def take(self, index: int) -> None:
        """Make what was reduced the result: the slot itself, or a copy where an earlier result was kept."""
        lent = self._slots.lent[index]
        if index in self._slots.copied:
            lent = _copied(lent)
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
            on_wait = self._watch(f"the gradient of {self._gradients[index].name}")
            self._rows[index] = np.arange(len(array)), fetched(array, on_wait)

    def make_dense(self, index: int) -> None:
        """Make an array of a gradient that was given as rows, which are added up."""
        on_wait = self._watch(f"the gradient of {self._gradients[index].name}")
        numbers, rows = (fetched(array, on_wait) for array in self._rows.pop(index))
        dense = np.zeros(self._gradients[index].shape, rows.dtype)
        np.add.at(dense, numbers, rows)
        self._given[index] = dense

    def rows(self, index: int, wire: str) -> tuple[Any, Any]:
        """Return the rows that were given, where the gradient is to be."""
        device = self._gradients[index].place
        numbers, rows = self._rows[index]
        return brought(numbers, device), brought(rows, device)

    def take_rows(self, index: int, numbers: Any, rows: Any, divisor: int) -> None:
        """Make the rows of all ranks the result."""
        self._rows[index] = numbers, _divided(rows, divisor)

    def compress(self, index: int) -> Array:
        """Raise AssertionError: compressors work on tensors, before they are given."""
        raise AssertionError("a compressor of the user's works on tensors")

    def decompress(self, index: int, array: Array) -> Any:
        """Raise AssertionError: see `compress`."""
        raise AssertionError("a compressor of the user's works on tensors")


def _put_there(array: Any, slot: DeviceArray) -> None:
    """Queue a copy of a gradient, wherever it is, to its slot on a device."""
    device = slot.device
    if type(array) is not DeviceArray:
        here = device.staging(slot.nbytes).view(slot.dtype)
        here[...] = array.reshape(-1)
        device.copy(slot, here)
    elif array.dtype == slot.dtype:
        device.copy(slot, array)
    else:
        device.kernels.cast(array.reshape(-1), slot)


def _divided(rows: Any, divisor: int) -> Any:
    if divisor == 1:
        return rows
    if type(rows) is DeviceArray:
        flat = rows.reshape(-1)
        ReduceOp.of(rows.dtype, "mean", divisor).combine([flat], flat)
        return rows
    return (rows / divisor).astype(rows.dtype)


def _copied(lent: Any) -> Any:
    if type(lent) is DeviceArray:
        return lent.copy()
    copy = aligned_empty(lent.shape, lent.dtype)
    copy[...] = lent
    return copy
