"""InParts: reduce gradients that come a part at a time, outside of graphs. A bucket is sent once it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from commlib.horovod.gradients import Call, NamedReduction
from commlib_tensorflow._bridge import to_array, to_tensor
from commlib_tensorflow.gradients import Gradients, gradient_of, own_array, received, threads, to_send


class InParts(NamedReduction):
    """One reduction of the dense gradients of variables, by what `gradients` reduces all of them at once with, too.

    order: the numbers of all, as their gradients come. Collective to make.
    """

    def __init__(self, gradients: Gradients, names: Sequence[str], variables: Sequence[Any], order: Sequence[int]):
        super().__init__(gradients, Call(names, range(len(names)), (), order, threads(), strict=True))
        self._options, self._dtypes = gradients.options_here(), [tf.as_dtype(variable.dtype) for variable in variables]
        pairs = zip(names, variables, strict=True)
        self.begin(tuple(gradient_of(name, v.dtype, v.shape) for name, v in pairs), eager=True)

    def put(self, number: int, gradient: tf.Tensor) -> None:
        """Give one of the gradients, once."""
        self.give([number], [to_array(to_send(gradient, self._options))])

    def finish(self) -> dict[int, tf.Tensor]:
        """Return what was reduced, by number: what any rank has given. Raises MismatchError where only some have."""
        options, dtypes = self._options, self._dtypes
        return {
            number: received(to_tensor(own_array(array, dtypes[number], eager=True)), dtypes[number], options)
            for number, array in self.end([]).items()
        }
