"""CompiledModel: the loss and the metrics of a model's compile(), as functions of whole batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf


class CompiledModel:
    """What compile() has made of a Keras model's loss and metrics. nest: returns outputs in the model's structure."""

    def __init__(self, model: Any, nest: Callable[[Sequence[Any]], Any]) -> None:
        self._model, self._nest = model, nest

    @property
    def has_loss(self) -> bool:
        """Whether there is a loss."""
        return self._model._compile_loss is not None

    @property
    def has_metrics(self) -> bool:
        """Whether there are metrics; the losses of several outputs are some."""
        has_losses = self.has_loss and len(self._model.output_names) > 1
        return has_losses or self._model._compile_metrics is not None

    @property
    def metrics(self) -> list[Any]:
        """The metrics as compile() takes them: unweighted and weighted."""
        compiled = self._model._compile_metrics  # a compile without metrics does not replace it
        return [getattr(compiled, name, None) for name in ("_user_metrics", "_user_weighted_metrics")]

    def loss(self, target: Any, outputs: list[Any], sample_weight: Any) -> Any:
        """Return the compiled loss. Its per-output metrics are discarded: they would be of microbatches."""
        with keras.StatelessScope():
            return self._model._compile_loss(target, self._nest(outputs), sample_weight)

    def measure(self, target: Any, outputs: list[Any], sample_weight: Any) -> dict[str, Any]:
        """Update the metrics with a whole batch, and return their values."""
        output = self._nest(outputs)
        if self._model._compile_loss.metrics:  # metrics of several outputs
            self._model._compile_loss(target, output, sample_weight)
        if self._model._compile_metrics is not None:
            if not self._model._compile_metrics.built:
                self._model._compile_metrics.build(target, output)
                with tf.init_scope():  # earlier updates do not count: Keras resets metrics when it builds a model
                    self._model._compile_metrics.reset_state()
            self._model._compile_metrics.update_state(target, output, sample_weight)
        return keras.Model.get_metrics_result(self._model)  # type: ignore[no-any-return]
