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

    dtypes: those of the results; None where neither a gradient nor a variable is known. options: of the wire, None if
    tensors travel unchanged.
    """

    def __init__(
        self,
        gradients: NamedGradients,
        spec: CallSpec,
        kinds: Sequence[Gradient],
        dtypes: Sequence[Any],
        place: DevicePlace | None,
        options: Options | None,
    ) -> None:
        super().__init__(gradients, spec)
        self._kinds, self._dtypes, self._place, self._options = tuple(kinds), list(dtypes), place, options
        self._is_plain = place is None and all(
            dtype is not None and kind.dtype == dtype.name and is_sent_unchanged(dtype, options or Options())
            for dtype, kind in zip(dtypes, kinds, strict=True)
        )
        """Whether an array is a tensor's memory, and a tensor a result's, without any conversion."""

    def run(self, given: Sequence[Any]) -> list[Any]:
        """Return reduced gradients; one that is None stays None if no rank has it."""
        spec = self.spec
        with self._lock:
            self.put(spec.dense, [given[index] for index in spec.dense], begins=True)
            results = self.finish([given[index] for index in spec.sparse])
        return [results.get(index) for index in range(len(given))]

    def start(self) -> None:
        """Begin a run whose gradients are passed part by part."""
        with self._gradients.statistics.exposing():
            self.begin(self._kinds, eager=True)

    def put(self, numbers: Sequence[int], tensors: Sequence[Any], *, begins: bool = False) -> None:
        """Pass dense gradients, each once in a run. `begins`: first begin a run, and launch nothing before its end."""
        options = self._options
        if options is not None and not self._is_plain:
            tensors = [encode_gradient(tensor, options) for tensor in tensors]
        read = to_array if self._place is None else array_of
        with self._working():
            self.give(numbers, [read(tensor) for tensor in tensors], self._kinds if begins else None, eager=False)

    def finish(self, slices: Sequence[tf.IndexedSlices] = ()) -> dict[int, Any]:
        """Pass sparse gradients, and return those that any rank has passed, by number."""
        place = self._place
        read = to_array if place is None else array_of
        with self._working():
            results = self.end([(read(tf.cast(one.indices, tf.int64)), read(one.values)) for one in slices])
            if self._is_plain and not slices:
                return {index: to_tensor(array) for index, array in results.items()}
            arrays = [array for index in self.spec.sparse for array in results.pop(index)]
            rows = iter(list(map(to_tensor, arrays)) if place is None else tensors_over(arrays))
            tensors = self._decode(results)
        for index, one in zip(self.spec.sparse, slices, strict=True):
            numbers = tf.cast(next(rows), one.indices.dtype)
            tensors[index] = tf.IndexedSlices(next(rows), numbers, one.dense_shape)
        return tensors

    def begin(self, kinds: Sequence[Gradient], *, eager: bool) -> None:
        """Begin a run; TensorFlow no longer reads released slots afterwards."""
        super().begin(tuple(kinds), eager=eager)
        if self._place is not None:
            settle(self._place.where)

    def _decode(self, results: dict[int, Any]) -> dict[int, Any]:
        """Convert reduced arrays to tensors."""
        kinds = self._reducer_in_use().gradients
        dtypes = [self._dtypes[index] or tf.as_dtype(kinds[index].dtype) for index in results]
        pairs = list(zip(results.values(), dtypes, strict=True))
        if self._place is not None:
            tensors = device_tensors(pairs)
        else:
            tensors = [to_tensor(own_array(array, dtype, eager=True)) for array, dtype in pairs]
        if (options := self._options) is not None:
            tensors = [decode_gradient(one, dtype, options) for one, dtype in zip(tensors, dtypes, strict=True)]
        return dict(zip(results, tensors, strict=True))

    def _working(self) -> AbstractContextManager[None]:
        return nullcontext() if self._place is None else use_device_stream(self._place.device)
