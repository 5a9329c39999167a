"""RetainedValues: find the values that a model still holds after its call, or has assigned to variables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from commlib.tensor_parallel import equations
from commlib.tensor_parallel.recording import StepRecording
from commlib.tensor_parallel.run.caches import count_cached
from commlib_tensorflow.tensor._calls import ModelCall
from commlib_tensorflow.tensor._gradient_registry import tensors_of_gradients
from commlib_tensorflow.tensor._held_tensors import find_held
from commlib_tensorflow.tensor._operations import SOURCES, shape_of
from commlib_tensorflow.tensor._trace_calls import CallLog
from commlib_tensorflow.tensor._trace_lines import line_of

HANDLES = (tf.resource, tf.variant)
"""Dtypes of tensors without values."""


class RetainedValues:
    """The values of a recording that are held after the call, or assigned to a variable: their numbers."""

    def __init__(self, recording: StepRecording, log: CallLog) -> None:
        self._recording, self._log = recording, log
        self.numbers = set[int]()

    def find(
        self, first: int, model: Any, call: ModelCall, results: Sequence[Any], others: Sequence[Collection[Any]]
    ) -> list[Any]:
        """Return the tensors that are held after the call, besides its results.

        first: the first operation of the call. others: lists, tuples and dicts of the trace that hold some, too.
        """
        returned = set(map(id, results))
        operations = self._log.graph.get_operations()
        every = [one for op in operations[first:] for one in op.outputs]
        candidates = [one for one in every if one.dtype not in HANDLES and id(one) not in returned]
        masked = [vars(one) for one in every if "_keras_mask" in vars(one)]
        losses = [
            own_losses for layer in model._flatten_layers() if (own_losses := vars(layer).get("_losses")) is not None
        ]
        calls = [
            given
            for one in self._log.calls
            for given in (*one.arguments, one.inputs, one.results, (one.fields or {}).get("inputs"))
        ]
        roots = (vars(model), call.args, call.options)
        inputs = [known for op in operations if (known := getattr(op, "_inputs_val", None)) is not None]
        ours = [every, *others, *masked, *losses, *calls, *inputs, *tensors_of_gradients(operations)]
        held = find_held(candidates, ours, lambda: count_cached(roots, tf.is_tensor, keras.layers.Layer))
        return [tensor for tensor in candidates if id(tensor) in held]

    def add(self, tensors: Iterable[Any]) -> None:
        """Add tensors that are held, once all operations are recorded."""
        self.numbers |= {number for one in tensors if (number := self._number(one)) is not None}

    def _number(self, tensor: Any) -> int | None:
        """Return the number of a held tensor, also of one from inside a layer that is one step."""
        if self._recording.has_number(tensor) or tensor.op.type in SOURCES:
            return self._recording.number_of(tensor)
        at = next(at for at, op in enumerate(self._log.graph.get_operations()) if op.name == tensor.op.name)
        for call in self._log.calls:
            if call.leaf and call.layer is not None and call.first <= at < call.last:
                text, place = f"what is kept within {call.name}", line_of(tensor.op)
                self._recording.add("", "unknown", (*call.inputs, *call.results), (tensor,), text=text, place=place)
        return self._recording.number_of(tensor)

    def note_assignment(self, value: Any, text: str) -> None:
        """Record that a variable was assigned a value, which has no gradient when it is read."""
        if getattr(value, "graph", None) is self._log.graph and self._recording.has_number(value):
            constant = tf.stop_gradient(value)
            equation = equations.pointwise(shape_of(value))
            self._recording.add(
                "", "equation", (value,), (constant,), equation=equation, text=text, place=line_of(value.op)
            )
            self._recording.detach(constant)
            self.numbers.add(self._recording.number(constant))
