"""Values: read and write a rank's Keras variables as tensors, in versions where updates do not wait for readers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf


class Values:
    """The values of this rank's variables while a batch is under way.

    A weight is read once for all microbatches, which costs no copy: TensorFlow copies when a variable is updated whose
    value somebody still has. What layers keep of their own, such as moving statistics and the states of random number
    generators, changes with each forward: here at once, in the variables when the batch is done.
    """

    def __init__(self, weights: Iterable[Any]) -> None:
        self._weights = {id(weight): weight for weight in weights}
        self._updates = 0
        self._versions: dict[int, dict[int, tf.Tensor]] = {}
        self._current: dict[int, tf.Tensor] = {}
        self._changed: dict[int, Any] = {}

    def begin(self) -> None:
        """Forget the values of the batch before: the weights are version 0."""
        self._updates = 0
        self._versions.clear()
        self._changed.clear()
        self._current = {}

    def read(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        """Return the values that are in use now."""
        current = self._current
        for variable in variables:
            if id(variable) not in current:
                current[id(variable)] = tf.convert_to_tensor(variable.value)
        return [current[id(variable)] for variable in variables]

    def write(self, variables: Sequence[Any], values: Sequence[tf.Tensor | None]) -> None:
        """Take what a forward has made of the states of layers; None for what it left as it was."""
        for variable, value in zip(variables, values, strict=True):
            if value is not None:
                self._current[id(variable)] = value
                self._changed[id(variable)] = variable

    def end(self) -> None:
        """Give the variables what has changed, and forget all values."""
        for key, variable in self._changed.items():
            variable.assign(self._current[key])
        self.begin()

    def use(self, version: int) -> None:
        """Read the weights after so many updates of this batch from now on."""
        self._keep_newest()
        if version in self._versions:  # a backward has the values of its forward
            self._current |= self._versions[version]

    def updated(self) -> None:
        """Note that the weights are about to be updated: those before stay, for whoever is to use them still."""
        self._keep_newest()
        self._updates += 1
        self._versions = {version: kept for version, kept in self._versions.items() if version >= self._updates - 1}

    def _keep_newest(self) -> None:
        if self._updates not in self._versions:
            self._versions[self._updates] = {
                key: tf.convert_to_tensor(weight.value) for key, weight in self._weights.items()
            }
