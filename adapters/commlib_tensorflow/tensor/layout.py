"""Layouts of Keras' variables: derive the styles of layers from a LayoutMap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import keras

from commlib.errors import UsageError
from commlib.tensor_parallel.einsum import Einsum
from commlib.tensor_parallel.layout_map import LayoutMap, Roles, divided_dims, style_of
from commlib.tensor_parallel.styles import Column, Row, Sequence, Style
from commlib_tensorflow.tensor._sharded_layer import is_elementwise

_ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)


def styles_of_layouts(model: Any, layers: Mapping[str, list[Any]], layouts: LayoutMap) -> dict[str, Style]:
    """Return the styles of layers, by their names.

    Inputs and outputs of layers are unsharded, as in a LayoutMap, except between a layer that shards its outputs and
    one that shards its inputs: if a model's graph is known, nothing is gathered between these.
    """
    every = {id(layer): (name, layer) for name, same in reversed(list(layers.items())) for layer in same}
    variables = {id(one): one for _, layer in every.values() for one in layer.variables}
    dims = dict(
        zip(variables, divided_dims(layouts, [(v.path, len(v.shape)) for v in variables.values()]), strict=True)
    )
    styles: dict[str, Style] = {}
    for name, layer in reversed(list(every.values())):
        roles = [(v.path, roles, dims.pop(id(v), None)) for v, roles in _roles(layer) if v is not None]
        if roles and (style := style_of(roles)) is not None:
            styles[name] = style
    if left := [variables[key].path for key, dim in dims.items() if dim is not None]:
        raise UsageError(f"plan: {left[0]} cannot be sharded: its layer does not support sharding, give it no layout")
    _join_attention(dict(every.values()), styles)
    return _gather_and_split(model, dict(every.values()), styles)


def _roles(layer: Any) -> Iterator[tuple[Any, Roles]]:
    """Yield the variables of a layer, the kernel first, with the roles of their dimensions."""
    if type(layer) is keras.layers.Dense:
        yield layer.kernel, ("inputs", "outputs")
        yield layer.bias, ("outputs",)
    elif type(layer) is keras.layers.Embedding:
        yield layer.embeddings, ("words", "outputs")
    elif type(layer) in _CONVOLUTIONS:
        yield layer.kernel, (*[None] * layer.rank, "inputs", "outputs")
        yield layer.bias, ("outputs",)
    elif type(layer) is keras.layers.EinsumDense:
        equation = Einsum.of(layer.path, layer.equation)
        kernel: list[str | None] = [None] * len(layer.kernel.shape)
        for role, places in (("inputs", equation.rows[:1]), ("outputs", equation.columns[:1])):
            for place in places:
                kernel[place.kernel] = role
        yield layer.kernel, tuple(kernel)
        if layer.bias is not None:
            bias: list[str | None] = [None] * len(layer.bias.shape)
            for place in equation.columns[:1]:
                if (dim := equation.bias(place.letter, layer.bias_axes)) is not None:
                    bias[dim] = "outputs"
            yield layer.bias, tuple(bias)


def _join_attention(layers: Mapping[str, Any], styles: dict[str, Style]) -> None:
    """Replace the styles of attention's projections by one of attention; either all or none are sharded."""
    for name, layer in layers.items():
        if not isinstance(layer, _ATTENTION):
            continue
        expected: dict[str, Style] = {
            inner: Row() if inner.endswith("/attention_output") else Column()
            for inner in layers
            if inner.startswith(f"{name}/") and type(layers[inner]) is keras.layers.EinsumDense
        }
        given = {inner: styles.pop(inner) for inner in expected if inner in styles}
        if given and given != expected:
            raise UsageError(
                f"plan: of {name}, only {', '.join(given) or 'nothing'} is sharded: give query, key and value layouts "
                "that shard their heads, and attention_output too"
            )
        if given:
            styles[name] = Column()


def _gather_and_split(model: Any, layers: Mapping[str, Any], styles: dict[str, Style]) -> dict[str, Style]:
    """Return styles that gather and split, except where a sharded output goes directly into a row-sharded layer."""
    names = {id(layer): name for name, layer in layers.items()}
    ends = {id(_maker(one)) for layer in (model, *layers.values()) for one in _outputs(layer)}

    def takers(layer: Any) -> list[Any] | None:
        """Return the layers behind an output that may stay sharded, including those in between; None if it may not."""
        values: list[Any] = []
        nodes = getattr(layer, "_outbound_nodes", [])
        if not nodes or id(layer) in ends:
            return None
        for node in nodes:
            taker = node.operation
            values.append(taker)
            if len(taker._inbound_nodes) != 1:
                return None
            if isinstance(styles.get(names.get(id(taker), "")), Row):
                continue
            if not _is_pointwise(taker) or (further := takers(taker)) is None:
                return None
            values += further
        return values

    wired = dict(styles)
    for name, style in styles.items():
        if isinstance(style, Row):
            wired[name] = replace(style, split=True)
    for name, style in styles.items():
        if not isinstance(style, Column) or isinstance(layers[name], _ATTENTION):
            continue
        others = takers(layers[name])
        if others is None:
            wired[name] = replace(style, gather=True)
            continue
        for taker in others:
            between = names.get(id(taker), "")
            if isinstance(styles.get(between), Row):
                wired[between] = styles[between]
            elif isinstance(taker, keras.layers.Dropout):
                wired[between] = Sequence(-1)
    return wired


def _is_pointwise(layer: Any) -> bool:
    """Return whether a layer works element by element."""
    if isinstance(layer, keras.layers.Activation):
        return is_elementwise(layer.activation)
    return type(layer) is keras.layers.Dropout


def _outputs(layer: Any) -> list[Any]:
    """Return the outputs of a model with a graph; none for any other layer."""
    return keras.tree.flatten(layer.outputs) if isinstance(layer, keras.Model) and hasattr(layer, "outputs") else []


def _maker(tensor: Any) -> Any:
    return tensor._keras_history.operation
