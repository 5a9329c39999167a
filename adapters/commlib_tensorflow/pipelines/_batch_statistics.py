"""Batch statistics: compute moving statistics over whole batches, although layers see microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib_tensorflow._bridge import to_array
from commlib_tensorflow.pipelines._parts import StageLayer


@dataclass(slots=True)
class _BatchMoments:
    """Sums over the microbatches of a batch: rows, rows times mean, and rows times mean square, in float64."""

    rows: float = 0.0
    mean: Array | float = 0.0
    square: Array | float = 0.0


class WholeBatchStatistics:
    """Update the moving statistics of BatchNormalization once per batch, from the mean and variance of the whole batch.

    A layer still normalises each microbatch by the microbatch's own statistics, because the others have not arrived
    yet. In training a layer only writes its moving statistics, as old * momentum + new * (1 - momentum). So a forward
    gets zeros as the old values, and the new statistics follow from the values that it writes.
    """

    def __init__(self, parts: Sequence[StageLayer]) -> None:
        calls = [node for part in parts for node in part.nodes]
        counts = Counter(id(node.operation) for node in calls)
        self._layers: list[Any] = []
        for node in calls:
            for layer in _batch_norms(node.operation):
                # Keras records the calls of a layer within another model, but not those of a layer within a layer.
                within = 1 if layer is node.operation else len(layer._inbound_nodes)
                _check(layer, node, max(counts[id(node.operation)], within))
                self._layers.append(layer)
        self._active: list[Any] = []
        self._seen: dict[int, _BatchMoments] = {}

    def begin(self) -> None:
        """Begin a batch, with the layers that are trainable now: the others change no statistics."""
        self._active = [layer for layer in self._layers if layer.trainable and layer.momentum < 1]
        self._seen = {id(layer): _BatchMoments() for layer in self._active}

    def hide(self, variables: Sequence[Any], values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the values of variables for a forward in training: zeros for moving statistics."""
        hidden = {id(v) for layer in self._active for v in (layer.moving_mean, layer.moving_variance)}
        pairs = zip(variables, values, strict=True)
        return [tf.zeros_like(value) if id(variable) in hidden else value for variable, value in pairs]

    def take(self, variables: Sequence[Any], changed: Sequence[Any], rows: float) -> list[Any]:
        """Accumulate the statistics that a forward of `rows` rows wrote; return the other changes, None for these."""
        places = {id(variable): place for place, variable in enumerate(variables)}
        left = list(changed)
        for layer in self._active:
            both = (layer.moving_mean, layer.moving_variance)
            indices = [places[id(variable)] for variable in both if id(variable) in places]
            if not indices or changed[indices[0]] is None:  # it belongs to another stage, or runs in inference mode
                continue
            mean, variance = (_unscale(to_array(changed[place]), 1.0 - layer.momentum) for place in indices)
            seen = self._seen[id(layer)]
            seen.rows += rows
            seen.mean = seen.mean + rows * mean
            seen.square = seen.square + rows * (variance + mean**2)
            for place in indices:
                left[place] = None
        return left

    def end(self) -> None:
        """Update the layers with the accumulated statistics."""
        for layer in self._active:
            seen = self._seen[id(layer)]
            if seen.rows:
                mean = np.asarray(seen.mean / seen.rows)
                variance = np.asarray(seen.square / seen.rows - mean**2)
                for variable, new in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
                    old = to_array(tf.convert_to_tensor(variable.value)).astype(np.float64)
                    variable.assign(old * layer.momentum + new * (1 - layer.momentum))
        self._seen = {id(layer): _BatchMoments() for layer in self._active}


def _unscale(array: Array, share: float) -> Array:
    """Divide by a factor in float64. The factor is rounded to the array's dtype, as it was in the product."""
    whole: Array = array.astype(np.float64) / float(array.dtype.type(share))
    return whole


def _batch_norms(operation: Any) -> Iterator[Any]:
    if isinstance(operation, keras.layers.Layer):
        for layer in operation._flatten_layers():
            if isinstance(layer, keras.layers.BatchNormalization):
                yield layer


def _check(layer: Any, node: Any, calls: int) -> None:
    """Raise UsageError for a layer whose statistics of a batch do not follow from its microbatches."""
    why = ""
    if calls > 1:
        why = f"is called {calls} times, so it sees several batches in one step"
    elif getattr(layer, "renorm", False):
        why = "normalises by its moving statistics in training (renorm)"
    elif any(getattr(tensor, "_keras_mask", None) is not None for tensor in node.input_tensors):
        why = "has a mask, so the number of rows in its statistics is unknown"
    if why:
        raise UsageError(f"pipeline: batch_norm='batch': {layer.path!r} {why}: use batch_norm='microbatch'")
