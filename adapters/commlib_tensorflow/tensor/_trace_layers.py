"""LayerCalls: watch the calls of a model's layers, and the losses that these add."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from commlib.tensor_parallel.recording import replace_attribute
from commlib_tensorflow.tensor import _leaves
from commlib_tensorflow.tensor._gathering import SUMS, is_sum
from commlib_tensorflow.tensor._guided_calls import GuidedCall, detach_tensors, replace_tensors
from commlib_tensorflow.tensor._nested_tensors import tensors_in
from commlib_tensorflow.tensor._trace_calls import CallLog, GraphCall
from commlib_tensorflow.tensor._trace_lines import user_line


class LayerCalls:
    """Logs the calls of layers and of their regularizers. guided, detaches: as for `TraceRecorder`."""

    def __init__(
        self,
        log: CallLog,
        layers: Mapping[str, Any],
        styles: Collection[str],
        *,
        guided: GuidedCall | None,
        detaches: bool,
    ) -> None:
        self._log, self._styles, self._guided, self._detaches = log, styles, guided, detaches
        self._names = {id(layer): name for name, layer in reversed(list(layers.items()))}
        self.hidden: list[str] = []
        """Layers with a style that ran in another graph: in a loop, a branch or a function."""
        self.losses: list[tuple[str, Any, str]] = []
        """Losses that layers add, with the layers' names and the lines."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Log the calls within the context."""
        plain = keras.layers.Layer.__call__

        def noted(layer: Any, *args: Any, **options: Any) -> Any:
            return self._call_layer(plain, layer, args, options)

        with ExitStack() as stack:
            stack.enter_context(replace_attribute(keras.layers.Layer, "__call__", noted))
            # Keras cannot recompute layers in graphs; the results are the same without recomputation.
            stack.enter_context(
                replace_attribute(keras.layers.Layer, "rematerialized_call", lambda _, call, *args, **options: call)
            )
            stack.enter_context(
                replace_attribute(keras.layers.Layer, "add_loss", self._wrap_add_loss(keras.layers.Layer.add_loss))
            )
            for kind in SUMS:
                stack.enter_context(replace_attribute(kind, "__call__", self._wrap_regularizer(kind.__call__)))
            yield

    def _call_layer(self, plain: Any, layer: Any, args: Any, options: Any) -> Any:
        name = self._names.get(id(layer))
        if name is None or not self._log.is_recording:
            if name is not None and name in self._styles and not self._log.depth:
                self.hidden.append(name)
            return plain(layer, *args, **options)
        leaf = name in self._styles or _leaves.is_leaf(layer)
        call = GraphCall(name, layer, tensors_in([args, options]), self._log.count, leaf, place=user_line())
        self._log.calls.append(call)
        self._log.depth += leaf
        guided = self._guided if leaf else None
        try:
            if guided is not None:
                args, options = replace_tensors((args, options), guided.inputs(name, call.inputs))
            result = plain(layer, *args, **options)
            if guided is not None:
                result = replace_tensors(result, guided.result(tensors_in(result)))
            call.arguments = args, options
            if leaf and self._detaches:
                result = detach_tensors(result)
            call.results = tensors_in(result)
        finally:
            self._log.depth -= leaf
            call.last = self._log.count
        return result

    def _wrap_add_loss(self, add_loss: Any) -> Any:
        """Wrap Keras' add_loss to record the added losses."""

        def added(layer: Any, loss: Any) -> Any:
            if not (self._log.depth or is_sum(layer.activity_regularizer)):
                self.losses += [(layer.name, tensor, user_line()) for tensor in tensors_in(loss)]
            return add_loss(layer, loss)

        return added

    def _wrap_regularizer(self, function: Any) -> Any:
        """Wrap a regularizer as one step: a sum over this rank's elements is correct."""

        def called(regularizer: Any, x: Any) -> Any:
            fields, text = {"kind": "penalty", "inputs": (x,)}, f"{type(regularizer).__name__} of an output"
            call = GraphCall("", None, [], self._log.count, True, place=user_line(), fields=fields, text=text)
            result = function(regularizer, x)
            if self._log.is_recording:
                self._log.end(call, tensors_in(result))
            return result

        return called
