"""Step loops: the functions by which Keras takes the steps of an execution, outside of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from commlib.pipeline.rows import WHOLE
from commlib_tensorflow.pipelines._model_outputs import ModelOutputs


class StepLoop:
    """Takes compile()'s steps_per_execution steps in each execution; returns the logs of the last."""

    def __init__(self, model: Any, step: Callable[[Any], dict[str, float]]) -> None:
        self._model, self._step = model, step

    def __call__(self, iterator: Iterator[Any]) -> dict[str, float]:
        """Take the steps of an execution. Raises StopIteration if there is no data."""
        logs: dict[str, float] | None = None
        for _, data in zip(range(self._model.steps_per_execution), iterator, strict=False):
            logs = self._step(keras.tree.map_structure(_without_optional, data))
        if logs is None:
            raise StopIteration
        return logs


class PredictLoop:
    """Predicts the batches of an execution; returns their joined outputs."""

    def __init__(self, step: Callable[[Any], Any], outputs: ModelOutputs) -> None:
        self._step, self._outputs = step, outputs

    def __call__(self, batches: Iterable[Any]) -> Any:
        """Predict batches."""
        outputs = [self._step(data) for data in batches]
        places = self._outputs.nest(self._outputs.places)
        return keras.tree.map_structure(
            lambda place, *parts: parts[0] if place == WHOLE else tf.concat(parts, place), places, *outputs
        )


def _without_optional(leaf: Any) -> Any:
    """Return None for an absent optional of a dataset, as Keras does."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf
