"""OpaqueFunctions: watch the functions that are one step each, as redistributions are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from commlib.tensor_parallel.lengths import Length
from commlib.tensor_parallel.recording import replace_attribute
from commlib_tensorflow.tensor import context, moves
from commlib_tensorflow.tensor._nested_tensors import tensors_in
from commlib_tensorflow.tensor._operations import describe_repeat
from commlib_tensorflow.tensor._trace_calls import CallLog, GraphCall
from commlib_tensorflow.tensor._trace_lines import user_line

_OPAQUE = ((moves, "redistribute"), (context, "ring_attention"), (context, "attention_by_heads"))
"""Functions between ranks that a model may call itself, and the modules where they are looked up."""


class OpaqueFunctions:
    """Logs the calls of functions between ranks, whose results have an unknown origin, and of `tf.repeat`."""

    def __init__(self, log: CallLog) -> None:
        self._log = log

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Log the calls within the context."""
        with ExitStack() as stack:
            for owner, name in _OPAQUE:
                stack.enter_context(replace_attribute(owner, name, self._wrap_opaque(getattr(owner, name))))
            stack.enter_context(replace_attribute(tf, "repeat", self._wrap_described(tf.repeat, describe_repeat)))
            yield

    def _wrap_described(self, function: Any, describe: Any) -> Any:
        """Wrap a TensorFlow function as one step, if its arguments can be described."""

        def called(*args: Any, **options: Any) -> Any:
            if not args or not self._log.is_recording:
                return function(*args, **options)
            first = self._log.count
            given = (tf.convert_to_tensor(args[0]), *args[1:])
            fields = describe(*given, **options)
            given = (given[0], *(int(one) if isinstance(one, Length) else one for one in given[1:]))
            if fields is None:
                return function(*given, **options)
            call = GraphCall("", None, [given[0]], first, True, place=user_line(), fields=fields)
            results = tensors_in(function(*given, **options))
            self._log.end(call, results)
            return results[0]

        return called

    def _wrap_opaque(self, function: Any) -> Any:
        """Wrap a function as one opaque step: its results have an unknown origin."""

        def called(*args: Any) -> Any:
            call = GraphCall("", None, tensors_in(args), self._log.count, True)
            self._log.depth += 1
            try:
                result = function(*args)
            finally:
                self._log.depth -= 1
            if self._log.is_recording:
                self._log.end(call, tensors_in(result))
            return result

        return called
