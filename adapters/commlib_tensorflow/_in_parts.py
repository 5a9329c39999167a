"""InParts: reduce gradients that come a part at a time, outside of graphs. A bucket is sent once it is complete.

On a device they stay there: the host waits for TensorFlow before each part, and at the end for what was reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from commlib.named_gradients.gradients import Call, NamedReduction
from commlib_tensorflow._bridge import to_array, to_tensor
from commlib_tensorflow._on_device import array_of
from commlib_tensorflow.devices import settle, working
from commlib_tensorflow.gradients import (
    Gradients,
    gradient_of,
    own_array,
    place_of_gradients,
    received,
    tensors_there,
    threads,
    to_send,
)


class InParts(NamedReduction):
    """One reduction of the dense gradients of variables, by what `gradients` reduces all of them at once with, too.

    order: the numbers of all, as their gradients come. Collective to make.
    """

    def __init__(self, gradients: Gradients, names: Sequence[str], variables: Sequence[Any], order: Sequence[int]):
        super().__init__(gradients, Call(names, range(len(names)), (), order, threads(), strict=True))
        self._options, self._dtypes = gradients.options_here(), [tf.as_dtype(variable.dtype) for variable in variables]
        self._place = place = place_of_gradients(variables)
        where, pairs = "cpu" if place is None else place.name, zip(names, variables, strict=True)
        self.begin(tuple(gradient_of(name, v.dtype, v.shape, where) for name, v in pairs), eager=True)
        if place is not None:
            settle(place.where)

    def put(self, number: int, gradient: tf.Tensor) -> None:
        """Give one of the gradients, once."""
        sent = to_send(gradient, self._options)
        with self._working():
            self.give([number], [to_array(sent) if self._place is None else array_of(sent)])

    def finish(self) -> dict[int, tf.Tensor]:
        """Return what was reduced, by number: what any rank has given. Raises MismatchError where only some have."""
        options, dtypes = self._options, self._dtypes
        with self._working():
            found = self.end([])
            tensors = zip(found, self._tensors(list(found.items())), strict=True)
            return {number: received(tensor, dtypes[number], options) for number, tensor in tensors}

    def _tensors(self, found: Sequence[tuple[int, Any]]) -> list[tf.Tensor]:
        """Return what was reduced as tensors."""
        dtypes = [self._dtypes[number] for number, _ in found]
        if self._place is not None:
            return tensors_there([(array, dtype) for (_, array), dtype in zip(found, dtypes, strict=True)])
        own = (own_array(array, dtype, eager=True) for (_, array), dtype in zip(found, dtypes, strict=True))
        return list(map(to_tensor, own))

    def _working(self) -> AbstractContextManager[None]:
        return nullcontext() if self._place is None else working(self._place.device)
