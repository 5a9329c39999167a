"""Tracing: build the graph of a model's call, and return what it does as a `commlib.tensor_parallel.trace.Trace`."""

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
from commlib.tensor_parallel.checks.seen_weights import Seen, SeenWeights
from commlib.tensor_parallel.equations import Equation
from commlib.tensor_parallel.lengths import Length
from commlib.tensor_parallel.recording import Recording, replaced, running_line
from commlib.tensor_parallel.run.caches import in_caches
from commlib.tensor_parallel.run.per_rank import changed_numbers
from commlib.tensor_parallel.styles import PerRank, Style
from commlib.tensor_parallel.trace import Trace
from commlib_tensorflow._unnoticed import unnoticed
from commlib_tensorflow.tensor import _leaves, context, moves
from commlib_tensorflow.tensor._calls import Call
from commlib_tensorflow.tensor._conditions import asking, decided_by
from commlib_tensorflow.tensor._eagerness import asked
from commlib_tensorflow.tensor._gathering import SUMS, is_sum
from commlib_tensorflow.tensor._guided import Guided, detached, exchanged
from commlib_tensorflow.tensor._keeping import WRITES, held
from commlib_tensorflow.tensor._numbers import numbers_in
from commlib_tensorflow.tensor._on_parts import on_parts
from commlib_tensorflow.tensor._operations import (
    CALLS,
    SOURCES,
    described,
    has_own_gradient,
    passed_on,
    repeated,
    shape_of,
)
from commlib_tensorflow.tensor._registered import forget_gradients, kept_by_gradients
from commlib_tensorflow.tensor._weights import shapes_seen

_OPAQUE = ((moves, "moved"), (context, "ring_attention"), (context, "attention_by_heads"))
"""Functions between ranks that a model may call itself, and where they are looked up."""

_OURS = Path(__file__).parent.parent
_PACKAGES = ("<", *(str(Path(module.__file__ or "").parent) for module in (keras, tf, commlib)), str(_OURS))
"""Folders of what is not the user's."""

_HANDLES = (tf.resource, tf.variant)
"""The dtypes of what is no value."""

Layers = Mapping[str, Any]
"""The layers of a model by their names."""


def attempted(
    model: Any,
    layers: Layers,
    given: Any,
    styles: Collection[str] = (),
    hidden: list[str] | None = None,
    *,
    eager: list[str] | None = None,
    training: bool = False,
    weights: SeenWeights | None = None,
) -> tuple[Trace, Exception | None]:
    """Return a model's layers and the operations between them, in the order in which they are called.

    given: with what it is called, or `tf.TensorSpec`s of it: one value, or a `Call`. styles: layers that are taken as a
    whole because they have one. A graph is made, and never run: nothing is computed, and a divided model communicates
    nothing but what its ranks agree on at their first use. All is as before: see `unnoticed`. If the call fails, its
    error is returned, and the trace up to the layer that did. hidden: gets the names of divided layers that ran where
    nothing is seen of them. eager: gets the lines that ask whether they run eagerly, which the model here does not.
    weights: those whose shapes are noted where the model asks for them.
    """
    call = Call.of(given)
    for inlines in (True, False):  # without AutoGraph some functions cannot be written here
        recorder = Recorder(model, layers, styles, inlines=inlines, measures=not styles, weights=weights, tries=True)

        def once(call: Call, recorder: Recorder = recorder) -> None:
            recorder.run(call, training=training)
            forget_gradients(tf.compat.v1.get_default_graph().get_operations())

        with tf.init_scope(), unnoticed(model, call.args, call.options):
            graph_of(once, call)
        if recorder.error is None:
            break
    if recorder.error is not None and recorder.asked:
        said = (
            f"it asks for elements of a tensor at {recorder.asked}, which has none in a graph, and what comes after "
            "that cannot be checked: use keras.ops.where or cond; or leave example= and verify= out"
        )
        error = UsageError(f"plan: {type(model).__name__} cannot be followed: {said}")
        error.__cause__, recorder.error = recorder.error, error
    if recorder.hidden and hidden is not None:
        hidden.extend(recorder.hidden)
    if recorder.eager and eager is not None:
        eager.extend(recorder.eager)
    return recorder.trace(), recorder.error


def styles_in(layers: Layers) -> dict[str, Style]:
    """Return the styles of the layers that are divided already."""
    given = {name: getattr(layer, "style", None) for name, layer in layers.items()}
    return {name: style for name, style in given.items() if isinstance(style, Style)}


def graph_of(function: Callable[[Call], Any], call: Call) -> Any:
    """Return a concrete function of a call's tensors: its graph is made, as it is written."""
    plain = tf.autograph.experimental.do_not_convert(lambda *tensors: function(call.with_tensors(tensors)))
    return tf.function(plain, autograph=False).get_concrete_function(*map(_spec, call.tensors))


def _spec(value: Any) -> Any:
    if isinstance(value, tf.TensorSpec):
        return value
    tensor = value if tf.is_tensor(value) else tf.convert_to_tensor(value)
    return tf.TensorSpec(concrete(tensor.shape), tensor.dtype)


def concrete(shape: Any) -> tuple[int, ...]:
    """Return a shape in which lengths that are not known have some length, all another one."""
    lengths = iter((2, 7, 5, 11, 13))
    return tuple(next(lengths) if length is None else length for length in shape)


@dataclass(slots=True)
class _Call:
    """The operations of a graph that one call of a layer has made: from the first up to the last but one."""

    name: str
    layer: Any
    inputs: list[Any]
    first: int
    leaf: bool
    last: int = -1
    place: str = ""
    found: Mapping[str, Any] | None = None
    text: str = "a function"
    given: Any = ((), {})
    results: list[Any] = field(default_factory=list)


class Recorder:
    """Records what a call of a model adds to the graph that is being made. tensors: all values, by their numbers.

    whole: a divided model runs as the whole that it was; by default whether it is whole. guided: how layers are called.
    inlines: functions of TensorFlow that the model calls are written into its graph. measures: numbers that layers have
    know what they are where shapes are asked for; so they do where some are a rank's. detaches: gradients end at
    layers, for `arriving`. weights: which shapes of weights the model sees; where it asks for them is noted. keeps:
    what somebody holds after the call is told, as it cannot be while a tape holds all. tries: layers that take parts of
    sequences are tried on parts.
    """

    def __init__(
        self,
        model: Any,
        layers: Layers,
        styles: Collection[str],
        *,
        whole: bool | None = None,
        guided: Guided | None = None,
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
        """Ranks did so outside of layers."""
        self.asked = ""
        """Where a tensor was asked for its elements, which there are outside of graphs alone."""
        self.is_custom = False
        """A function between layers has a gradient of its own."""
        self.eager: list[str] = []
        """Lines of the user's that ask whether they run eagerly."""
        self.hidden: list[str] = []
        """Layers with a style that ran in another graph: in a loop, a branch or a function."""
        self._names = {id(layer): name for name, layer in reversed(list(layers.items()))}
        self._calls: list[_Call] = []
        self._inside = 0
        self._results: list[Any] = []
        self._losses: list[tuple[str, Any, str]] = []
        """What layers add to the loss, with their names and the lines."""
        self._kept: set[int] = set()
        """Values that somebody holds after the call, or a variable has got."""
        self.error: Exception | None = None
        self._weights = {
            id(variable.value.handle): name
            for name, layer in [("", model), *reversed(list(layers.items()))]
            for variable in layer.trainable_variables
        }
        self._asked: dict[str, tuple[int, ...]] = {}
        """Shapes that operations were asked for with such numbers, by their names."""
        self._recording = Recording(shape_of, self._source, _key, _is_discrete, lambda: running_line(_PACKAGES))
        self.tensors = self._recording.tensors

    def run(self, call: Call, *, training: bool) -> Any:
        """Call the model, and note its steps. What it raises is kept as `error`."""
        self._graph, self._training = tf.compat.v1.get_default_graph(), training
        for tensor in call.tensors:
            self._recording.add("", "given", (), (tensor,), text="an argument")
        before, result = self._count(), None
        with self._watching(), keras.StatelessScope() as scope:
            try:
                result = self._model(*call.args, training=training, **call.options)
            except Exception as error:
                self.error = error
        self._results = tensors_in(result)
        updates: dict[int, Any] = scope.state_mapping
        kept = self._held(before, updates, call) if self._keeps and self.error is None else []
        self._note(before)
        names = {id(variable): variable.path for variable in self._model.variables}
        for key, value in updates.items():
            self._assigned(value, f"what is assigned to {names.get(key, 'a variable')}")
        self._kept |= {number for one in kept if (number := self._number_of_kept(one)) is not None}
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
        """Whether random numbers are drawn, in functions within the graph, too."""
        kinds = {op.type for op in self._graph.get_operations()}
        kinds |= {node.op for one in self._graph.as_graph_def().library.function for node in one.node_def}
        return any("Random" in kind or "Multinomial" in kind or "TruncatedNormal" in kind for kind in kinds)

    def arriving(self) -> dict[int, Any]:
        """Return gradients of layers' results by their numbers, which what comes before the next layers gives them.

        They begin with numbers made of each element of what these take: of a part the same as of the whole.
        """
        calls = [call for call in self._calls if call.leaf and call.layer is not None]
        taken = [one for call in calls for one in call.inputs] + self._results
        ends = [one for one in taken if one.dtype.is_floating and getattr(one, "graph", None) is self._graph]
        made = [one for call in calls for one in call.results if one.dtype.is_floating]
        given = [tf.cos(3 * end + 1) for end in ends]
        found = tf.gradients(ends, made, given, unconnected_gradients="zero") if ends and made else []
        return {self._recording.number(tensor): one for tensor, one in zip(made, found, strict=True)}

    def trace(self) -> Trace:
        """Return the trace of what ran."""
        return self._recording.trace(self._results, self._tied(), whole=self._whole, held=self._kept)

    def _held(self, first: int, updates: Mapping[int, Any], call: Call) -> list[Any]:
        """Return the tensors that somebody holds after the call, beside what it has returned."""
        returned = set(map(id, self._results))
        operations = self._graph.get_operations()
        every = [one for op in operations[first:] for one in op.outputs]
        made = [one for one in every if one.dtype not in _HANDLES and id(one) not in returned]
        masked = [vars(one) for one in every if "_keras_mask" in vars(one)]
        losses = [lost for layer in self._model._flatten_layers() if (lost := vars(layer).get("_losses")) is not None]
        calls = [
            given
            for one in self._calls
            for given in (*one.given, one.inputs, one.results, (one.found or {}).get("inputs"))
        ]
        roots = (vars(self._model), call.args, call.options)
        inputs = [known for op in operations if (known := getattr(op, "_inputs_val", None)) is not None]
        ours = [every, updates, *self._losses, *masked, *losses, *calls, *inputs, *kept_by_gradients(operations)]
        ours += [] if self._guided is None else [self._guided.given]
        found = held(made, ours, lambda: in_caches(roots, tf.is_tensor, keras.layers.Layer))
        return [tensor for tensor in made if id(tensor) in found]

    def _number_of_kept(self, tensor: Any) -> int | None:
        """Return the number of a tensor that somebody holds, also of one from within a layer that is taken whole."""
        if self._recording.knows(tensor) or tensor.op.type in SOURCES:
            return self._recording.number_of(tensor)
        at = next(at for at, op in enumerate(self._graph.get_operations()) if op.name == tensor.op.name)
        for call in self._calls:
            if call.leaf and call.layer is not None and call.first <= at < call.last:
                text, place = f"what is kept within {call.name}", _line(tensor.op)
                self._recording.add("", "unknown", (*call.inputs, *call.results), (tensor,), text=text, place=place)
        return self._recording.number_of(tensor)

    def _assigned(self, value: Any, text: str) -> None:
        """Note that a variable has got a value, which has no gradient when it is read."""
        if getattr(value, "graph", None) is self._graph and self._recording.knows(value):
            kept = tf.stop_gradient(value)
            equation = equations.pointwise(shape_of(value))
            self._recording.add("", "equation", (value,), (kept,), equation=equation, text=text, place=_line(value.op))
            self._recording.detach(kept)
            self._kept.add(self._recording.number(kept))

    def _count(self) -> int:
        return len(self._graph.get_operations())

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Let each call of a layer of the model be noted, for a while."""
        plain = keras.layers.Layer.__call__
        recorder = self

        def noted(layer: Any, *args: Any, **options: Any) -> Any:
            return recorder._called(plain, layer, args, options)

        with ExitStack() as stack:
            stack.enter_context(replaced(keras.layers.Layer, "__call__", noted))
            stack.enter_context(asking(self._graph, self._number))
            # Keras cannot compute layers again in graphs; what they compute is the same without.
            stack.enter_context(
                replaced(keras.layers.Layer, "rematerialized_call", lambda _, call, *args, **options: call)
            )
            stack.enter_context(shapes_seen(self._shown, self._shape_asked, _PACKAGES))
            for owner, name in _OPAQUE:
                stack.enter_context(replaced(owner, name, self._opaque(getattr(owner, name))))
            stack.enter_context(replaced(keras.layers.Layer, "add_loss", self._losing(keras.layers.Layer.add_loss)))
            for kind in SUMS:
                stack.enter_context(replaced(kind, "__call__", self._summing(kind.__call__)))
            stack.enter_context(replaced(tf, "repeat", self._described(tf.repeat, repeated)))
            stack.enter_context(asked((self._model, *self._layers.values()), self.eager.append, _PACKAGES))
            if self._measures:
                stack.enter_context(self._measuring())
            if self._inlines:
                stack.callback(tf.config.run_functions_eagerly, tf.config.functions_run_eagerly())
                tf.config.run_functions_eagerly(True)
            yield

    def _shape_asked(self, seen: Seen) -> bool:
        """Note that the shape of a divided weight is asked for; return whether that is done outside of its layer."""
        if self._inside:
            return False
        found = {"kind": "shape", "inputs": ()}
        place, text = running_line(_PACKAGES), "the shape of its weight"
        call = _Call(seen.layer, None, [], self._count(), True, place=place, found=found, text=text)
        if not any((one.name, one.place, one.text) == (call.name, place, text) for one in self._calls):
            call.last = self._count()
            self._calls.append(call)
        return True

    def _number(self, tensor: Any) -> None:
        """Note that elements of a tensor are asked for, such as a condition in Python."""
        place = running_line(_PACKAGES)
        if not self._inside and tensor.graph is self._graph and place:
            self.asked = place
            found = {"kind": "number", "inputs": (tensor,)}
            call = _Call("", None, [tensor], self._count(), True, place=place, found=found, text="a number of Python")
            call.last = self._count()
            self._calls.append(call)

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Let numbers that layers have know what they are, for a while, and note what shapes are asked for by them."""
        numbers, used = numbers_in(self._model, self._layers), self._recording.used
        self._recording.numbers |= {name: number.value for name, number in numbers.items()}
        known = [(number, Length.of(number.value, _source(name), used)) for name, number in numbers.items()]
        with ExitStack() as stack:
            for name in ("reshape", "broadcast_to", "split", "tile"):
                stack.enter_context(replaced(tf, name, self._asking(getattr(tf, name))))
            stack.enter_context(changed_numbers(known))
            yield

    def _asking(self, function: Any) -> Any:
        """Return a function of TensorFlow that takes a shape, or lengths, second, and notes which numbers these are."""

        def called(value: Any, lengths: Any, *args: Any, **options: Any) -> Any:
            several = isinstance(lengths, tuple | list)
            given = list(lengths) if several else [lengths]
            if not any(isinstance(one, Length) for one in given):
                return function(value, lengths, *args, **options)
            plain = [int(one) if isinstance(one, Length) else one for one in given]
            result = function(value, plain if several else plain[0], *args, **options)
            made = tensors_in(result)
            if several and made and getattr(made[0], "graph", None) is self._graph:
                asked = [one if isinstance(one, int) else tf.get_static_value(one) for one in given]
                self._asked[made[0].op.name] = tuple(-1 if one is None else one for one in asked)
            return result

        return functools.wraps(function)(called)

    def _losing(self, add_loss: Any) -> Any:
        """Return Keras' way to add a loss to that of the model, which notes what is added."""

        def added(layer: Any, loss: Any) -> Any:
            if not (self._inside or is_sum(layer.activity_regularizer)):
                self._losses += [(layer.name, tensor, running_line(_PACKAGES)) for tensor in tensors_in(loss)]
            return add_loss(layer, loss)

        return added

    def _summing(self, function: Any) -> Any:
        """Return a regularizer that is not looked into: a sum over this rank's elements is right as it is."""

        def called(regularizer: Any, x: Any) -> Any:
            found, text = {"kind": "penalty", "inputs": (x,)}, f"{type(regularizer).__name__} of an output"
            call = _Call("", None, [], self._count(), True, place=running_line(_PACKAGES), found=found, text=text)
            result = function(regularizer, x)
            if not self._inside and tf.compat.v1.get_default_graph() is self._graph:
                call.last, call.results = self._count(), tensors_in(result)
                self._calls.append(call)
            return result

        return called

    def _described(self, function: Any, describe: Any) -> Any:
        """Return a function of TensorFlow that is one step, if its arguments can be described."""

        def called(*args: Any, **options: Any) -> Any:
            if self._inside or not args or tf.compat.v1.get_default_graph() is not self._graph:
                return function(*args, **options)
            first = self._count()
            given = (tf.convert_to_tensor(args[0]), *args[1:])
            found = describe(*given, **options)
            given = (given[0], *(int(one) if isinstance(one, Length) else one for one in given[1:]))
            if found is None:
                return function(*given, **options)
            call = _Call("", None, [given[0]], first, True, place=running_line(_PACKAGES), found=found)
            call.results = tensors_in(function(*given, **options))
            call.last = self._count()
            self._calls.append(call)
            return call.results[0]

        return called

    def _opaque(self, function: Any) -> Any:
        """Return a function that is not looked into: what it gives comes from where nobody knows."""

        def called(*args: Any) -> Any:
            call = _Call("", None, tensors_in(args), self._count(), True)
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

    def _called(self, plain: Any, layer: Any, args: Any, options: Any) -> Any:
        name = self._names.get(id(layer))
        if name is None or self._inside or tf.compat.v1.get_default_graph() is not self._graph:
            if name is not None and name in self._styles and not self._inside:
                self.hidden.append(name)
            return plain(layer, *args, **options)
        leaf = name in self._styles or _leaves.is_leaf(layer)
        call = _Call(name, layer, tensors_in([args, options]), self._count(), leaf, place=running_line(_PACKAGES))
        self._calls.append(call)
        self._inside += leaf
        guided = self._guided if leaf else None
        try:
            if guided is not None:
                args, options = exchanged((args, options), guided.inputs(name, call.inputs))
            result = plain(layer, *args, **options)
            if guided is not None:
                result = exchanged(result, guided.result(tensors_in(result)))
            call.given = args, options
            if leaf and self._detaches:
                result = detached(result)
            call.results = tensors_in(result)
        finally:
            self._inside -= leaf
            call.last = self._count()
        return result

    def _note(self, first: int) -> None:
        """Note all that was added to the graph, in order: leaves as one step, other operations one by one."""
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

    def _leaf(self, call: _Call) -> None:
        if call.found is not None:
            found = self._with_lengths(call.found, call.inputs[0]) if call.inputs else call.found
            self._recording.add(call.name, outputs=call.results, text=call.text, place=call.place, **found)
            return
        if call.layer is None:
            self.communicates = True
            self._recording.add("", "unseen", (), call.results, text="a function between ranks")
            return
        if not call.inputs:
            return
        found = _leaves.described(call.layer, call.inputs[0])
        if found["kind"] == "unknown":  # a layer of the user's
            within = self._graph.get_operations()[call.first : call.last]
            self.communicates |= any(op.type in CALLS for op in within)
        if self._tries and found["kind"] == "unknown" and isinstance(self._styles, Mapping):
            style, (args, options) = self._styles.get(call.name), call.given
            found |= on_parts(style, call.layer, args, options, training=self._training)
        text = type(call.layer).__name__
        self._recording.add(call.name, inputs=call.inputs, outputs=call.results, text=text, place=call.place, **found)

    def _operation(self, op: Any, at: int) -> None:
        if op.type in WRITES:
            self._assigned(op.inputs[-1], "what is assigned to a variable")
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
                    continue  # functions with gradients of their own hand them what they have used
                found = passed_on(tensor) or {"kind": "unknown", "inputs": (tensor,)}
                found["kind"] = "unknown" if is_custom else found["kind"]
                self._recording.add("", outputs=(result,), text=text, place=_line(op), **found)
            return
        for tensor in decided_by(op):
            counter = [one for one in op.inputs if _is_discrete(one)][:1]  # what decides is one: of floats, too
            text = f"the condition of {op.type} in {inside[-1] if inside else 'the model'}"
            self._recording.add("", "number", (tensor, *counter), (), text=text, place=_line(op))
        found = described(op)
        if op.name in self._asked and found["kind"] != "unknown":
            asked = self._asked[op.name]
            if op.type != "Tile":
                found["asked"] = asked
            elif all(1 in both for both in zip(asked, shape_of(op.inputs[0]), strict=True)):  # else in another order
                found = self._with_lengths({**found, "times": asked}, op.inputs[0])
        self._recording.add("", outputs=op.outputs, text=text, place=_line(op), **found)
        if op.type in ("StopGradient", "PreventGradient"):
            self._recording.detach(op.outputs[0])

    def _with_lengths(self, found: Mapping[str, Any], tensor: Any) -> dict[str, Any]:
        """Return the fields of a step, with the lengths it asks for where "times" say how often it repeats a tensor."""
        fields = dict(found)
        if times := fields.pop("times", ()):
            number, used = self._recording.number(tensor), self._recording.used
            lengths = [Length.of(length, (number, dim), used) for dim, length in enumerate(shape_of(tensor))]
            fields["asked"] = tuple(
                -1 if count == 1 else length * count for length, count in zip(lengths, times, strict=True)
            )
        return fields

    def _source(self, tensor: Any) -> tuple[str, str] | None:
        """Return where a value comes from that no step has made."""
        if isinstance(tensor, tf.__internal__.EagerTensor):  # what a layer of the model is called with, as it is
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
    """Return the line of the user's code that has made an operation, as file:line."""
    lines = (f"{one.filename}:{one.lineno}" for one in reversed(op.traceback) if not one.filename.startswith(_PACKAGES))
    return next(lines, "")


def _key(tensor: Any) -> Any:
    """Return what tells a tensor apart: nodes of graphs are found again by their names."""
    return id(tensor) if isinstance(tensor, tf.__internal__.EagerTensor) else tensor.name


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in a structure, in order."""
    return [leaf for leaf in keras.tree.flatten(value) if tf.is_tensor(leaf)]
