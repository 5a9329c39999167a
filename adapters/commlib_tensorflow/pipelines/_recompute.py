"""Layer recomputation: a backward recomputes selected layers of a stage instead of keeping their activations."""

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
from commlib_tensorflow._recomputation_check import RecomputationCheck
from commlib_tensorflow.pipelines._layer_checks import check_operations, check_own
from commlib_tensorflow.pipelines._selective_recompute import products_of, without_products
from commlib_tensorflow.pipelines._written_variables import WrittenScope


@dataclass(frozen=True, slots=True)
class LayerRecompute:
    """Recomputation of a layer: "full", or everything except products ("selective"). place: its index in the model.

    Ranks compare places: Keras' names count the objects that a process has made.
    """

    layer: Any
    name: str
    word: str
    place: int


def recompute_in(operations: Sequence[Any], how: Checkpoint) -> str | list[LayerRecompute]:
    """Return what to recompute in a model with these operations: a word for all of it, or the layers.

    A nested layer has its parent's name as a prefix: "block.attention". Raises UsageError as `recompute_of` does, and
    for layers that communicate.
    """
    named = list(_named(operations, ""))
    result = recompute_of(how, named)
    if isinstance(result, str):
        return result
    chosen: dict[int, LayerRecompute] = {}
    for place, (name, layer) in enumerate(named):
        if name in result:
            chosen.setdefault(id(layer), LayerRecompute(layer, name, result[name], place))
    for one in chosen.values():
        if any(type(layer).__module__.startswith("commlib_tensorflow") for layer in one.layer._flatten_layers()):
            raise UsageError(
                f"pipeline: checkpoint: layer {one.name!r} contains layers that communicate, which cannot be "
                'recomputed one by one: name the other layers, or use "full" for whole stages'
            )
    return list(chosen.values())


def recompute_text(checkpoint: str | Sequence[LayerRecompute]) -> str:
    """Return the recomputation as a text that is the same on all ranks."""
    return checkpoint if isinstance(checkpoint, str) else str([(one.place, one.word) for one in checkpoint])


def _named(operations: Sequence[Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for operation in {id(one): one for one in operations}.values():
        if isinstance(operation, keras.layers.Layer) and not isinstance(operation, keras.layers.InputLayer):
            name = prefix + operation.name
            yield name, operation
            yield from _named(operation._layers, f"{name}.")


class RecomputedLayers:
    """Layers of a stage that are recomputed, each as a whole with its inner layers.

    Their `call` is replaced only while the stage's forward runs, so other code does not see it. chosen: the layers of
    the stage. trainable, state: the stage's variables; those that get gradients, and the others.
    """

    def __init__(self, chosen: Sequence[LayerRecompute], trainable: Sequence[Any], state: Sequence[Any]) -> None:
        self._chosen, self._trainable, self._state = chosen, trainable, state
        self._is_within = False

    @contextmanager
    def calls(self, scope: WrittenScope) -> Iterator[None]:
        """Replace the calls of these layers, in a forward within `scope`."""
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
                "another layer: name that outer layer"
            )
        given = _Leaves((args, options))
        variables = [*self._trainable, *self._state]
        values = [scope.after[id(variable)] for variable in variables]
        run = _RecomputedCall(self, chosen, call, given, self._trainable, self._state)
        outputs = tf.custom_gradient(run.forward)(*values, *given.tensors)
        assert run.leaves is not None
        count = len(run.leaves.tensors)
        for loss in outputs[count : count + run.losses]:
            scope.add_loss(loss)
        for place, value in zip(run.changed, outputs[count + run.losses :], strict=True):
            scope.add_update((variables[place], value))
        return run.leaves.filled(outputs[:count])

    @contextmanager
    def within(self) -> Iterator[None]:
        """Call the layers inside a recomputed layer unchanged."""
        self._is_within = True
        try:
            yield
        finally:
            self._is_within = False


class _RecomputedCall:
    """A call of a layer, and its recomputation.

    Everything it reads is an argument: variables, and the call's arguments.
    """

    def __init__(
        self, layers: RecomputedLayers, chosen: LayerRecompute, call: Callable[..., Any], given: _Leaves,
        trainable: Sequence[Any], state: Sequence[Any],
    ) -> None:  # fmt: skip
        self._layers, self._call, self._given, self._is_full = layers, call, given, chosen.word == "full"
        self._trainable, self._state = trainable, state
        self._what = f"layer {chosen.name!r}"
        self._context, self._training = _Context(chosen.layer), None
        self._again = RecomputationCheck(self._what)
        self.leaves: _Leaves | None = None
        """The returned tensors."""
        self.losses = 0
        """The number of added losses."""
        self.changed: list[int] = []
        """The indices of the variables that the call writes."""

    def forward(self, *flat: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        """Return results, losses and written values; and the function for the gradients of `flat`."""
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
            gradients_of_sources = tape.gradient([outputs[n] for n in roots], sources, output_gradients=list(gradients))
            return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients_of_sources]

        def backward(*gradients: tf.Tensor) -> list[tf.Tensor | None]:
            given = [gradients[n] for n in roots]
            with tf.control_dependencies(given):  # not before the gradients arrive
                again = [tf.identity(tensor) for tensor in flat]
            if not roots:
                return [None] * len(flat)
            if products:
                saved = [tf.identity(tensor) for tensor in products]  # moves them out of the forward's graph
                gradients_of_sources = without_products(differentiate, saved, again, given)
            else:
                gradients_of_sources = differentiate(again, given)
            of_place = dict(zip(wanted, gradients_of_sources, strict=True))
            return [of_place.get(place) for place in range(len(flat))]

        return outputs, backward

    def _compute(self, flat: Sequence[tf.Tensor], *, is_first: bool) -> tuple[list[tf.Tensor], list[Any]]:
        """Return results, losses and written values; and TensorFlow's operations, if compiled."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        count = 0 if graph is None else len(graph.get_operations())
        weights, first = len(self._trainable), len(self._trainable) + len(self._state)
        pairs = zip(self._trainable, flat[:weights], strict=True), zip(self._state, flat[weights:first], strict=True)
        with WrittenScope(*map(list, pairs)) as scope, self._layers.within():
            args, options = self._given.filled(flat[first:])
            known: dict[str, Any] = {} if self._training is None else {"training": self._training}
            result, training = self._context(compute=partial(self._call, *args, **options), **known)
        leaves, before, after = _Leaves(result), scope.before, scope.after
        check_own(self._what, before, after)
        variables = [*self._trainable, *self._state]
        changed = [n for n, one in enumerate(variables) if after[id(one)] is not before[id(one)]]
        if is_first:
            self.leaves, self.losses, self.changed, self._training = leaves, len(scope.losses), changed, training
        operations = [] if graph is None else graph.get_operations()[count:]
        if graph is None:
            self._again.ran({str(n): tensor for n, tensor in enumerate(leaves.tensors)})
        else:
            check_operations(self._what, graph, operations)
            self._again.traced({}, operations)
            if is_first:
                self._check_captures(flat, operations)
        losses = [tf.convert_to_tensor(loss) for loss in scope.losses]
        return [*leaves.tensors, *losses, *(after[id(variables[n])] for n in changed)], operations

    def _check_captures(self, flat: Sequence[tf.Tensor], operations: Sequence[Any]) -> None:
        """Refuse values that would get no gradient: graph tensors that are not arguments of the layer."""
        own = {one.name for one in operations} | {tensor.op.name for tensor in flat}
        for operation in operations:
            for tensor in operation.inputs:
                if tensor.dtype.is_floating and tensor.op.name not in own and tensor.op.type != "Const":
                    raise self._captures(f"{tensor.name!r}")

    def _captures(self, what: str) -> UsageError:
        return UsageError(
            f"pipeline: checkpoint: {self._what} uses {what}, which is not an argument of its call, so it would have "
            "no gradient: pass it to the layer's call, or name the layer around both"
        )


class _Context(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Keras call context of a layer's call: whether it trains, and the layer's compute dtype."""

    def __init__(self, layer: Any) -> None:
        super().__init__(name=layer.name, dtype=layer.dtype_policy, autocast=layer.autocast)
        self.built = True

    def call(self, compute: Callable[[], Any], training: bool | None = None) -> tuple[Any, bool | None]:
        """Return the result of `compute`, and whether Keras trains in this context."""
        return compute(), training


class _Leaves:
    """The tensors of a nested structure, with their masks. Raises UsageError for sparse and ragged ones."""

    def __init__(self, nested: Any) -> None:
        self._nested = nested
        self._leaves = keras.tree.flatten(nested)
        for leaf in self._leaves:
            if tf.is_tensor(leaf) and not isinstance(leaf, tf.Tensor):
                raise UsageError(
                    f"pipeline: checkpoint: a layer's {type(leaf).__name__} argument or result cannot be recomputed"
                )
        dense = [leaf for leaf in self._leaves if isinstance(leaf, tf.Tensor)]
        masks = [getattr(leaf, "_keras_mask", None) for leaf in dense]
        self._masked = [n for n, mask in enumerate(masks) if mask is not None]
        self.tensors: list[tf.Tensor] = [*dense, *(masks[n] for n in self._masked)]
        """All tensors; then their masks."""

    def filled(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Return the structure with its tensors replaced."""
        count = len(self.tensors) - len(self._masked)
        for n, mask in zip(self._masked, tensors[count:], strict=True):
            tensors[n]._keras_mask = mask  # Keras looks for the mask in this attribute
        rest = iter(tensors[:count])
        leaves = [next(rest) if isinstance(leaf, tf.Tensor) else leaf for leaf in self._leaves]
        return keras.tree.pack_sequence_as(self._nested, leaves)
