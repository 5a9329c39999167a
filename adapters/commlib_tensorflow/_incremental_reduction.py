"""Incremental reduction of gradients that arrive part by part, outside of graphs.

A bucket is sent as soon as it is complete.

Gradients on a device stay on it: the host waits for TensorFlow before each part, and at the end for the reduced
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from commlib.named_gradients.gradients import CallSpec, GradientCall
from commlib_tensorflow._bridge import to_array, to_tensor
from commlib_tensorflow._device_calls import array_of
from commlib_tensorflow.devices import settle, use_device_stream
from commlib_tensorflow.gradients import (
    GradientsByName,
    count_threads,
    decode_gradient,
    device_tensors,
    encode_gradient,
    gradient_of,
    own_array,
    place_of_gradients,
)


class IncrementalReduction(GradientCall):
    """One incremental reduction of the dense gradients of variables, with the names and buckets of the usual reduction.

    order: the numbers of all variables, in the order in which their gradients arrive. Construction is collective.
    """

    def __init__(
        self, gradients: GradientsByName, names: Sequence[str], variables: Sequence[Any], order: Sequence[int]
    ):
        super().__init__(gradients, CallSpec(names, range(len(names)), (), order, count_threads(), strict=True))
        self._options, self._dtypes = gradients.options_here(), [tf.as_dtype(variable.dtype) for variable in variables]
        self._place = place = place_of_gradients(variables)
        where, pairs = "cpu" if place is None else place.name, zip(names, variables, strict=True)
        self.begin(tuple(gradient_of(name, v.dtype, v.shape, where) for name, v in pairs), eager=True)
        if place is not None:
            settle(place.where)

    def put(self, number: int, gradient: tf.Tensor) -> None:
        """Add one of the gradients, once."""
        encoded = encode_gradient(gradient, self._options)
        with self._working():
            self.give([number], [to_array(encoded) if self._place is None else array_of(encoded)])

    def finish(self) -> dict[int, tf.Tensor]:
        """Return the reduced gradients by number: those that any rank has put.

        Raises MismatchError if only some ranks have one.
        """
        options, dtypes = self._options, self._dtypes
        with self._working():
            reduced = self.end([])
            tensors = zip(reduced, self._tensors(list(reduced.items())), strict=True)
            return {number: decode_gradient(tensor, dtypes[number], options) for number, tensor in tensors}

    def _tensors(self, reduced: Sequence[tuple[int, Any]]) -> list[tf.Tensor]:
        """Convert reduced arrays to tensors."""
        dtypes = [self._dtypes[number] for number, _ in reduced]
        if self._place is not None:
            return device_tensors([(array, dtype) for (_, array), dtype in zip(reduced, dtypes, strict=True)])
        own = (own_array(array, dtype, eager=True) for (_, array), dtype in zip(reduced, dtypes, strict=True))
        return list(map(to_tensor, own))

    def _working(self) -> AbstractContextManager[None]:
        return nullcontext() if self._place is None else use_device_stream(self._place.device)
