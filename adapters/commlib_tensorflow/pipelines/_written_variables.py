"""Written variables: a forward writes variables and reads them again, as it would outside of a pipeline.

A stage's forward is a function: variables are arguments, and written values are results. With TensorFlow's own
variables, a write cuts the gradient: a later read depends on the variable alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf


class WrittenScope(keras.StatelessScope):  # type: ignore[misc]  # Keras has no types
    """Scope that keeps written values.

    No gradient flows through a write; the gradient of a written weight is the weight's.

    weights: the values of the weights that get gradients, with their variables. others: the variables that get none.
    """

    def __init__(self, weights: Sequence[tuple[Any, Any]], others: Sequence[tuple[Any, Any]]) -> None:
        super().__init__([*weights, *others], collect_losses=True)
        self._given = {id(variable): self.state_mapping[id(variable)] for variable, _ in weights}
        self.before: Mapping[int, Any] = dict(self.state_mapping)
        """The values of variables before the forward, by id."""

    @property
    def after(self) -> Mapping[int, Any]:
        """The current values of variables, by id."""
        return self.state_mapping  # type: ignore[no-any-return]

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Store a value that Keras writes."""
        variable, value = update
        given = self._given.get(id(variable))
        super().add_update((variable, tf.stop_gradient(value) if given is None else _of_weight(given, value)))


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _of_weight(given: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], tuple[Any, None]]]:
    """Return a value that was written to a weight: its gradient is the weight's."""
    return tf.identity(value), lambda gradient: (gradient, None)
