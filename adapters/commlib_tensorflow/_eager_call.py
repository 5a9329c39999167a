"""Eager reductions: tensors are passed as arrays at once, or part by part while backward runs.

Gradients on a device stay on it: the host waits for TensorFlow before each part, and at the end for the reduced
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from commlib.data_parallel.options import Gradient, Options
from commlib.named_gradients.gradients import CallSpec, GradientCall, NamedGradients
from commlib_tensorflow._bridge import to_array, to_tensor
from commlib_tensorflow._device_calls import array_of
from commlib_tensorflow._gradient_tensors import (
    decode_gradient,
    device_tensors,
    encode_gradient,
    is_sent_unchanged,
    own_array,
)
from commlib_tensorflow._placement import DevicePlace
from commlib_tensorflow.devices import settle, tensors_over, use_device_stream


class EagerCall(GradientCall):
    """Calls with eager tensors of the same kinds.

    dtypes: those of the results; None where neither a gradient nor a variable is known. options: of the wire.
    """

    def __init__(
        self,
        gradients: NamedGradients,
        spec: CallSpec,
        kinds: Sequence[Gradient],
        dtypes: Sequence[Any],
        place: DevicePlace | None,
        options: Options,
    ) -> None:
        super().__init__(gradients, spec)
        self._kinds, self._dtypes, self._place, self._options = tuple(kinds), list(dtypes), place, options
        self._is_plain = place is None and all(
            dtype is not None and kind.dtype == dtype.name and is_sent_unchanged(dtype, options)
            for dtype, kind in zip(dtypes, kinds, strict=True)
        )
        """Whether an array is a tensor's memory, and a tensor a result's, without any conversion."""

    def run(self, given: Sequence[Any]) -> list[Any]:
        """Return reduced gradients; one that is None stays None if no rank has it."""
        spec = self.spec
        tensors, slices = given, []
        if len(spec.dense) < len(given):
            tensors, slices = [given[index] for index in spec.dense], [given[index] for index in spec.sparse]
        with self._order.lock, self._working(begins=True):
            arrays = self._encode(tensors)
            rows = self._rows(slices) if slices else []
            results = self._results(self.reduce(self._kinds, spec.dense, arrays, rows), slices)
        return list(map(results.get, range(len(given))))

    def start(self) -> None:
        """Begin a run whose gradients are passed part by part."""
        with self._working(begins=True), self._gradients.statistics.exposing():
            self.begin(self._kinds, eager=True)

    def put(self, number: int, tensor: Any) -> None:
        """Pass a dense gradient, once in a run."""
        with self._working():
            self.give([number], self._encode([tensor]))

    def finish(self) -> dict[int, Any]:
        """Return the gradients that any rank has passed, reduced, by number."""
        with self._working():
            return self._results(self.end([]), [])

    def _encode(self, tensors: Sequence[Any]) -> list[Any]:
        """Return tensors as arrays, in the form in which they travel."""
        if not self._is_plain:
            tensors = [encode_gradient(tensor, self._options) for tensor in tensors]
        if self._place is None:
            return list(map(to_array, tensors))
        return list(map(array_of, tensors))

    def _rows(self, slices: Sequence[tf.IndexedSlices]) -> list[tuple[Any, Any]]:
        """Return sparse gradients as arrays (indices, rows)."""
        read = to_array if self._place is None else array_of
        return [(read(tf.cast(one.indices, tf.int64)), read(one.values)) for one in slices]

    def _results(self, results: dict[int, Any], slices: Sequence[tf.IndexedSlices]) -> dict[int, Any]:
        """Return reduced arrays as gradients, by number."""
        if self._is_plain and not slices:
            return dict(zip(results, map(to_tensor, results.values()), strict=True))
        arrays = [array for index in self.spec.sparse for array in results.pop(index)]
        rows = iter(list(map(to_tensor, arrays)) if self._place is None else tensors_over(arrays))
        gradients = self._decode(results)
        for index, one in zip(self.spec.sparse, slices, strict=True):
            numbers = tf.cast(next(rows), one.indices.dtype)
            gradients[index] = tf.IndexedSlices(next(rows), numbers, one.dense_shape)
        return gradients

    def _decode(self, results: dict[int, Any]) -> dict[int, Any]:
        """Convert reduced arrays to tensors."""
        dtypes = [self._dtypes[index] or tf.as_dtype(self.kinds[index].dtype) for index in results]
        pairs = list(zip(results.values(), dtypes, strict=True))
        if self._place is not None:
            tensors = device_tensors(pairs)
        else:
            tensors = [to_tensor(own_array(array, dtype, eager=True)) for array, dtype in pairs]
        decoded = [decode_gradient(one, dtype, self._options) for one, dtype in zip(tensors, dtypes, strict=True)]
        return dict(zip(results, decoded, strict=True))

    def _working(self, *, begins: bool = False) -> AbstractContextManager[None]:
        """Return a context of work on the gradients' device. `begins`: TensorFlow reads no released slots any more."""
        if self._place is None:
            return _HOST
        if begins:
            settle(self._place.where)
        return use_device_stream(self._place.device)


_HOST = nullcontext()
