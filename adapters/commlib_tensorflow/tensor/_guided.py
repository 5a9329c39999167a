"""Guided: call the layers of a model of Keras as a guide says, and let them give this rank's part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from commlib.tensor_parallel.checks.guide import Guide
from commlib.tensor_parallel.trace import Step


class Guided:
    """A guide, and the call of a layer that is being made."""

    def __init__(self, guide: Guide) -> None:
        self._guide = guide
        self._step: Step | None = None
        self.given: dict[int, Any] = {}
        """What layers get in the place of tensors, by the ids of these."""

    def inputs(self, layer: str, tensors: list[Any]) -> Mapping[int, Any]:
        """Return by the ids of tensors with what a layer is called for them, where that is something else."""
        self._step = self._guide.called(layer)
        numbers = () if self._step is None else self._guide.inputs(self._step)
        if len(numbers) != len(tensors):
            return {}
        return {id(tensor): self._of(number, tensor) for number, tensor in zip(numbers, tensors, strict=True)}

    def result(self, results: list[Any]) -> Mapping[int, Any]:
        """Return by their ids what is to be taken for the results of the layer, where that is something else."""
        step, self._step = self._step, None
        part = None if step is None or not results else self._guide.part(step)
        if part is None:
            return {}
        (dim, spans), whole = part, results[0]
        front = (slice(None),) * dim
        return {id(whole): _masked(tf.concat([whole[(*front, slice(*span))] for span in spans], dim), whole)}

    def _of(self, number: int, like: Any) -> Any:
        """Return a value of the whole run: one tensor for all calls, since layers may look for it."""
        found = self.given.get(number)
        if found is None:
            found = self.given[number] = tf.constant(self._guide.whole.values[number], like.dtype)
        return _masked(found, like)


def exchanged(value: Any, given: Mapping[int, Any]) -> Any:
    """Return a nested structure with other tensors for some, which are given by the ids of these."""
    return keras.tree.map_structure(lambda one: given.get(id(one), one), value) if given else value


def detached(value: Any) -> Any:
    """Return a nested structure whose gradients go nowhere."""
    given = [one for one in keras.tree.flatten(value) if tf.is_tensor(one) and one.dtype.is_floating]
    return exchanged(value, {id(one): _masked(tf.stop_gradient(one), one) for one in given})


def _masked(x: Any, like: Any) -> Any:
    """Give a tensor the mask that Keras sends along with another one."""
    if (mask := getattr(like, "_keras_mask", None)) is not None:
        x._keras_mask = mask
    return x
