"""Stages of a model: cut a Keras model into stages that share its layers, and list the values that each stage sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import keras
import tensorflow as tf

from commlib.errors import UsageError
from commlib.pipeline.schedule import Link
from commlib_tensorflow.pipelines._split import Nodes

Named = dict[str, Any]

MASK = " mask"
"""Suffix of a value's name in the name of its mask."""

# Methods that a model may override; a pipeline would not call them.
_OWN_STEPS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


@dataclass(frozen=True, slots=True)
class SplitModel:
    """A model cut into stages.

    graph: the functional model that was split. parts: one for each stage. values: the names of the values along each
    link, in order. inputs: the names of the graph's inputs; outputs: the names of its outputs; masks: the names of the
    outputs' masks. counts: the number of operations of each stage.
    """

    graph: Any
    parts: tuple[StageLayer, ...]
    values: Mapping[Link, tuple[str, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    masks: tuple[str, ...]
    counts: tuple[int, ...]

    @property
    def links(self) -> tuple[Link, ...]:
        """The links between stages."""
        return tuple(self.values)


def cut(graph: Any, nodes: Nodes, counts: Sequence[int]) -> SplitModel:
    """Cut a functional model into stages with `counts` operations, each a layer from named values to named values.

    Operations are in topological order; a value that skips stages goes directly to each stage that uses it.
    """
    stages, ends = len(counts), [0, *accumulate(counts)]
    stage_of = {id(node): stage for stage in range(stages) for node in nodes.all[ends[stage] : ends[stage + 1]]}
    values = _crossing(nodes, stage_of, stages)
    masks = tuple(name + MASK for name in nodes.outputs if nodes.is_masked(name))
    parts = []
    for stage in range(stages):
        gives = [name for link, names in values.items() if link.source == stage for name in names]
        if stage == stages - 1:
            gives += [*nodes.outputs, *masks]
        own = nodes.all[ends[stage] : ends[stage + 1]]
        parts.append(StageLayer(graph, stage, own, nodes.names, tuple(dict.fromkeys(gives))))
    return SplitModel(graph, tuple(parts), values, nodes.inputs, nodes.outputs, masks, tuple(counts))


def to_functional(model: Any) -> Any:
    """Return a model as a functional model, whose operations are known. Raises UsageError if it is none.

    model: a keras.Sequential, a functional model, or a list of layers that begins with a keras.Input.
    """
    if isinstance(model, list | tuple):
        model = keras.Sequential(list(model))
    if not isinstance(model, keras.Model):
        kind = type(model)
        hint = ": models of Keras 2 cannot be split, use Keras 3" if kind.__module__.startswith("tf_keras.") else ""
        raise UsageError(f"pipeline: expected a Keras model or a list of layers, got {kind.__name__}{hint}")
    is_functional = isinstance(model, keras.Function)
    if not is_functional and not isinstance(model, keras.Sequential):
        raise UsageError(
            f"pipeline: {type(model).__name__} is neither functional nor Sequential, so its layers and their call "
            "order are unknown: give a keras.Sequential, a functional keras.Model(inputs, outputs), or a list of "
            "layers that begins with a keras.Input"
        )
    own = [name for name in _OWN_STEPS if getattr(type(model), name) is not getattr(keras.Model, name)]
    if own:
        raise UsageError(
            f"pipeline: {type(model).__name__} overrides {own[0]}, which a pipeline does not call: give a "
            "plain keras.Sequential or keras.Model(inputs, outputs), and a loss and metrics to compile"
        )
    if own := [name for name in ("__call__", "call") if not _of_keras(type(model), name)]:
        raise UsageError(
            f"pipeline: {type(model).__name__} overrides {own[0]}, so it does not compute just its layers in sequence: "
            "give a plain keras.Sequential or keras.Model(inputs, outputs), which may contain such a model as a layer"
        )
    if not is_functional and not (model.built and model.layers and _has_inputs(model)):
        raise UsageError(
            f"pipeline: {type(model).__name__} {model.name!r} is not built, so its weights are unknown: begin it "
            "with keras.Input(shape), or call build(input_shape)"
        )
    return model if is_functional else keras.Model(model.inputs, model.outputs, name=model.name)


def _of_keras(kind: type, name: str) -> bool:
    """Return whether Keras itself defines a method of a class."""
    owner = next(one for one in kind.__mro__ if name in vars(one))
    return owner.__module__.partition(".")[0] == "keras"


def _has_inputs(model: Any) -> bool:
    try:
        return bool(model.inputs)
    except (AttributeError, ValueError):
        return False


def _crossing(nodes: Nodes, stage_of: Mapping[int, int], stages: int) -> dict[Link, tuple[str, ...]]:
    """Return the names of the values along each link, with their masks."""
    stage_of_name = dict.fromkeys(nodes.inputs, 0)
    for node in nodes.all:
        stage_of_name |= {nodes.names[id(tensor)]: stage_of[id(node)] for tensor in node.outputs}
    links: dict[Link, dict[str, None]] = {}
    used = [(name, stage_of[id(node)]) for node in nodes.all for name in nodes.inputs_of(node)]
    for name, stage in [*used, *((name, stages - 1) for name in nodes.outputs)]:
        if stage_of_name[name] != stage:
            names = links.setdefault(Link(stage_of_name[name], stage), {})
            names[name] = None
            if nodes.is_masked(name):
                names[name + MASK] = None
    return {link: tuple(links[link]) for link in sorted(links)}


# One stage


class StageLayer(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Calls of some of a model's operations, as a layer. It tracks the layers among them, so it has their variables."""

    def __init__(
        self, graph: Any, stage: int, nodes: Sequence[Any], names: Mapping[int, str], gives: tuple[str, ...]
    ) -> None:
        super().__init__(name=f"stage{stage}", dtype=graph.dtype_policy, autocast=False)
        self._nodes, self._names, self._gives = _UntrackedBox(tuple(nodes)), _UntrackedBox(names), gives
        operations = {id(node.operation): node.operation for node in nodes}
        self.calls = [operation for operation in operations.values() if isinstance(operation, keras.layers.Layer)]
        self.built = True

    @property
    def gives(self) -> tuple[str, ...]:
        """The names of the values that other stages need, with their masks."""
        return self._gives

    @property
    def nodes(self) -> Sequence[Any]:
        """The calls, in their order."""
        return self._nodes.value  # type: ignore[no-any-return]

    @property
    def recurrent_states(self) -> list[Any]:
        """The states of stateful layers, which Keras does not count among their variables."""
        layers = [layer for layer in self._flatten_layers() if isinstance(layer, keras.layers.RNN) and layer.stateful]
        return [state for layer in layers for state in keras.tree.flatten(layer.states) if state is not None]

    def call(self, values: Named, training: bool | None = None) -> Named:
        """Call the operations on named values; return the values that other stages need, with their masks."""
        named = dict(values)
        for name in values:
            if name.endswith(MASK):
                masked = named[name.removesuffix(MASK)] = tf.identity(values[name.removesuffix(MASK)])
                masked._keras_mask = values[name]  # Keras marks the results of layers in this way
        names = self._names.value
        for node in self._nodes.value:
            inputs_by_id = {id(tensor): named[names[id(tensor)]] for tensor in node.input_tensors}
            args, kwargs = node.arguments.fill_in(inputs_by_id)
            if training is not None and "training" in getattr(node.operation, "_call_context_args", ()):
                kwargs["training"] = training  # functional models do the same
            outputs = keras.tree.flatten(node.operation(*args, **kwargs))
            named.update(zip((names[id(tensor)] for tensor in node.outputs), outputs, strict=True))
        return {name: self._given(named, name) for name in self._gives}

    def _given(self, named: Named, name: str) -> Any:
        if not name.endswith(MASK):
            return named[name]
        mask = getattr(named[name.removesuffix(MASK)], "_keras_mask", None)
        if mask is None:
            raise UsageError(f"pipeline: {self.name}: a value had a mask when the model was built, but has none now")
        return mask


class _UntrackedBox:
    """Box that hides a value from Keras' search for layers."""

    def __init__(self, value: Any) -> None:
        self.value = value
