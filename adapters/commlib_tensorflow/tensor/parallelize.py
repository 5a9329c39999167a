"""parallelize: divide the layers of a plain model of Keras among the ranks of an axis, by a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from commlib import horovod as core
from commlib.buffers.freed_memory import keep_freed_memory
from commlib.communicator import Communicator
from commlib.data_parallel.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.functional.axis import Axis
from commlib.functional.checks import Checks, found_plan
from commlib.tensor.plan import Plan, lines, resolve
from commlib.tensor.styles import Replicate
from commlib_tensorflow.tensor.checking import Traced, check_at_first_call, known_call
from commlib_tensorflow.tensor.layers import find_layer
from commlib_tensorflow.tensor.tracing import styles_in


def parallelize(
    model: keras.Model,
    axis: Communicator,
    plan: Plan | str,
    *,
    verify: Any = None,
    example: Any = None,
    codec: Any = None,
    divided_output: bool = False,
    report: Callable[[str], object] = print,
) -> keras.Model:
    """Divide the layers that `plan` names among the ranks of `axis`, such as `mesh["tp"]`, and return `model`.

    It is the same model: layers and variables stay the objects that they are, with rank 0's values; variables are
    smaller where they are divided. plan: styles by patterns of layers' paths, `{"block_*/up": Column(),
    "block_*/down": Row()}`; or "auto" for models like transformers, which rank 0 reports as a table. The model must be
    built; compile it before or after, but let no optimizer have made its own variables.

    verify: a batch with which the model is called, the same on all ranks, for one forward and backward beside those of
    the undivided model, which are kept for so long. example: a batch on which the plan is checked by
    `commlib.tensor.rules`, before anything is divided; it may consist of `tf.TensorSpec`s, since its values are not
    looked at. Functional and Sequential models need none: their inputs are known. Others are checked at their first
    call. codec: in which activations and their gradients travel, such as "bf16". divided_output: what the model returns
    may stay divided.

    Collective over the axis. Raises UsageError for a plan that does not fit, breaks a rule, or gives other numbers,
    MismatchError if ranks hold different models or plans.
    """
    shared = Axis(axis, codec, empty=core.empty)
    layers = layers_of(model)
    traced, call = Traced(model, layers), example if verify is None else verify
    call = known_call(model) if call is None else call
    if isinstance(plan, str):
        plan = found_plan(traced, shared, plan, call, report)
    styles = resolve(plan, list(layers))
    shapes = [f"{variable.dtype}{list(variable.shape)}" for variable in model.variables]
    check_agreement(axis, "parallelize", [f"codec {codec}", *lines(styles), *shapes])
    if getattr(getattr(model, "optimizer", None), "built", False):
        raise UsageError(
            "parallelize: the model's optimizer has variables of whole weights: divide the model before it is trained"
        )
    found = [(name, layers[name], style, find_layer(name, layers[name], style)) for name, style in styles.items()]
    for variable in model.variables:
        values = variable.numpy()
        variable.assign(axis.broadcast(values))
    checks = None
    if call is not None:
        given = styles | styles_in(layers)
        checks = Checks(traced, shared, given, call, numbers=verify is not None, divided_output=divided_output)
    for name, layer, style, kind in found:
        if not isinstance(style, Replicate):
            layer.__class__ = kind
            layer.become(name, shared, style)
            layer.style = style  # the plan's, where a layer has made another one of it
    model.train_function = model.test_function = model.predict_function = None
    keep_freed_memory()
    if checks is not None:
        checks.divided()
    else:
        check_at_first_call(model, layers, divided_output=divided_output, warns=axis.rank == 0)
    return model


def layers_of(model: keras.Model) -> dict[str, Any]:
    """Return the layers within a model, by their paths."""
    if not isinstance(model, keras.Model):
        raise UsageError(f"parallelize: expected a keras.Model, got {type(model).__name__}")
    return {layer.path or layer.name: layer for layer in model._flatten_layers(include_self=False)}
