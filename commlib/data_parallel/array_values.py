"""ArrayValues: read and return gradients as arrays, for a framework with read-only tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from commlib.buffers.aligned_arrays import aligned_empty
from commlib.data_parallel.bucket_reducer import BucketReducer
from commlib.data_parallel.options import Gradient
from commlib.data_parallel.slots import Slots
from commlib.devices.array import DeviceArray
from commlib.devices.copies import copy_to_device, copy_to_host
from commlib.dtypes import Array
from commlib.execution.reduce_function import ReduceFunction


def _no_watch(text: str) -> Callable[[], None]:
    return lambda: None


class ArrayValues:
    """Gradients as arrays: reads them before each reduction and returns the results after it, as `Values` does.

    An input array is only read, and must not change until the reduction ends. A result is an array over the gradient's
    slot. The slot is not written again while the result is referenced. Where slots are on a device, results are
    DeviceArrays; input arrays may still be on the host. watch: see `Ranks.watch`.
    """

    accumulates = False
    hint = "Give each gradient once."

    def __init__(self, gradients: Sequence[Gradient], watch: Callable[[str], Callable[[], None]] = _no_watch) -> None:
        self._gradients, self._watch = gradients, watch
        self._given: dict[int, Any] = {}
        self._rows: dict[int, tuple[Any, Any]] = {}
        self._results: dict[int, Any] = {}
        self._slots = Slots(len(gradients), self._view)

    def give(self, index: int, array: Any) -> None:
        """Set the gradient for this step, in the dtype that travels."""
        self._given[index] = array

    def give_rows(self, index: int, numbers: Any, rows: Any) -> None:
        """Set the sparse gradient for this step, as arrays on the host or on the gradient's device."""
        self._rows[index] = numbers, rows

    def result(self, index: int) -> Any:
        """Return the reduced gradient and drop it from here; None if no rank had a gradient."""
        return self._results.pop(index, None)

    def rows_result(self, index: int) -> tuple[Any, Any]:
        """Return (row numbers, row values) of all ranks and drop them from here."""
        return self._rows.pop(index)

    def forget_all(self) -> None:
        """Drop all input arrays and all results."""
        self._given.clear()
        self._rows.clear()
        self._results.clear()

    def _view(self, index: int, slot: Any) -> Any:
        return slot.reshape(self._gradients[index].shape)

    # Interface for the GradientReducer

    def use(self, engine: BucketReducer, members: Sequence[Sequence[int]]) -> None:
        """Use the slots of `engine`."""
        self._engine = engine
        self._slots.use(engine, members)

    def free(self) -> None:
        """Ensure that slots that are about to be written are no longer referenced."""
        self._slots.free(lambda index: None)

    def exists(self, index: int) -> bool:
        """Return whether a gradient was set."""
        return index in self._given or index in self._rows

    def put(self, index: int) -> None:
        """Copy a gradient into its slot."""
        array, slot = self._given[index], self._engine.slot(index)
        if type(slot) is DeviceArray:
            _copy_to_device(array, slot)
        elif array.dtype == slot.dtype and array.flags.c_contiguous:
            self._engine.write(index, array.ctypes.data)
        else:
            slot[...] = array.reshape(-1)

    def take(self, index: int) -> None:
        """Make the reduced slot the result, or a copy of it if the caller kept an earlier result."""
        value = self._slots.views[index]
        if index in self._slots.copied:
            value = _copy_slot(value)
        self._results[index] = value

    def forget(self) -> None:
        """Drop the input arrays."""
        self._given.clear()

    def hide(self, indices: Iterable[int]) -> None:
        """Do nothing: gradients are not accumulated here."""

    def detach(self) -> None:
        """Do nothing: slots are freed by `free`."""

    def scale(self, index: int, factor: float) -> None:
        """Multiply a gradient into a new array, because the input array belongs to the caller."""
        self._given[index] = np.multiply(self._given[index], self._given[index].dtype.type(factor))

    def sparse_dimensions(self, index: int) -> int | None:
        """Return 1 for a gradient that was set as rows, else None."""
        return 1 if index in self._rows else None

    def make_sparse(self, index: int, dimensions: int = 1) -> None:
        """Convert a dense gradient to rows."""
        array = self._given.pop(index, None)
        if array is not None:
            on_wait = self._watch(f"the gradient of {self._gradients[index].name}")
            self._rows[index] = np.arange(len(array)), copy_to_host(array, on_wait)

    def make_dense(self, index: int) -> None:
        """Convert a gradient in rows to a dense array. Rows with the same number are added up."""
        on_wait = self._watch(f"the gradient of {self._gradients[index].name}")
        numbers, rows = (copy_to_host(array, on_wait) for array in self._rows.pop(index))
        dense = np.zeros(self._gradients[index].shape, rows.dtype)
        np.add.at(dense, numbers, rows)
        self._given[index] = dense

    def rows(self, index: int, wire: str) -> tuple[Any, Any]:
        """Return the input rows, on the gradient's device."""
        device = self._gradients[index].place
        numbers, rows = self._rows[index]
        return copy_to_device(numbers, device), copy_to_device(rows, device)

    def take_rows(self, index: int, numbers: Any, rows: Any, divisor: int) -> None:
        """Make the rows of all ranks the result."""
        self._rows[index] = numbers, _divide_rows(rows, divisor)

    def compress(self, index: int) -> Array:
        """Raise AssertionError: the adapter compresses tensors before it passes them here."""
        raise AssertionError("a user's compressor takes tensors")

    def decompress(self, index: int, array: Array) -> Any:
        """Raise AssertionError, as `compress` does."""
        raise AssertionError("a user's compressor takes tensors")


def _copy_to_device(array: Any, slot: DeviceArray) -> None:
    """Queue a copy of a gradient from the host or from a device to its slot on a device."""
    device = slot.device
    if type(array) is not DeviceArray:
        here = device.staging(slot.nbytes).view(slot.dtype)
        here[...] = array.reshape(-1)
        device.copy(slot, here)
    elif array.dtype == slot.dtype:
        device.copy(slot, array)
    else:
        device.kernels.cast(array.reshape(-1), slot)


def _divide_rows(rows: Any, divisor: int) -> Any:
    if divisor == 1:
        return rows
    if type(rows) is DeviceArray:
        flat = rows.reshape(-1)
        ReduceFunction.of(rows.dtype, "mean", divisor).combine([flat], flat)
        return rows
    return (rows / divisor).astype(rows.dtype)


def _copy_slot(array: Any) -> Any:
    if type(array) is DeviceArray:
        return array.copy()
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy
