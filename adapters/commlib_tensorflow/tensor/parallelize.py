"""parallelize: divide the layers of a plain model of Keras among the ranks of an axis, by a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from commlib.communicator import Communicator
from commlib.comparison.agreement import agree_on_call, together
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.checks.checks import Checks, found_plan
from commlib.tensor_parallel.layout_map import is_layout_map
from commlib.tensor_parallel.plan import resolve
from commlib.tensor_parallel.run.division import Division
from commlib.tensor_parallel.run.per_rank import Number, check_numbers, divide_numbers
from commlib.tensor_parallel.styles import PerRank, Style
from commlib_tensorflow._graph import result_empty
from commlib_tensorflow._keras3 import NO_XLA_DIVIDED, never_compile
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow.tensor._callbacks import watch_callbacks
from commlib_tensorflow.tensor._changes import watch_changes
from commlib_tensorflow.tensor._earlier import watch_earlier_optimizers
from commlib_tensorflow.tensor._in_files import kept_as
from commlib_tensorflow.tensor._likeness import likeness
from commlib_tensorflow.tensor._numbers import keep_whole_in_configurations, numbers_in
from commlib_tensorflow.tensor._values import values_of_rank_0
from commlib_tensorflow.tensor.checking import Traced, check_at_calls, known_call, watched
from commlib_tensorflow.tensor.layers import check_layers, check_wrapper, find_layer
from commlib_tensorflow.tensor.layout import styles_of_layouts
from commlib_tensorflow.tensor.names import layers_named, only
from commlib_tensorflow.tensor.state import divide_optimizer
from commlib_tensorflow.tensor.streams import draw_alike


def parallelize(
    model: keras.Model,
    axis: Communicator,
    plan: Mapping[str, Any] | str,
    *,
    verify: Any = None,
    example: Any = None,
    codec: Any = None,
    divided_output: bool = False,
    report: Callable[[str], object] = print,
) -> keras.Model:
    """Divide the layers that `plan` names among the ranks of `axis`, such as `mesh["tp"]`, and return `model`.

    It is the same model: layers and variables stay the objects that they are, with rank 0's values; variables are
    smaller where they are divided. plan: styles by patterns of layers' names from the model down, `{"block_*/up":
    Column(), "block_*/down": Row()}`; or, as Keras' LayoutMap, axes by patterns (regular expressions) of variables'
    paths, `{"up/kernel": (None, "tp")}`; or "auto" for models like transformers, which rank 0 reports as a table. The
    model must be built; compile it before or after. What an optimizer has made of training so far is divided, too.

    verify: a batch with which the model is called, the same on all ranks, for one forward and backward beside those of
    the undivided model, which are kept for so long. example: a batch on which the plan is checked by
    `commlib.tensor_parallel.rules`, and its numbers are compared where these cannot tell, before anything is divided;
    it may consist of `tf.TensorSpec`s, which get random numbers. Functional and Sequential models need none: their
    inputs are known. Others are checked at their first call. codec: in which activations and their gradients travel,
    such as "bf16". divided_output: what the model returns may stay divided. Logits of `Vocabulary()` without gather
    always may, for `vocabulary_cross_entropy`: of such, Keras' losses and metrics, argmax and generate() see this
    rank's words alone; with gather=True they are whole.

    All ranks of the axis need the same rows: where their seeds differ, or none was given, they are seeded alike here,
    so that `fit` shuffles alike. A regularizer of what is divided has the gradient and the loss of the whole.

    Collective over the axis. Raises UsageError, on all ranks, for a plan that does not fit, breaks a rule, or gives
    other numbers, and for jit_compile=True, also later: XLA cannot call the host; MismatchError if ranks hold different
    models or plans. The model is as it was then, but if it was divided before it showed that it fails or gives other
    numbers (verify=, example=): that one has to be made anew.
    """
    shared = Axis(axis, codec, empty=result_empty)
    agree_on_call(axis, "parallelize", plan=plan, verify=verify, example=example, codec=codec, output=divided_output)
    named = together(axis, lambda: layers_named(model))
    layers = {name: same[0] for name, same in named.items()}
    is_found = isinstance(plan, str)
    if is_found:  # for other models ranks would find other plans
        likeness(model, layers).compare(axis, "parallelize")
    traced, call = Traced(model, layers, shared), example if verify is None else verify
    call = known_call(model) if call is None else call
    trained = Traced(model, layers, shared, training=True)
    others = () if traced.is_of_keras else (trained,)
    wanted: Any = found_plan(traced, shared, plan, call, report, others) if isinstance(plan, str) else plan
    known = numbers_in(model, layers)
    found, numbers = together(axis, lambda: _layers(model, named, known, wanted))
    styles = {name: style for name, _, style, _ in found}
    said = [*_lines(layers, styles), *_lines_of_numbers(known, numbers)]
    check_agreement(axis, "parallelize", [f"codec {codec}", *said, *map(_said, model.variables)])

    def check() -> None:
        check_layers(found, Division(shared))
        check_numbers(numbers, axis.size)

    together(axis, check)
    if not is_found:
        likeness(model, layers).compare(axis, "parallelize")
    checks = None
    with values_of_rank_0("parallelize", model.variables, axis):
        if call is not None:
            given = styles | {name: style for name, (_, style) in numbers.items()} | traced.styles()
            checks = Checks(traced, shared, given, call, divided_output=divided_output)
            if verify is None:
                checks.compare_numbers()
            else:
                checks.keep_numbers()
            alike = all(axis.all_gather_object(traced.trains_alike(checks.whole, call, given)))
            if axis.rank == 0:
                traced.warn()
            if not alike:
                Checks(trained, shared, given, call, divided_output=divided_output).compare_numbers()
    draw_alike(axis)
    watch_earlier_optimizers()
    watch_callbacks()
    watch_changes()
    for name, layer, style, kind in found:
        if kind is not None and not hasattr(layer, "become"):  # one that has several names has become it by the first
            layer.__class__ = kept_as(kind, type(layer))  # type: ignore[arg-type]  # types have a hash
            layer.become(name, shared, style)
            layer.style = style  # the plan's, where a layer has made another one of it
    for number, _ in numbers.values():
        keep_whole_in_configurations(number.module)
    divide_numbers(numbers, shared)
    optimizer = getattr(model, "optimizer", None)
    if getattr(optimizer, "built", False):
        divide_optimizer(getattr(optimizer, "inner_optimizer", optimizer))
    never_compile(model)
    model.train_function = model.test_function = model.predict_function = None
    unchecked = watched(model, layers, shared, divided_output=divided_output)
    if checks is not None:
        with unchecked.checking():
            checks.divided()
    check_at_calls(model, layers, unchecked, call)
    return model


def _layers(
    model: Any, named: Mapping[str, list[Any]], known: Mapping[str, Number], plan: Any
) -> tuple[list[tuple[str, Any, Style, Any]], dict[str, tuple[Number, PerRank]]]:
    """Return (name, layer, style, the class that it becomes or None) of what a plan names, and numbers with styles."""
    if getattr(model, "_jit_compile", False):
        raise UsageError(NO_XLA_DIVIDED)
    styles: Mapping[str, Style]
    if is_layout_map(plan):
        styles = styles_of_layouts(model, named, plan)
    else:
        styles = resolve(plan, list(named), numbers=list(known))
    numbers = {name: (known[name], style) for name, style in styles.items() if isinstance(style, PerRank)}
    found = [(name, only(name, named[name]), style) for name, style in styles.items() if name not in numbers]
    for name, _, _ in found:
        check_wrapper(name, named)
    return [(name, layer, style, find_layer(name, layer, style)) for name, layer, style in found], numbers


def _lines(layers: Mapping[str, Any], styles: Mapping[str, Style]) -> list[str]:
    """Return the styles as text, by the layers' places: Keras counts in names what a process has made before."""
    return [
        f"layer {place}, {type(layers[name]).__name__}: {styles[name]}"
        for place, name in enumerate(layers)
        if name in styles
    ]


def _lines_of_numbers(known: Mapping[str, Number], numbers: Mapping[str, tuple[Number, PerRank]]) -> list[str]:
    """Return the styles of numbers as text, by their places."""
    return [
        f"number {place}, {known[name].own_name} of {known[name].value}: {numbers[name][1]}"
        for place, name in enumerate(known)
        if name in numbers
    ]


def _said(variable: Any) -> str:
    """Return what ranks compare of a variable."""
    shard = shard_of(variable)
    return f"{variable.dtype}{list(variable.shape if shard is None else shard.sharding.shape)}"
