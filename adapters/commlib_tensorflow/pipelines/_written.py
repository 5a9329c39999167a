"""Written: let a forward write variables and read them again, as it would outside of a pipeline.

A stage's forward is a function: variables are arguments, and what is written comes out of it. TensorFlow's own
variables cut gradients where they are written: whoever reads one afterwards depends on the variable alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf


class WrittenScope(keras.StatelessScope):  # type: ignore[misc]  # Keras has no types
    """Keeps what is written. No gradient flows through that; a weight's goes on to the weight as it was given.

    weights: the values of those that get gradients, by the id of the variable. others: the variables that get none.
    """

    def __init__(self, weights: Sequence[tuple[Any, Any]], others: Sequence[tuple[Any, Any]]) -> None:
        super().__init__([*weights, *others], collect_losses=True)
        self._given = {id(variable): self.state_mapping[id(variable)] for variable, _ in weights}
        self.before: Mapping[int, Any] = dict(self.state_mapping)
        """The values of variables, by their id, as they were given."""

    @property
    def after(self) -> Mapping[int, Any]:
        """The values of variables, by their id, as they are now."""
        return self.state_mapping  # type: ignore[no-any-return]

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Keep what Keras writes."""
        variable, value = update
        given = self._given.get(id(variable))
        super().add_update((variable, tf.stop_gradient(value) if given is None else _of_weight(given, value)))


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _of_weight(given: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], tuple[Any, None]]]:
    """Return a value that was written to a weight: its gradient is the weight's."""
    return tf.identity(value), lambda gradient: (gradient, None)
