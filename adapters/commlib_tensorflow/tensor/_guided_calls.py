"""Guided calls: replace inputs and results of layers as a guide requests, so that a run gives this rank's shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from commlib.tensor_parallel.checks.guided_run import GuidedRun
from commlib.tensor_parallel.trace import TraceStep


class GuidedCall:
    """A guide, and the layer call that is in progress."""

    def __init__(self, guide: GuidedRun) -> None:
        self._guide = guide
        self._step: TraceStep | None = None
        self.values: dict[int, Any] = {}
        """Replacements for tensors in layers' inputs, by the ids of the tensors."""

    def inputs(self, layer: str, tensors: list[Any]) -> Mapping[int, Any]:
        """Return the replacements for a layer's inputs, by the ids of the tensors."""
        self._step = self._guide.called(layer)
        numbers = () if self._step is None else self._guide.inputs(self._step)
        if len(numbers) != len(tensors):
            return {}
        return {id(tensor): self._of(number, tensor) for number, tensor in zip(numbers, tensors, strict=True)}

    def result(self, results: list[Any]) -> Mapping[int, Any]:
        """Return the replacement for the layer's result, by the id of the result."""
        step, self._step = self._step, None
        part = None if step is None or not results else self._guide.part(step)
        if part is None:
            return {}
        (dim, spans), whole = part, results[0]
        front = (slice(None),) * dim
        return {id(whole): _copy_mask(tf.concat([whole[(*front, slice(*span))] for span in spans], dim), whole)}

    def _of(self, number: int, like: Any) -> Any:
        """Return a value of the full run: one tensor for all calls, since layers may compare identities."""
        value = self.values.get(number)
        if value is None:
            value = self.values[number] = tf.constant(self._guide.whole.values[number], like.dtype)
        return _copy_mask(value, like)


def replace_tensors(value: Any, given: Mapping[int, Any]) -> Any:
    """Return a nested structure with some tensors replaced, given by their ids."""
    return keras.tree.map_structure(lambda one: given.get(id(one), one), value) if given else value


def detach_tensors(value: Any) -> Any:
    """Return a nested structure with stopped gradients."""
    given = [one for one in keras.tree.flatten(value) if tf.is_tensor(one) and one.dtype.is_floating]
    return replace_tensors(value, {id(one): _copy_mask(tf.stop_gradient(one), one) for one in given})


def _copy_mask(x: Any, like: Any) -> Any:
    """Copy Keras' mask from one tensor to another."""
    if (mask := getattr(like, "_keras_mask", None)) is not None:
        x._keras_mask = mask
    return x
