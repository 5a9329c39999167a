"""Tracing: build the graph of a model's call, and return its steps as a `commlib.tensor_parallel.trace.ModelTrace`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from commlib.errors import UsageError
from commlib.tensor_parallel.checks.weight_shapes import SeenWeights
from commlib.tensor_parallel.equations import Equation
from commlib.tensor_parallel.recording import StepRecording
from commlib.tensor_parallel.styles import PerRank, Style
from commlib.tensor_parallel.trace import ModelTrace
from commlib_tensorflow._trial_run import preserve_model
from commlib_tensorflow.tensor._calls import ModelCall
from commlib_tensorflow.tensor._gradient_registry import forget_gradients
from commlib_tensorflow.tensor._guided_calls import GuidedCall
from commlib_tensorflow.tensor._nested_tensors import tensors_in
from commlib_tensorflow.tensor._numbers import numbers_in
from commlib_tensorflow.tensor._operations import SOURCES, is_discrete, shape_of
from commlib_tensorflow.tensor._trace_calls import CallLog
from commlib_tensorflow.tensor._trace_functions import OpaqueFunctions
from commlib_tensorflow.tensor._trace_layers import LayerCalls
from commlib_tensorflow.tensor._trace_lengths import RequestedLengths
from commlib_tensorflow.tensor._trace_lines import user_line
from commlib_tensorflow.tensor._trace_operations import OperationRecorder
from commlib_tensorflow.tensor._trace_queries import UserQueries
from commlib_tensorflow.tensor._trace_retained import RetainedValues
from commlib_tensorflow.tensor._weight_sharing import find_tied

Layers = Mapping[str, Any]
"""The layers of a model by their names."""


def try_trace(
    model: Any,
    layers: Layers,
    given: Any,
    styles: Collection[str] = (),
    hidden: list[str] | None = None,
    *,
    eager: list[str] | None = None,
    training: bool = False,
    weights: SeenWeights | None = None,
) -> tuple[ModelTrace, Exception | None]:
    """Return a model's layers and the operations between them, in call order, and the error of the call, if any.

    given: the arguments of the call, or `tf.TensorSpec`s of them: one value, or a `ModelCall`. styles: layers that are
    recorded as one step because they have a style. The graph is made but never run: nothing is computed, and a sharded
    model communicates only the agreements at layers' first use. All state is restored: see `preserve_model`. If the
    call fails, its error is returned, with the trace up to the failing layer. hidden: gets the names of sharded layers
    that ran where they cannot be traced. eager: gets the lines that query whether they run eagerly, which
    is not the case here. weights: those whose shapes are recorded when the model requests them.
    """
    call = ModelCall.of(given)
    for inlines in (True, False):  # without AutoGraph some functions cannot be inlined
        recorder = TraceRecorder(
            model, layers, styles, inlines=inlines, measures=not styles, weights=weights, tries=True
        )

        def once(call: ModelCall, recorder: TraceRecorder = recorder) -> None:
            recorder.run(call, training=training)
            forget_gradients(tf.compat.v1.get_default_graph().get_operations())

        with tf.init_scope(), preserve_model(model, call.args, call.options):
            graph_of(once, call)
        if recorder.error is None:
            break
    if recorder.error is not None and recorder.queries.element_place:
        reason = (
            f"it requests elements of a tensor at {recorder.queries.element_place}. A graph tensor has none, so later "
            "operations cannot be checked: use keras.ops.where or cond, or leave example= and verify= out"
        )
        error = UsageError(f"plan: {type(model).__name__} cannot be traced: {reason}")
        error.__cause__, recorder.error = recorder.error, error
    if recorder.hidden and hidden is not None:
        hidden.extend(recorder.hidden)
    if recorder.queries.eager and eager is not None:
        eager.extend(recorder.queries.eager)
    return recorder.trace(), recorder.error


def styles_in(layers: Layers) -> dict[str, Style]:
    """Return the styles of the layers that are already sharded."""
    given = {name: getattr(layer, "style", None) for name, layer in layers.items()}
    return {name: style for name, style in given.items() if isinstance(style, Style)}


def graph_of(function: Callable[[ModelCall], Any], call: ModelCall) -> Any:
    """Return a concrete function of a call's tensors, traced without AutoGraph."""
    plain = tf.autograph.experimental.do_not_convert(lambda *tensors: function(call.with_tensors(tensors)))
    return tf.function(plain, autograph=False).get_concrete_function(*map(_spec, call.tensors))


def _spec(value: Any) -> Any:
    if isinstance(value, tf.TensorSpec):
        return value
    tensor = value if tf.is_tensor(value) else tf.convert_to_tensor(value)
    return tf.TensorSpec(concrete(tensor.shape), tensor.dtype)


def concrete(shape: Any) -> tuple[int, ...]:
    """Return a shape in which unknown lengths have arbitrary, distinct values."""
    lengths = iter((2, 7, 5, 11, 13))
    return tuple(next(lengths) if length is None else length for length in shape)


class TraceRecorder:
    """Recorder of the operations that a model's call adds to the current graph. tensors: all values, by number.

    whole: a sharded model runs unsharded; by default whether it is unsharded. guided: replaces inputs and results of
    layers. inlines: TensorFlow functions that the model calls are inlined. measures: layers' integers remember their
    source where shapes use them; always on if some are per rank. detaches: gradients stop at layers, for `arriving`.
    weights: the weight shapes that the model sees; their use is recorded. keeps: report the values that are held after
    the call, which is impossible while a tape holds all. tries: layers on sequence shards are tried on shards.
    """

    def __init__(
        self,
        model: Any,
        layers: Layers,
        styles: Collection[str],
        *,
        whole: bool | None = None,
        guided: GuidedCall | None = None,
        inlines: bool = True,
        measures: bool = False,
        detaches: bool = False,
        weights: SeenWeights | None = None,
        keeps: bool = True,
        tries: bool = False,
    ) -> None:
        self._model, self._layers, self._inlines, self._keeps = model, layers, inlines, keeps
        own_numbers = isinstance(styles, Mapping) and any(isinstance(style, PerRank) for style in styles.values())
        self._measures = measures or own_numbers
        self._whole = not styles_in(layers) if whole is None else whole
        self._guided = guided
        self._log = log = CallLog()
        sources = _TensorSources(model, layers, log)
        self._recording = recording = StepRecording(shape_of, sources.source, _key, is_discrete, user_line)
        self._layer_calls = LayerCalls(log, layers, styles, guided=guided, detaches=detaches)
        self._functions = OpaqueFunctions(log)
        self._lengths, self._retained = RequestedLengths(recording, log), RetainedValues(recording, log)
        self._operations = OperationRecorder(recording, log, self._retained, self._lengths, styles, tries=tries)
        self._results: list[Any] = []
        self.tensors = recording.tensors
        """All values, by number."""
        self.queries = UserQueries(log, weights or {})
        self.error: Exception | None = None

    def run(self, call: ModelCall, *, training: bool) -> Any:
        """Call the model, and record its steps. An exception is kept as `error`."""
        self._log.graph = tf.compat.v1.get_default_graph()
        for tensor in call.tensors:
            self._recording.add("", "given", (), (tensor,), text="an argument")
        before, result = self._log.count, None
        with self._watch(), keras.StatelessScope() as scope:
            try:
                result = self._model(*call.args, training=training, **call.options)
            except Exception as error:
                self.error = error
        self._results = tensors_in(result)
        updates: dict[int, Any] = scope.state_mapping
        held: list[Any] = []
        if self._keeps and self.error is None:
            others = [updates, *self._layer_calls.losses, *([] if self._guided is None else [self._guided.values])]
            held = self._retained.find(before, self._model, call, self._results, others)
        self._operations.record(before, training=training)
        names = {id(variable): variable.path for variable in self._model.variables}
        for key, value in updates.items():
            self._retained.note_assignment(value, f"what is assigned to {names.get(key, 'a variable')}")
        self._retained.add(held)
        for name, loss, place in self._layer_calls.losses:
            if getattr(loss, "graph", None) is self._log.graph:
                every = tuple(range(len(shape_of(loss))))
                equation = Equation((every, every), every, frozenset(every))
                self._recording.add(
                    "", "equation", (loss, loss), (), equation=equation, text=f"add_loss of {name}", place=place
                )
        return result

    @property
    def hidden(self) -> list[str]:
        """Layers with a style that ran in another graph: in a loop, a branch or a function."""
        return self._layer_calls.hidden

    @property
    def communicates(self) -> bool:
        """Whether ranks communicated outside of layers."""
        return self._operations.communicates

    @property
    def is_custom(self) -> bool:
        """Whether a function between layers has a custom gradient."""
        return self._operations.is_custom

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn, also in functions within the graph."""
        kinds = {op.type for op in self._log.graph.get_operations()}
        kinds |= {node.op for one in self._log.graph.as_graph_def().library.function for node in one.node_def}
        return any("Random" in kind or "Multinomial" in kind or "TruncatedNormal" in kind for kind in kinds)

    def arriving(self) -> dict[int, Any]:
        """Return gradients of layers' results by number, as the operations before the next layers compute them.

        They start from values computed element by element from the next layers' inputs: the same for a shard as for the
        full tensor.
        """
        calls = [call for call in self._log.calls if call.leaf and call.layer is not None]
        inputs = [one for call in calls for one in call.inputs] + self._results
        ends = [one for one in inputs if one.dtype.is_floating and getattr(one, "graph", None) is self._log.graph]
        results = [one for call in calls for one in call.results if one.dtype.is_floating]
        given = [tf.cos(3 * end + 1) for end in ends]
        gradients = tf.gradients(ends, results, given, unconnected_gradients="zero") if ends and results else []
        return {self._recording.number(tensor): one for tensor, one in zip(results, gradients, strict=True)}

    def trace(self) -> ModelTrace:
        """Return the trace of the run."""
        retained = self._retained.numbers
        return self._recording.trace(self._results, find_tied(self._layers), whole=self._whole, retained=retained)

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """Log the calls of the model within the context."""
        with ExitStack() as stack:
            stack.enter_context(self._layer_calls.watch())
            stack.enter_context(self._functions.watch())
            stack.enter_context(self.queries.watch((self._model, *self._layers.values())))
            if self._measures:
                stack.enter_context(self._lengths.watch(numbers_in(self._model, self._layers)))
            if self._inlines:
                stack.callback(tf.config.run_functions_eagerly, tf.config.functions_run_eagerly())
                tf.config.run_functions_eagerly(True)
            yield


class _TensorSources:
    """The sources of tensors that no step makes: the weights of a model by their layers, and constants."""

    def __init__(self, model: Any, layers: Layers, log: CallLog) -> None:
        self._log = log
        self._weights = {
            id(variable.value.handle): name
            for name, layer in [("", model), *reversed(list(layers.items()))]
            for variable in layer.trainable_variables
        }

    def source(self, tensor: Any) -> tuple[str, str] | None:
        """Return the origin of a value that no step has made."""
        if isinstance(tensor, tf.__internal__.EagerTensor):  # an argument of a layer of the model
            return "constant", ""
        if tensor.op.type == "ReadVariableOp":
            handles = {inner.name: outer for outer, inner in self._log.graph.captures}
            outer = handles.get(tensor.op.inputs[0].name)
            name = self._weights.get(id(outer))
            return ("constant", "") if name is None else ("weight", name)
        return ("constant", "") if tensor.op.type in SOURCES else None


def _key(tensor: Any) -> Any:
    """Return a key of a tensor: graph tensors are identified by name."""
    return id(tensor) if isinstance(tensor, tf.__internal__.EagerTensor) else tensor.name
