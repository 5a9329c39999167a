"""Logs: the mean loss and the metrics of the batches so far, computed where the last stage is, alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from commlib.pipeline.pipe import Pipe
from commlib_tensorflow._steps import Result

Measure = Callable[[Any, list[Any], Any], dict[str, Any]]
"""Update metrics, given targets, outputs and sample weights of a whole batch; return their values."""


class Logs:
    """What callbacks see. measure: None without metrics; it is called on the rank of the last stage."""

    def __init__(self, measure: Measure | None) -> None:
        self._measure = measure
        self._compiled = tf.function(self._of_outputs, autograph=False, jit_compile=False)
        self._names: list[str] | None = None
        self._mean, self._rows = 0.0, 0
        self.latest: dict[str, float] = {}
        """Those after the last batch."""

    @property
    def has_metrics(self) -> bool:
        """Whether the outputs of batches are wanted."""
        return self._measure is not None

    def reset(self) -> None:
        """Forget the losses of the batches so far."""
        self._mean, self._rows = 0.0, 0

    def add(self, result: Result, pipe: Pipe) -> dict[str, float]:
        """Add a batch; return the logs. Collective."""
        self._rows += result.rows
        self._mean += (result.loss - self._mean) * result.rows / max(1, self._rows)
        logs: dict[str, Any] = {}
        if result.outputs is not None:
            logs = self._compiled(result.target, result.outputs, result.masks, result.sample_weight)
        if self._names is None:
            self._names = pipe.comm.broadcast_object(list(logs), pipe.last) if self.has_metrics else []
        told = pipe.tell([float(logs.get(name, 0.0)) for name in self._names]) if self._names else []
        self.latest = {**dict(zip(self._names, told, strict=True)), "loss": self._mean}
        return dict(self.latest)

    def _of_outputs(self, target: Any, outputs: list[Any], masks: list[Any], sample_weight: Any) -> dict[str, Any]:
        assert self._measure is not None
        marked = [tf.identity(output) for output in outputs]
        for output, mask in zip(marked, masks, strict=True):
            if mask is not None:
                output._keras_mask = mask  # where Keras looks for it
        return self._measure(target, marked, sample_weight)
