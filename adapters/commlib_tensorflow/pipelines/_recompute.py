"""Recompute: call single layers of a stage so that a backward computes them again instead of keeping what they made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager.record import should_record_backprop

from commlib.errors import UsageError
from commlib.pipeline.recompute import Checkpoint, recompute_of
from commlib_tensorflow._again import Again
from commlib_tensorflow.pipelines._selective import products_of, without_products
from commlib_tensorflow.pipelines._traced import check_operations, check_own
from commlib_tensorflow.pipelines._written import WrittenScope


@dataclass(frozen=True, slots=True)
class LayerRecompute:
    """What is computed again of a layer: "full", or all but products ("selective"). place: among all of the model's.

    Ranks compare places: names that Keras makes count what a process has made before.
    """

    layer: Any
    name: str
    word: str
    place: int


def recompute_in(operations: Sequence[Any], how: Checkpoint) -> str | list[LayerRecompute]:
    """Return what is computed again of a model with these operations, or of which of its layers.

    Layers within a layer have its name before theirs: "block.attention". Raises UsageError as `recompute_of` does, and
    for layers that communicate.
    """
    named = list(_named(operations, ""))
    found = recompute_of(how, named)
    if isinstance(found, str):
        return found
    chosen: dict[int, LayerRecompute] = {}
    for place, (name, layer) in enumerate(named):
        if name in found:
            chosen.setdefault(id(layer), LayerRecompute(layer, name, found[name], place))
    for one in chosen.values():
        if any(type(layer).__module__.startswith("commlib_tensorflow") for layer in one.layer._flatten_layers()):
            raise UsageError(
                f"pipeline: checkpoint: layer {one.name!r} has layers that communicate, which are not computed again "
                'one by one: name those beside them, or say "full" of whole stages'
            )
    return list(chosen.values())


def told_of(checkpoint: str | Sequence[LayerRecompute]) -> str:
    """Return what is computed again in words that are the same on all ranks."""
    return checkpoint if isinstance(checkpoint, str) else str([(one.place, one.word) for one in checkpoint])


def _named(operations: Sequence[Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for operation in {id(one): one for one in operations}.values():
        if isinstance(operation, keras.layers.Layer) and not isinstance(operation, keras.layers.InputLayer):
            name = prefix + operation.name
            yield name, operation
            yield from _named(operation._layers, f"{name}.")


class RecomputedLayers:
    """Layers of a stage, each of which is computed again as a whole: what is within one is part of it.

    Their calls are others only while the stage's forward runs, so nothing else sees it. chosen: those of the stage.
    trainable, state: the stage's variables; those that get gradients, and the others.
    """

    def __init__(self, chosen: Sequence[LayerRecompute], trainable: Sequence[Any], state: Sequence[Any]) -> None:
        self._chosen, self._trainable, self._state = chosen, trainable, state
        self._is_within = False

    @contextmanager
    def calls(self, scope: WrittenScope) -> Iterator[None]:
        """Let these layers be called so, in a forward within `scope`."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        before = [(vars(one.layer), vars(one.layer).get("call")) for one in self._chosen]
        try:
            for one in self._chosen:
                vars(one.layer)["call"] = partial(self._call, one, one.layer.call, scope, graph)
            yield
        finally:
            for own, call in before:
                if call is None:
                    own.pop("call", None)
                else:
                    own["call"] = call

    def _call(
        self, chosen: LayerRecompute, call: Callable[..., Any], scope: WrittenScope, graph: Any, *args: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        if self._is_within:
            return call(*args, **options)
        if graph is not (None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()):
            raise UsageError(
                f"pipeline: checkpoint: layer {chosen.name!r} is called within a loop, a condition or a tf.function of "
                "another layer: name that one"
            )
        given = _Leaves((args, options))
        variables = [*self._trainable, *self._state]
        values = [scope.after[id(variable)] for variable in variables]
        run = _Run(self, chosen, call, given, self._trainable, self._state)
        outputs = tf.custom_gradient(run.forward)(*values, *given.tensors)
        assert run.made is not None
        count = len(run.made.tensors)
        for loss in outputs[count : count + run.losses]:
            scope.add_loss(loss)
        for place, value in zip(run.changed, outputs[count + run.losses :], strict=True):
            scope.add_update((variables[place], value))
        return run.made.filled(outputs[:count])

    @contextmanager
    def within(self) -> Iterator[None]:
        """Call what is within a layer as it is."""
        self._is_within = True
        try:
            yield
        finally:
            self._is_within = False


class _Run:
    """A call of a layer, and the same again. All that it reads is given to it: variables, and its arguments."""

    def __init__(
        self, layers: RecomputedLayers, chosen: LayerRecompute, call: Callable[..., Any], given: _Leaves,
        trainable: Sequence[Any], state: Sequence[Any],
    ) -> None:  # fmt: skip
        self._layers, self._call, self._given, self._is_full = layers, call, given, chosen.word == "full"
        self._trainable, self._state = trainable, state
        self._what = f"layer {chosen.name!r}"
        self._context, self._training = _Context(chosen.layer), None
        self._again = Again(self._what)
        self.made: _Leaves | None = None
        """What it returns."""
        self.losses = 0
        """How many it adds."""
        self.changed: list[int] = []
        """The places of the variables that it writes."""

    def forward(self, *flat: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        """Return results, losses and what is written; and what gives the gradients of `flat`."""
        outputs, operations = self._compute([tf.stop_gradient(tensor) for tensor in flat], is_first=True)
        is_compiled = not tf.executing_eagerly()
        if not is_compiled and should_record_backprop(outputs):
            raise self._captures("a tensor")
        products = [] if self._is_full else products_of(operations)
        marks = self._again.marks
        weights = len(self._trainable)
        first = weights + len(self._state)
        wanted = [
            place for place, one in enumerate(flat) if one.dtype.is_floating and (place < weights or place >= first)
        ]
        roots = [n for n, one in enumerate(outputs[: len(outputs) - len(self.changed)]) if one.dtype.is_floating]

        def differentiate(flat: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
            sources = [flat[place] for place in wanted]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                outputs, _ = self._compute(flat, is_first=False)
            if marks:
                self._again.check(marks)
            found = tape.gradient([outputs[n] for n in roots], sources, output_gradients=list(gradients))
            return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in found]

        def backward(*gradients: tf.Tensor) -> list[tf.Tensor | None]:
            given = [gradients[n] for n in roots]
            with tf.control_dependencies(given):  # not before its turn
                again = [tf.identity(tensor) for tensor in flat]
            if not roots:
                return [None] * len(flat)
            if products:
                kept = [tf.identity(tensor) for tensor in products]  # of the forward's graph
                found = without_products(differentiate, kept, again, given)
            else:
                found = differentiate(again, given)
            of_place = dict(zip(wanted, found, strict=True))
            return [of_place.get(place) for place in range(len(flat))]

        return outputs, backward

    def _compute(self, flat: Sequence[tf.Tensor], *, is_first: bool) -> tuple[list[tf.Tensor], list[Any]]:
        """Return results, losses and what is written; and TensorFlow's operations, if it is compiled."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        count = 0 if graph is None else len(graph.get_operations())
        weights, first = len(self._trainable), len(self._trainable) + len(self._state)
        pairs = zip(self._trainable, flat[:weights], strict=True), zip(self._state, flat[weights:first], strict=True)
        with WrittenScope(*map(list, pairs)) as scope, self._layers.within():
            args, options = self._given.filled(flat[first:])
            known: dict[str, Any] = {} if self._training is None else {"training": self._training}
            result, training = self._context(compute=partial(self._call, *args, **options), **known)
        made, before, after = _Leaves(result), scope.before, scope.after
        check_own(self._what, before, after)
        variables = [*self._trainable, *self._state]
        changed = [n for n, one in enumerate(variables) if after[id(one)] is not before[id(one)]]
        if is_first:
            self.made, self.losses, self.changed, self._training = made, len(scope.losses), changed, training
        operations = [] if graph is None else graph.get_operations()[count:]
        if graph is None:
            self._again.ran({str(n): tensor for n, tensor in enumerate(made.tensors)})
        else:
            check_operations(self._what, graph, operations)
            self._again.traced({}, operations)
            if is_first:
                self._check_captures(flat, operations)
        losses = [tf.convert_to_tensor(loss) for loss in scope.losses]
        return [*made.tensors, *losses, *(after[id(variables[n])] for n in changed)], operations

    def _check_captures(self, flat: Sequence[tf.Tensor], operations: Sequence[Any]) -> None:
        """Refuse what would have no gradient: values of the graph that are none of the layer's arguments."""
        own = {one.name for one in operations} | {tensor.op.name for tensor in flat}
        for operation in operations:
            for tensor in operation.inputs:
                if tensor.dtype.is_floating and tensor.op.name not in own and tensor.op.type != "Const":
                    raise self._captures(f"{tensor.name!r}")

    def _captures(self, what: str) -> UsageError:
        return UsageError(
            f"pipeline: checkpoint: {self._what} uses {what} that it is not given as an argument, so it would have no "
            "gradient: give it to the layer's call, or name the layer around both"
        )


class _Context(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Where a layer's call is called: Keras knows there whether it trains, and which floats the layer computes in."""

    def __init__(self, layer: Any) -> None:
        super().__init__(name=layer.name, dtype=layer.dtype_policy, autocast=layer.autocast)
        self.built = True

    def call(self, compute: Callable[[], Any], training: bool | None = None) -> tuple[Any, bool | None]:
        """Return what `compute` does, and whether it trains, as Keras knows it here."""
        return compute(), training


class _Leaves:
    """The tensors of a nested structure, with their masks. Raises UsageError for sparse and ragged ones."""

    def __init__(self, nested: Any) -> None:
        self._nested = nested
        self._leaves = keras.tree.flatten(nested)
        for leaf in self._leaves:
            if tf.is_tensor(leaf) and not isinstance(leaf, tf.Tensor):
                raise UsageError(
                    f"pipeline: checkpoint: a layer takes or returns a {type(leaf).__name__}, and is not computed again"
                )
        dense = [leaf for leaf in self._leaves if isinstance(leaf, tf.Tensor)]
        masks = [getattr(leaf, "_keras_mask", None) for leaf in dense]
        self._masked = [n for n, mask in enumerate(masks) if mask is not None]
        self.tensors: list[tf.Tensor] = [*dense, *(masks[n] for n in self._masked)]
        """All of them; then their masks."""

    def filled(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Return the structure with others in their places."""
        count = len(self.tensors) - len(self._masked)
        for n, mask in zip(self._masked, tensors[count:], strict=True):
            tensors[n]._keras_mask = mask  # where Keras looks for it
        rest = iter(tensors[:count])
        leaves = [next(rest) if isinstance(leaf, tf.Tensor) else leaf for leaf in self._leaves]
        return keras.tree.pack_sequence_as(self._nested, leaves)
