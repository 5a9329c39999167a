"""Variable values: read and write a rank's Keras variables as tensors, with versions if updates do not wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf


class VariableValues:
    """The values of this rank's variables during a batch.

    A weight is read once for all microbatches. That costs no copy: TensorFlow copies a variable's value on update if
    somebody still holds it. States of layers, such as moving statistics and states of random number generators, change
    with each forward: here at once, in the variables at the end of the batch.
    """

    def __init__(self, weights: Iterable[Any]) -> None:
        self._weights = {id(weight): weight for weight in weights}
        self._updates = 0
        self._versions: dict[int, dict[int, tf.Tensor]] = {}
        self._current: dict[int, tf.Tensor] = {}
        self._changed: dict[int, Any] = {}

    def begin(self) -> None:
        """Discard the values of the last batch: the weights are version 0."""
        self._updates = 0
        self._versions.clear()
        self._changed.clear()
        self._current = {}

    def read(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        """Return the current values."""
        current = self._current
        for variable in variables:
            if id(variable) not in current:
                current[id(variable)] = tf.convert_to_tensor(variable.value)
        return [current[id(variable)] for variable in variables]

    def write(self, variables: Sequence[Any], values: Sequence[tf.Tensor | None]) -> None:
        """Set the new states of layers after a forward; None for an unchanged one."""
        for variable, value in zip(variables, values, strict=True):
            if value is not None:
                self._current[id(variable)] = value
                self._changed[id(variable)] = variable

    def end(self) -> None:
        """Assign the changed values to the variables, and discard all values."""
        for key, variable in self._changed.items():
            variable.assign(self._current[key])
        self.begin()

    def use(self, version: int) -> None:
        """Read the weights after this many updates of the batch from now on."""
        self._keep_newest()
        if version in self._versions:  # a backward uses the weights of its forward
            self._current |= self._versions[version]

    def updated(self) -> None:
        """Record that the weights are about to be updated: earlier versions stay for readers that still need them."""
        self._keep_newest()
        self._updates += 1
        self._versions = {version: values for version, values in self._versions.items() if version >= self._updates - 1}

    def _keep_newest(self) -> None:
        if self._updates not in self._versions:
            self._versions[self._updates] = {
                key: tf.convert_to_tensor(weight.value) for key, weight in self._weights.items()
            }
