"""RequestedLengths: find the layers' integers in the shapes that a model requests."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from commlib.tensor_parallel.lengths import Length
from commlib.tensor_parallel.recording import StepRecording, replace_attribute
from commlib.tensor_parallel.run.rank_numbers import ModuleNumber, change_numbers
from commlib_tensorflow.tensor._nested_tensors import tensors_in
from commlib_tensorflow.tensor._operations import shape_of
from commlib_tensorflow.tensor._trace_calls import CallLog


class RequestedLengths:
    """The shapes that operations requested with integers of layers, or with lengths of tensors."""

    def __init__(self, recording: StepRecording, log: CallLog) -> None:
        self._recording, self._log = recording, log
        self.requested: dict[str, tuple[int, ...]] = {}
        """By the name of the operation."""

    @contextmanager
    def watch(self, numbers: Mapping[str, ModuleNumber]) -> Iterator[None]:
        """Make integers of layers remember their source within the context, and record the shapes that use them."""
        lengths = self._recording.attribute_lengths({name: number.value for name, number in numbers.items()})
        with ExitStack() as stack:
            for name in ("reshape", "broadcast_to", "split", "tile"):
                stack.enter_context(replace_attribute(tf, name, self._wrap_shape_argument(getattr(tf, name))))
            stack.enter_context(change_numbers([(numbers[name], length) for name, length in lengths.items()]))
            yield

    def _wrap_shape_argument(self, function: Any) -> Any:
        """Wrap a TensorFlow function whose second argument is a shape or lengths, and record the integers in it."""

        def called(value: Any, lengths: Any, *args: Any, **options: Any) -> Any:
            several = isinstance(lengths, tuple | list)
            given = list(lengths) if several else [lengths]
            if not any(isinstance(one, Length) for one in given):
                return function(value, lengths, *args, **options)
            plain = [int(one) if isinstance(one, Length) else one for one in given]
            result = function(value, plain if several else plain[0], *args, **options)
            tensors = tensors_in(result)
            if several and tensors and getattr(tensors[0], "graph", None) is self._log.graph:
                requested = [one if isinstance(one, int) else tf.get_static_value(one) for one in given]
                self.requested[tensors[0].op.name] = tuple(-1 if one is None else one for one in requested)
            return result

        return functools.wraps(function)(called)

    def describe(self, described: Mapping[str, Any], tensor: Any) -> dict[str, Any]:
        """Return the fields of a step, with the requested lengths if "times" gives the repetitions of a tensor."""
        fields = dict(described)
        if times := fields.pop("times", ()):
            lengths = self._recording.lengths_of(self._recording.number(tensor), shape_of(tensor))
            fields["requested"] = tuple(
                -1 if count == 1 else length * count for length, count in zip(lengths, times, strict=True)
            )
        return fields
