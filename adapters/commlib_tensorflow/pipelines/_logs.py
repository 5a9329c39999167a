"""Logs: the mean loss and the metrics of the batches so far, computed on the last stage's rank, equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.pipeline.pipe import Pipe
from commlib_tensorflow.pipelines._steps import BatchResult

Measure = Callable[[Any, list[Any], Any], dict[str, Any]]
"""Update metrics, given targets, outputs and sample weights of a whole batch; return their values."""


class Logs:
    """Logs for callbacks. measure: None without metrics; it is called on the rank of the last stage.

    in_order: returns the values of logs as a list in Keras' order of metrics, which only the last stage's rank has.
    """

    def __init__(self, measure: Measure | None, in_order: Callable[[dict[str, Any]], Any]) -> None:
        self._measure, self._in_order = measure, in_order
        self._order: list[str] = []
        self._compiled = tf.function(self._of_outputs, autograph=False, jit_compile=False)
        self._names: list[tuple[str, tuple[int, ...]]] | None = None  # with their shapes
        self._mean, self._rows = 0.0, 0
        self.latest: dict[str, Any] = {}
        """The logs after the last batch: numbers, and arrays for metrics with several values."""

    @property
    def has_metrics(self) -> bool:
        """Whether the outputs of batches are needed."""
        return self._measure is not None

    def reset(self) -> None:
        """Forget the losses of the batches so far."""
        self._mean, self._rows = 0.0, 0

    def add(self, result: BatchResult, pipe: Pipe) -> dict[str, Any]:
        """Add a batch; return the logs. Collective."""
        self._rows += result.rows
        if result.rows:  # otherwise the loss may be 0/0
            self._mean += (result.loss - self._mean) * result.rows / self._rows
        logs: dict[str, Any] = {}
        if result.outputs is not None:
            logs = self._compiled(result.target, result.outputs, result.masks, result.sample_weight)
        if self._names is None:
            own = [(name, np.shape(value)) for name, value in logs.items()]
            order = self._in_order({name: name for name in ("loss", *logs)}) if logs else []
            own, self._order = pipe.comm.broadcast_object((own, order), pipe.last) if self.has_metrics else ([], [])
            self._names = own
        metrics = self._share_metrics(logs, pipe) if self._names else {}
        self.latest = {**metrics, "loss": self._mean}
        return dict(self.latest)

    def listed(self, logs: dict[str, Any]) -> Any:
        """Return the values of logs as Keras does, in one order on all ranks: a single value, or a list."""
        if not self._order:
            return self._in_order(logs)
        # metrics and weighted_metrics may share a name, which then occurs twice.
        known = [name for name in self._order if name in logs]
        names = [*known, *sorted(logs.keys() - set(known))]
        return [logs[name] for name in names] if len(names) > 1 else logs[names[0]]

    def _share_metrics(self, logs: dict[str, Any], pipe: Pipe) -> dict[str, Any]:
        """Return the last stage's metrics on all ranks."""
        names = self._names or []
        own = [np.ravel(logs.get(name, np.zeros(shape))).astype(np.float64) for name, shape in names]
        values = np.array(pipe.broadcast_results(np.concatenate(own).tolist()))
        parts = np.split(values, np.cumsum([len(one) for one in own])[:-1])
        pairs = zip(names, parts, strict=True)
        return {name: part.reshape(shape) if shape else float(part[0]) for (name, shape), part in pairs}

    def _of_outputs(self, target: Any, outputs: list[Any], masks: list[Any], sample_weight: Any) -> dict[str, Any]:
        assert self._measure is not None
        marked = [tf.identity(output) for output in outputs]
        for output, mask in zip(marked, masks, strict=True):
            if mask is not None:
                output._keras_mask = mask  # Keras looks for the mask in this attribute
        return self._measure(target, marked, sample_weight)
