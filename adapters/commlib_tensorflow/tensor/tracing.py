"""Tracing: build the graph of a model's call, and return its steps as a `commlib.tensor_parallel.trace.ModelTrace`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import commlib
from commlib.errors import UsageError
from commlib.tensor_parallel import equations
from commlib.tensor_parallel.checks.weight_shapes import SeenWeights, WeightShape
from commlib.tensor_parallel.equations import Equation
from commlib.tensor_parallel.lengths import Length
from commlib.tensor_parallel.recording import StepRecording, replace_attribute, running_line
from commlib.tensor_parallel.run.caches import count_cached
from commlib.tensor_parallel.run.rank_numbers import change_numbers
from commlib.tensor_parallel.styles import PerRank, Style
from commlib.tensor_parallel.trace import ModelTrace
from commlib_tensorflow._trial_run import preserve_model
from commlib_tensorflow.tensor import _leaves, context, moves
from commlib_tensorflow.tensor._calls import ModelCall
from commlib_tensorflow.tensor._conditions import deciding_tensors, watch_element_reads
from commlib_tensorflow.tensor._eager_checks import watch_eager_checks
from commlib_tensorflow.tensor._gathering import SUMS, is_sum
from commlib_tensorflow.tensor._gradient_registry import forget_gradients, tensors_of_gradients
from commlib_tensorflow.tensor._guided_calls import GuidedCall, detach_tensors, replace_tensors
from commlib_tensorflow.tensor._held_tensors import WRITES, find_held
from commlib_tensorflow.tensor._numbers import numbers_in
from commlib_tensorflow.tensor._operations import (
    CALLS,
    SOURCES,
    describe_call,
    describe_identity,
    describe_repeat,
    has_own_gradient,
    shape_of,
)
from commlib_tensorflow.tensor._shard_trial import try_on_shards
from commlib_tensorflow.tensor._weights import override_shapes

_OPAQUE = ((moves, "redistribute"), (context, "ring_attention"), (context, "attention_by_heads"))
"""Functions between ranks that a model may call itself, and the modules where they are looked up."""

_OURS = Path(__file__).parent.parent
_PACKAGES = ("<", *(str(Path(module.__file__ or "").parent) for module in (keras, tf, commlib)), str(_OURS))
"""Folders of code that is not the user's."""

_HANDLES = (tf.resource, tf.variant)
"""Dtypes of tensors without values."""

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
    if recorder.error is not None and recorder.request_place:
        reason = (
            f"it requests elements of a tensor at {recorder.request_place}. A graph tensor has none, so later "
            "operations cannot be checked: use keras.ops.where or cond, or leave example= and verify= out"
        )
        error = UsageError(f"plan: {type(model).__name__} cannot be traced: {reason}")
        error.__cause__, recorder.error = recorder.error, error
    if recorder.hidden and hidden is not None:
        hidden.extend(recorder.hidden)
    if recorder.eager and eager is not None:
        eager.extend(recorder.eager)
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


@dataclass(slots=True)
class _LayerCall:
    """The operations of a graph that one call of a layer has made: from `first` up to, but not including, `last`."""

    name: str
    layer: Any
    inputs: list[Any]
    first: int
    leaf: bool
    last: int = -1
    place: str = ""
    fields: Mapping[str, Any] | None = None
    text: str = "a function"
    arguments: Any = ((), {})
    results: list[Any] = field(default_factory=list)


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
        self._model, self._layers, self._styles, self._inlines = model, layers, styles, inlines
        own_numbers = isinstance(styles, Mapping) and any(isinstance(style, PerRank) for style in styles.values())
        self._measures, self._detaches, self._keeps = measures or own_numbers, detaches, keeps
        self._whole = not styles_in(layers) if whole is None else whole
        self._guided, self._shown, self._tries, self._training = guided, weights or {}, tries, False
        self.communicates = False
        """Ranks communicated outside of layers."""
        self.request_place = ""
        """The line where elements of a tensor were requested, which graph tensors do not have."""
        self.is_custom = False
        """A function between layers has a custom gradient."""
        self.eager: list[str] = []
        """Lines of user code that query whether they run eagerly."""
        self.hidden: list[str] = []
        """Layers with a style that ran in another graph: in a loop, a branch or a function."""
        self._names = {id(layer): name for name, layer in reversed(list(layers.items()))}
        self._calls: list[_LayerCall] = []
        self._inside = 0
        self._results: list[Any] = []
        self._losses: list[tuple[str, Any, str]] = []
        """Losses that layers add, with the layers' names and the lines."""
        self._held_numbers: set[int] = set()
        """Values that are held after the call, or assigned to a variable."""
        self.error: Exception | None = None
        self._weights = {
            id(variable.value.handle): name
            for name, layer in [("", model), *reversed(list(layers.items()))]
            for variable in layer.trainable_variables
        }
        self._requested_lengths: dict[str, tuple[int, ...]] = {}
        """Shapes that operations requested with such integers, by operation name."""
        self._recording = StepRecording(shape_of, self._source, _key, _is_discrete, lambda: running_line(_PACKAGES))
        self.tensors = self._recording.tensors

    def run(self, call: ModelCall, *, training: bool) -> Any:
        """Call the model, and record its steps. An exception is kept as `error`."""
        self._graph, self._training = tf.compat.v1.get_default_graph(), training
        for tensor in call.tensors:
            self._recording.add("", "given", (), (tensor,), text="an argument")
        before, result = self._count(), None
        with self._watch(), keras.StatelessScope() as scope:
            try:
                result = self._model(*call.args, training=training, **call.options)
            except Exception as error:
                self.error = error
        self._results = tensors_in(result)
        updates: dict[int, Any] = scope.state_mapping
        held = self._find_held(before, updates, call) if self._keeps and self.error is None else []
        self._note(before)
        names = {id(variable): variable.path for variable in self._model.variables}
        for key, value in updates.items():
            self._note_assignment(value, f"what is assigned to {names.get(key, 'a variable')}")
        self._held_numbers |= {number for one in held if (number := self._number_of_held(one)) is not None}
        for name, loss, place in self._losses:
            if getattr(loss, "graph", None) is self._graph:
                every = tuple(range(len(shape_of(loss))))
                equation = Equation((every, every), every, frozenset(every))
                self._recording.add(
                    "", "equation", (loss, loss), (), equation=equation, text=f"add_loss of {name}", place=place
                )
        return result

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn, also in functions within the graph."""
        kinds = {op.type for op in self._graph.get_operations()}
        kinds |= {node.op for one in self._graph.as_graph_def().library.function for node in one.node_def}
        return any("Random" in kind or "Multinomial" in kind or "TruncatedNormal" in kind for kind in kinds)

    def arriving(self) -> dict[int, Any]:
        """Return gradients of layers' results by number, as the operations before the next layers compute them.

        They start from values computed element by element from the next layers' inputs: the same for a shard as for the
        full tensor.
        """
        calls = [call for call in self._calls if call.leaf and call.layer is not None]
        inputs = [one for call in calls for one in call.inputs] + self._results
        ends = [one for one in inputs if one.dtype.is_floating and getattr(one, "graph", None) is self._graph]
        results = [one for call in calls for one in call.results if one.dtype.is_floating]
        given = [tf.cos(3 * end + 1) for end in ends]
        gradients = tf.gradients(ends, results, given, unconnected_gradients="zero") if ends and results else []
        return {self._recording.number(tensor): one for tensor, one in zip(results, gradients, strict=True)}

    def trace(self) -> ModelTrace:
        """Return the trace of the run."""
        return self._recording.trace(self._results, self._tied(), whole=self._whole, retained=self._held_numbers)

    def _find_held(self, first: int, updates: Mapping[int, Any], call: ModelCall) -> list[Any]:
        """Return the tensors that are held after the call, besides its results."""
        returned = set(map(id, self._results))
        operations = self._graph.get_operations()
        every = [one for op in operations[first:] for one in op.outputs]
        candidates = [one for one in every if one.dtype not in _HANDLES and id(one) not in returned]
        masked = [vars(one) for one in every if "_keras_mask" in vars(one)]
        losses = [
            own_losses
            for layer in self._model._flatten_layers()
            if (own_losses := vars(layer).get("_losses")) is not None
        ]
        calls = [
            given
            for one in self._calls
            for given in (*one.arguments, one.inputs, one.results, (one.fields or {}).get("inputs"))
        ]
        roots = (vars(self._model), call.args, call.options)
        inputs = [known for op in operations if (known := getattr(op, "_inputs_val", None)) is not None]
        ours = [every, updates, *self._losses, *masked, *losses, *calls, *inputs, *tensors_of_gradients(operations)]
        ours += [] if self._guided is None else [self._guided.values]
        held = find_held(candidates, ours, lambda: count_cached(roots, tf.is_tensor, keras.layers.Layer))
        return [tensor for tensor in candidates if id(tensor) in held]

    def _number_of_held(self, tensor: Any) -> int | None:
        """Return the number of a held tensor, also of one from inside a layer that is one step."""
        if self._recording.has_number(tensor) or tensor.op.type in SOURCES:
            return self._recording.number_of(tensor)
        at = next(at for at, op in enumerate(self._graph.get_operations()) if op.name == tensor.op.name)
        for call in self._calls:
            if call.leaf and call.layer is not None and call.first <= at < call.last:
                text, place = f"what is kept within {call.name}", _line(tensor.op)
                self._recording.add("", "unknown", (*call.inputs, *call.results), (tensor,), text=text, place=place)
        return self._recording.number_of(tensor)

    def _note_assignment(self, value: Any, text: str) -> None:
        """Record that a variable was assigned a value, which has no gradient when it is read."""
        if getattr(value, "graph", None) is self._graph and self._recording.has_number(value):
            constant = tf.stop_gradient(value)
            equation = equations.pointwise(shape_of(value))
            self._recording.add(
                "", "equation", (value,), (constant,), equation=equation, text=text, place=_line(value.op)
            )
            self._recording.detach(constant)
            self._held_numbers.add(self._recording.number(constant))

    def _count(self) -> int:
        return len(self._graph.get_operations())

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """Record each call of a layer of the model within the context."""
        plain = keras.layers.Layer.__call__
        recorder = self

        def noted(layer: Any, *args: Any, **options: Any) -> Any:
            return recorder._call_layer(plain, layer, args, options)

        with ExitStack() as stack:
            stack.enter_context(replace_attribute(keras.layers.Layer, "__call__", noted))
            stack.enter_context(watch_element_reads(self._graph, self._number))
            # Keras cannot recompute layers in graphs; the results are the same without recomputation.
            stack.enter_context(
                replace_attribute(keras.layers.Layer, "rematerialized_call", lambda _, call, *args, **options: call)
            )
            stack.enter_context(override_shapes(self._shown, self._note_shape_request, _PACKAGES))
            for owner, name in _OPAQUE:
                stack.enter_context(replace_attribute(owner, name, self._wrap_opaque(getattr(owner, name))))
            stack.enter_context(
                replace_attribute(keras.layers.Layer, "add_loss", self._wrap_add_loss(keras.layers.Layer.add_loss))
            )
            for kind in SUMS:
                stack.enter_context(replace_attribute(kind, "__call__", self._wrap_regularizer(kind.__call__)))
            stack.enter_context(replace_attribute(tf, "repeat", self._wrap_described(tf.repeat, describe_repeat)))
            stack.enter_context(watch_eager_checks((self._model, *self._layers.values()), self.eager.append, _PACKAGES))
            if self._measures:
                stack.enter_context(self._measure())
            if self._inlines:
                stack.callback(tf.config.run_functions_eagerly, tf.config.functions_run_eagerly())
                tf.config.run_functions_eagerly(True)
            yield

    def _note_shape_request(self, seen: WeightShape) -> bool:
        """Record a request for the shape of a sharded weight; return whether it came from outside of its layer."""
        if self._inside:
            return False
        fields = {"kind": "shape", "inputs": ()}
        place, text = running_line(_PACKAGES), "the shape of its weight"
        call = _LayerCall(seen.layer, None, [], self._count(), True, place=place, fields=fields, text=text)
        if not any((one.name, one.place, one.text) == (call.name, place, text) for one in self._calls):
            call.last = self._count()
            self._calls.append(call)
        return True

    def _number(self, tensor: Any) -> None:
        """Record a request for elements of a tensor, such as a condition in Python."""
        place = running_line(_PACKAGES)
        if not self._inside and tensor.graph is self._graph and place:
            self.request_place = place
            fields = {"kind": "number", "inputs": (tensor,)}
            call = _LayerCall(
                "", None, [tensor], self._count(), True, place=place, fields=fields, text="a number of Python"
            )
            call.last = self._count()
            self._calls.append(call)

    @contextmanager
    def _measure(self) -> Iterator[None]:
        """Make layers' integers remember their source within the context, and record the shapes that use them."""
        numbers, used = numbers_in(self._model, self._layers), self._recording.used
        self._recording.numbers |= {name: number.value for name, number in numbers.items()}
        known = [(number, Length.of(number.value, _source(name), used)) for name, number in numbers.items()]
        with ExitStack() as stack:
            for name in ("reshape", "broadcast_to", "split", "tile"):
                stack.enter_context(replace_attribute(tf, name, self._wrap_shape_argument(getattr(tf, name))))
            stack.enter_context(change_numbers(known))
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
            if several and tensors and getattr(tensors[0], "graph", None) is self._graph:
                requested = [one if isinstance(one, int) else tf.get_static_value(one) for one in given]
                self._requested_lengths[tensors[0].op.name] = tuple(-1 if one is None else one for one in requested)
            return result

        return functools.wraps(function)(called)

    def _wrap_add_loss(self, add_loss: Any) -> Any:
        """Wrap Keras' add_loss to record the added losses."""

        def added(layer: Any, loss: Any) -> Any:
            if not (self._inside or is_sum(layer.activity_regularizer)):
                self._losses += [(layer.name, tensor, running_line(_PACKAGES)) for tensor in tensors_in(loss)]
            return add_loss(layer, loss)

        return added

    def _wrap_regularizer(self, function: Any) -> Any:
        """Wrap a regularizer as one step: a sum over this rank's elements is correct."""

        def called(regularizer: Any, x: Any) -> Any:
            fields, text = {"kind": "penalty", "inputs": (x,)}, f"{type(regularizer).__name__} of an output"
            call = _LayerCall(
                "", None, [], self._count(), True, place=running_line(_PACKAGES), fields=fields, text=text
            )
            result = function(regularizer, x)
            if not self._inside and tf.compat.v1.get_default_graph() is self._graph:
                call.last, call.results = self._count(), tensors_in(result)
                self._calls.append(call)
            return result

        return called

    def _wrap_described(self, function: Any, describe: Any) -> Any:
        """Wrap a TensorFlow function as one step, if its arguments can be described."""

        def called(*args: Any, **options: Any) -> Any:
            if self._inside or not args or tf.compat.v1.get_default_graph() is not self._graph:
                return function(*args, **options)
            first = self._count()
            given = (tf.convert_to_tensor(args[0]), *args[1:])
            fields = describe(*given, **options)
            given = (given[0], *(int(one) if isinstance(one, Length) else one for one in given[1:]))
            if fields is None:
                return function(*given, **options)
            call = _LayerCall("", None, [given[0]], first, True, place=running_line(_PACKAGES), fields=fields)
            call.results = tensors_in(function(*given, **options))
            call.last = self._count()
            self._calls.append(call)
            return call.results[0]

        return called

    def _wrap_opaque(self, function: Any) -> Any:
        """Wrap a function as one opaque step: its results have an unknown origin."""

        def called(*args: Any) -> Any:
            call = _LayerCall("", None, tensors_in(args), self._count(), True)
            self._inside += 1
            try:
                result = function(*args)
            finally:
                self._inside -= 1
            if not self._inside and tf.compat.v1.get_default_graph() is self._graph:
                call.last, call.results = self._count(), tensors_in(result)
                self._calls.append(call)
            return result

        return called

    def _call_layer(self, plain: Any, layer: Any, args: Any, options: Any) -> Any:
        name = self._names.get(id(layer))
        if name is None or self._inside or tf.compat.v1.get_default_graph() is not self._graph:
            if name is not None and name in self._styles and not self._inside:
                self.hidden.append(name)
            return plain(layer, *args, **options)
        leaf = name in self._styles or _leaves.is_leaf(layer)
        call = _LayerCall(name, layer, tensors_in([args, options]), self._count(), leaf, place=running_line(_PACKAGES))
        self._calls.append(call)
        self._inside += leaf
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
            self._inside -= leaf
            call.last = self._count()
        return result

    def _note(self, first: int) -> None:
        """Record all operations added to the graph, in order: leaf layers as one step, other operations one by one."""
        ops = self._graph.get_operations()
        leaves = iter([*(call for call in self._calls if call.leaf), None])
        leaf, at = next(leaves), first
        while at < len(ops) or leaf is not None:
            if leaf is not None and leaf.first <= at:
                self._leaf(leaf)
                at, leaf = max(at, leaf.last), next(leaves)
            elif at < len(ops):
                self._operation(ops[at], at)
                at += 1
            else:
                break

    def _leaf(self, call: _LayerCall) -> None:
        if call.fields is not None:
            fields = self._with_lengths(call.fields, call.inputs[0]) if call.inputs else call.fields
            self._recording.add(call.name, outputs=call.results, text=call.text, place=call.place, **fields)
            return
        if call.layer is None:
            self.communicates = True
            self._recording.add("", "unseen", (), call.results, text="a function between ranks")
            return
        if not call.inputs:
            return
        fields = _leaves.describe_leaf(call.layer, call.inputs[0])
        if fields["kind"] == "unknown":  # a user's layer
            within = self._graph.get_operations()[call.first : call.last]
            self.communicates |= any(op.type in CALLS for op in within)
        if self._tries and fields["kind"] == "unknown" and isinstance(self._styles, Mapping):
            style, (args, options) = self._styles.get(call.name), call.arguments
            fields |= try_on_shards(style, call.layer, args, options, training=self._training)
        text = type(call.layer).__name__
        self._recording.add(call.name, inputs=call.inputs, outputs=call.results, text=text, place=call.place, **fields)

    def _operation(self, op: Any, at: int) -> None:
        if op.type in WRITES:
            self._note_assignment(op.inputs[-1], "what is assigned to a variable")
        if not op.outputs or op.type in SOURCES or op.outputs[0].dtype in _HANDLES:
            return
        inside = [call.name for call in self._calls if not call.leaf and call.first <= at < call.last]
        text = f"{op.type} in {inside[-1] if inside else 'the model'}"
        self.communicates |= op.type in CALLS
        is_custom = has_own_gradient(op)
        self.is_custom |= is_custom
        if op.type == "IdentityN":
            text = text.replace(op.type, "a custom_gradient") if is_custom else text
            for tensor, result in zip(op.inputs, op.outputs, strict=True):
                if tensor.op.type in ("ReadVariableOp", "Placeholder") and not result.consumers():
                    continue  # functions with custom gradients pass on the variables they used
                fields = describe_identity(tensor) or {"kind": "unknown", "inputs": (tensor,)}
                fields["kind"] = "unknown" if is_custom else fields["kind"]
                self._recording.add("", outputs=(result,), text=text, place=_line(op), **fields)
            return
        for tensor in deciding_tensors(op):
            counter = [one for one in op.inputs if _is_discrete(one)][:1]  # marks it as discrete, even a float
            text = f"the condition of {op.type} in {inside[-1] if inside else 'the model'}"
            self._recording.add("", "number", (tensor, *counter), (), text=text, place=_line(op))
        fields = describe_call(op)
        if op.name in self._requested_lengths and fields["kind"] != "unknown":
            lengths = self._requested_lengths[op.name]
            if op.type != "Tile":
                fields["requested"] = lengths
            elif all(1 in both for both in zip(lengths, shape_of(op.inputs[0]), strict=True)):  # else the order differs
                fields = self._with_lengths({**fields, "times": lengths}, op.inputs[0])
        self._recording.add("", outputs=op.outputs, text=text, place=_line(op), **fields)
        if op.type in ("StopGradient", "PreventGradient"):
            self._recording.detach(op.outputs[0])

    def _with_lengths(self, described: Mapping[str, Any], tensor: Any) -> dict[str, Any]:
        """Return the fields of a step, with the requested lengths if "times" gives the repetitions of a tensor."""
        fields = dict(described)
        if times := fields.pop("times", ()):
            number, used = self._recording.number(tensor), self._recording.used
            lengths = [Length.of(length, (number, dim), used) for dim, length in enumerate(shape_of(tensor))]
            fields["requested"] = tuple(
                -1 if count == 1 else length * count for length, count in zip(lengths, times, strict=True)
            )
        return fields

    def _source(self, tensor: Any) -> tuple[str, str] | None:
        """Return the origin of a value that no step has made."""
        if isinstance(tensor, tf.__internal__.EagerTensor):  # an argument of a layer of the model
            return "constant", ""
        if tensor.op.type == "ReadVariableOp":
            handles = {inner.name: outer for outer, inner in self._graph.captures}
            outer = handles.get(tensor.op.inputs[0].name)
            name = self._weights.get(id(outer))
            return ("constant", "") if name is None else ("weight", name)
        return ("constant", "") if tensor.op.type in SOURCES else None

    def _tied(self) -> list[tuple[str, ...]]:
        """Return the names of layers that share a weight."""
        owners: dict[int, list[str]] = {}
        for name, layer in self._layers.items():
            if self._names[id(layer)] == name:
                inner = {id(weight) for one in layer._flatten_layers(include_self=False) for weight in one.weights}
                for weight in layer.trainable_variables:
                    if id(weight) not in inner:
                        owners.setdefault(id(weight), []).append(name)
        return [tuple(names) for names in dict.fromkeys(map(tuple, owners.values())) if len(names) > 1]


def _source(name: str) -> tuple[str, str]:
    path, _, own = name.rpartition(".")
    return path, own


def _is_discrete(tensor: Any) -> bool:
    return not (tensor.dtype.is_floating or tensor.dtype.is_complex)


def _line(op: Any) -> str:
    """Return the line of user code that has made an operation, as file:line."""
    lines = (f"{one.filename}:{one.lineno}" for one in reversed(op.traceback) if not one.filename.startswith(_PACKAGES))
    return next(lines, "")


def _key(tensor: Any) -> Any:
    """Return a key of a tensor: graph tensors are identified by name."""
    return id(tensor) if isinstance(tensor, tf.__internal__.EagerTensor) else tensor.name


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in a structure, in order."""
    return [leaf for leaf in keras.tree.flatten(value) if tf.is_tensor(leaf)]
