"""parallelize: divide the layers of a plain model of Keras among the ranks of an axis, by a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from commlib import horovod as core
from commlib.buffers.freed_memory import keep_freed_memory
from commlib.communicator import Communicator
from commlib.data_parallel.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.functional.axis import Axis
from commlib.tensor.layout_map import is_layout_map
from commlib.tensor.plan import resolve
from commlib.tensor.styles import Style
from commlib_tensorflow._keras3 import NO_XLA_DIVIDED, never_compile
from commlib_tensorflow.tensor._values import take_values_of_rank_0
from commlib_tensorflow.tensor.layers import find_layer
from commlib_tensorflow.tensor.layout import styles_of_layouts
from commlib_tensorflow.tensor.streams import draw_alike


def parallelize(model: keras.Model, axis: Communicator, plan: Mapping[str, Any], *, codec: Any = None) -> keras.Model:
    """Divide the layers that `plan` names among the ranks of `axis`, such as `mesh["tp"]`, and return `model`.

    It is the same model: layers and variables stay the objects that they are, with rank 0's values; variables are
    smaller where they are divided. plan: styles by patterns of layers' names from the model down, `{"block_*/up":
    Column(), "block_*/down": Row()}`; or, as Keras' LayoutMap, axes by patterns (regular expressions) of variables'
    paths, `{"up/kernel": (None, "tp")}`. codec: in which activations and their gradients travel, such as "bf16". The
    model must be built; compile it before or after, but let no optimizer have made its own variables.

    All ranks of the axis need the same rows: where their seeds differ, or none was given, they are seeded alike here,
    so that `fit` shuffles alike. A regularizer of what is divided has the gradient of the whole, but adds this rank's
    part of it to the loss that is reported.

    Collective over the axis. Raises UsageError for a plan that does not fit, and for jit_compile=True, also later: XLA
    cannot call the host; MismatchError if ranks hold different models or plans.
    """
    shared = Axis(axis, codec, empty=core.empty)
    layers = layers_of(model)
    styles = styles_of_layouts(model, layers, plan) if is_layout_map(plan) else resolve(plan, list(layers))
    found = [(name, only(name, layers[name]), style) for name, style in styles.items()]
    kinds = [(name, layer, style, find_layer(name, layer, style)) for name, layer, style in found]
    check_agreement(axis, "parallelize", [f"codec {codec}", *lines(layers, styles), *map(said, model.variables)])
    if getattr(getattr(model, "optimizer", None), "built", False):
        raise UsageError(
            "parallelize: the model's optimizer has variables of whole weights: divide the model before it is trained"
        )
    if getattr(model, "_jit_compile", False):
        raise UsageError(NO_XLA_DIVIDED)
    take_values_of_rank_0("parallelize", model.variables, axis)
    draw_alike(axis)
    done: dict[int, tuple[str, Style]] = {}
    for name, layer, style, kind in kinds:
        before = done.setdefault(id(layer), (name, style))
        if before[1] != style:
            raise UsageError(f"plan: {name} and {before[0]} are one layer: give them one style")
        if before[0] == name and kind is not None:
            layer.__class__ = kind
            layer.become(name, shared, style)
    never_compile(model)
    model.train_function = model.test_function = model.predict_function = None
    keep_freed_memory()
    return model


def layers_of(model: keras.Model) -> dict[str, list[Any]]:
    """Return the layers within a model by their names from the model down, such as "block_0/up"; those of one name."""
    if not isinstance(model, keras.Model):
        of = type(model).__module__.split(".")[0]
        hint = ": models of Keras 2 cannot be divided, use Keras 3" if of == "tf_keras" else ""
        raise UsageError(f"parallelize: expected a keras.Model, got {of}.{type(model).__name__}{hint}")
    found: dict[str, list[Any]] = {}
    _walk(model, "", (), found)
    return found


def _walk(layer: Any, prefix: str, above: tuple[Any, ...], found: dict[str, list[Any]]) -> None:
    for inner in layer._layers:
        if any(inner is one for one in above):
            continue
        if isinstance(layer, keras.Sequential) and isinstance(inner, keras.Model) and inner not in layer.layers:
            continue  # how a Sequential computes, of the same layers
        name = f"{prefix}{inner.name}"
        same = found.setdefault(name, [])
        if not any(inner is one for one in same):
            same.append(inner)
        _walk(inner, f"{name}/", (*above, layer), found)


def only(name: str, layers: list[Any]) -> Any:
    """Return the one layer of a name. Raises UsageError if there are several."""
    if len(layers) > 1:
        raise UsageError(f"plan: {len(layers)} layers are called {name}: give them names of their own")
    return layers[0]


def lines(layers: Mapping[str, list[Any]], styles: Mapping[str, Style]) -> list[str]:
    """Return the styles as text, by the layers' places: Keras counts in names what a process has made before."""
    return [
        f"layer {place}, {type(only(name, layers[name])).__name__}: {styles[name]}"
        for place, name in enumerate(layers)
        if name in styles
    ]


def said(variable: Any) -> str:
    """Return what ranks compare of a variable."""
    return f"{variable.dtype}{list(variable.shape)}"
