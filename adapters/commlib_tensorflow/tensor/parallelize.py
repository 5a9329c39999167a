"""parallelize: shard the layers of a plain Keras model over the ranks of an axis, by a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import keras
import tensorflow as tf

from commlib.comparison.agreement import agree_on_call, run_together
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.ranks import Ranks, communicator_of
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.checks.plan_checks import PlanChecks, find_plan
from commlib.tensor_parallel.layout_map import is_layout_map
from commlib.tensor_parallel.plan import resolve
from commlib.tensor_parallel.run.divisibility import Divisibility
from commlib.tensor_parallel.run.rank_numbers import ModuleNumber, check_numbers, split_numbers
from commlib.tensor_parallel.styles import PerRank, Style
from commlib_tensorflow._host_calls import result_empty
from commlib_tensorflow._keras3 import NO_XLA_DIVIDED, never_compile
from commlib_tensorflow._keras_reduction import replace
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow._trial_run import check_batches
from commlib_tensorflow.tensor._callbacks import watch_callbacks
from commlib_tensorflow.tensor._file_layers import disguise_class
from commlib_tensorflow.tensor._numbers import keep_whole_in_configurations, numbers_in
from commlib_tensorflow.tensor._structure import structure_of
from commlib_tensorflow.tensor._values import use_rank_0_values
from commlib_tensorflow.tensor.layers import check_layers, check_wrapper, find_layer
from commlib_tensorflow.tensor.layout import styles_of_layouts
from commlib_tensorflow.tensor.names import layers_named, single_layer
from commlib_tensorflow.tensor.plan_check import CheckedModel, attach_check, check_at_calls, known_call
from commlib_tensorflow.tensor.state import shard_optimizer
from commlib_tensorflow.tensor.streams import draw_alike


def parallelize(
    model: keras.Model,
    ranks: Ranks,
    plan: Mapping[str, Any] | Literal["auto"],
    *,
    verify: Any = None,
    example: Any = None,
    codec: Any = None,
    divided_output: bool = False,
    report: Callable[[str], object] = print,
) -> keras.Model:
    """Shard the layers that `plan` names over `ranks`, such as `mesh["tp"]`, and return `model`.

    The model stays the same object, and so do its layers and variables, with rank 0's values; sharded variables become
    smaller. The model must be built; compile it before or after. Existing optimizer state is sharded, too. Functional
    and Sequential models are checked here, others at their first call.

    All ranks of the axis need the same rows: if their seeds differ, or none was set, they get the same seed here, so
    that `fit` shuffles in the same order. A regularizer of a sharded variable has the gradient and the loss of the
    unsharded one.

    Collective. After an error the model is unchanged, unless it was already sharded when a check failed (`verify`,
    `example`): then it must be constructed again.

    Args:
        model: A model of Keras 3 or tf_keras.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        plan: Styles by patterns of layers' names from the model down, `{"block_*/up": Column(), "block_*/down":
            Row()}`; or, like Keras' LayoutMap, axes by patterns (regular expressions) of variables' paths,
            `{"up/kernel": (None, "tp")}`; or "auto" for models like transformers, where rank 0 prints the plan as a
            table.
        verify: A batch with which the model is called, the same on all ranks: one forward and backward is compared with
            the unsharded model, whose values are kept for that time.
        example: A batch on which the plan is checked by `commlib.tensor_parallel.rules`, with a comparison of values if
            the rules cannot decide, before anything is sharded; it may consist of `tf.TensorSpec`s, which get random
            values.
        codec: The wire format of activations and their gradients, such as "bf16"; None: as they are.
        divided_output: Whether the model's output may stay sharded. Logits of `Vocabulary()` without gather always may,
            for `vocabulary_cross_entropy`: Keras' losses and metrics, argmax and generate() would see only this rank's
            tokens; with gather=True they see all.
        report: A function that gets the text that rank 0 reports about "auto".

    Raises:
        UsageError: On all ranks, for a plan that does not fit, breaks a rule, or changes results, and for
            jit_compile=True, also later, because XLA cannot call the host.
        MismatchError: If ranks have different models or plans.
    """
    axis = communicator_of(ranks, "parallelize")
    shared = ParallelAxis(axis, codec, empty=result_empty)
    agree_on_call(axis, "parallelize", plan=plan, verify=verify, example=example, codec=codec, output=divided_output)
    check_batches("parallelize", verify=verify, example=example)
    named = run_together(axis, lambda: layers_named(model))
    layers = {name: same[0] for name, same in named.items()}
    is_auto = isinstance(plan, str)
    if is_auto:  # with different models ranks would find different plans
        structure_of(model, layers).compare(axis, "parallelize")
    traced, call = CheckedModel(model, layers, shared), example if verify is None else verify
    call = known_call(model) if call is None else call
    trained = CheckedModel(model, layers, shared, training=True)
    others = () if traced.is_of_keras else (trained,)
    wanted: Any = find_plan(traced, shared, plan, call, report, others) if isinstance(plan, str) else plan
    known = numbers_in(model, layers)
    layers_found, numbers = run_together(axis, lambda: _layers(model, named, known, wanted))
    styles = {name: style for name, _, style, _ in layers_found}
    lines = [*_lines(layers, styles), *_lines_of_numbers(known, numbers)]
    check_agreement(axis, "parallelize", [f"codec {codec}", *lines, *map(_describe, model.variables)])

    def check() -> None:
        check_layers(layers_found, Divisibility(shared))
        check_numbers(numbers, axis.size)

    run_together(axis, check)
    if not is_auto:
        structure_of(model, layers).compare(axis, "parallelize")
    checks = None
    with use_rank_0_values("parallelize", model.variables, axis):
        if call is not None:
            given = styles | {name: style for name, (_, style) in numbers.items()} | traced.styles()
            checks = PlanChecks(traced, shared, given, call, divided_output=divided_output)
            if verify is None:
                checks.compare_numbers()
            else:
                checks.keep_numbers()
            alike = all(axis.all_gather_object(traced.trains_alike(checks.whole, call, given)))
            if axis.rank == 0:
                traced.warn()
            if not alike:
                PlanChecks(trained, shared, given, call, divided_output=divided_output).compare_numbers()
    draw_alike(axis)
    watch_earlier_optimizers()
    watch_callbacks()
    watch_changes()
    for name, layer, style, kind in layers_found:
        if kind is not None and not hasattr(layer, "become"):  # a layer with several names has become it by the first
            layer.__class__ = disguise_class(kind, type(layer))  # type: ignore[arg-type]  # types have a hash
            layer.become(name, shared, style)
            layer.style = style  # the plan's style, if the layer has derived another one
    for number, _ in numbers.values():
        keep_whole_in_configurations(number.module)
    split_numbers(numbers, shared)
    optimizer = getattr(model, "optimizer", None)
    if getattr(optimizer, "built", False):
        shard_optimizer(getattr(optimizer, "inner_optimizer", optimizer))
    never_compile(model)
    model.train_function = model.test_function = model.predict_function = None
    unchecked = attach_check(model, layers, shared, divided_output=divided_output)
    if checks is not None:
        with unchecked.checking():
            checks.divided()
    check_at_calls(model, layers, unchecked, call)
    return model


def _layers(
    model: Any, named: Mapping[str, list[Any]], known: Mapping[str, ModuleNumber], plan: Any
) -> tuple[list[tuple[str, Any, Style, Any]], dict[str, tuple[ModuleNumber, PerRank]]]:
    """Return (name, layer, style, sharded class or None) for each layer in a plan, and the numbers with styles."""
    if getattr(model, "_jit_compile", False):
        raise UsageError(NO_XLA_DIVIDED)
    styles: Mapping[str, Style]
    if is_layout_map(plan):
        styles = styles_of_layouts(model, named, plan)
    else:
        styles = resolve(plan, list(named), numbers=list(known))
    numbers = {name: (known[name], style) for name, style in styles.items() if isinstance(style, PerRank)}
    layers = [(name, single_layer(name, named[name]), style) for name, style in styles.items() if name not in numbers]
    for name, _, _ in layers:
        check_wrapper(name, named)
    return [(name, layer, style, find_layer(name, layer, style)) for name, layer, style in layers], numbers


def _lines(layers: Mapping[str, Any], styles: Mapping[str, Style]) -> list[str]:
    """Return the styles as text, by layer index: Keras' names count the objects that a process has made."""
    return [
        f"layer {place}, {type(layers[name]).__name__}: {styles[name]}"
        for place, name in enumerate(layers)
        if name in styles
    ]


def _lines_of_numbers(
    known: Mapping[str, ModuleNumber], numbers: Mapping[str, tuple[ModuleNumber, PerRank]]
) -> list[str]:
    """Return the styles of numbers as text, by index."""
    return [
        f"number {place}, {known[name].own_name} of {known[name].value}: {numbers[name][1]}"
        for place, name in enumerate(known)
        if name in numbers
    ]


def _describe(variable: Any) -> str:
    """Return a variable's dtype and unsharded shape, which ranks compare."""
    shard = shard_of(variable)
    return f"{variable.dtype}{list(variable.shape if shard is None else shard.sharding.shape)}"


_CHECK = "_check_variables_are_known"


def watch_earlier_optimizers() -> None:
    """Make optimizers outside of a model, as in custom training loops, find their variables again after sharding."""
    kinds = [kind for kind in keras.optimizers.Optimizer.__mro__ if _CHECK in vars(kind)]
    for kind in kinds[:1]:  # a Keras without this method needs no change
        replace(kind, _CHECK, _wrap_known_check)


def _wrap_known_check(original: Any) -> Any:
    @functools.wraps(original)
    def _check_variables_are_known(self: Any, variables: Any) -> Any:
        known = self._trainable_variables_indices
        if any(shard_of(variable) is not None and self._var_key(variable) not in known for variable in variables):
            with tf.init_scope():
                shard_optimizer(self)
        return original(self, variables)

    return _check_variables_are_known


def watch_changes() -> None:
    """Make sharded models be checked again after a Sequential in them has changed."""
    for name in ("add", "pop"):
        replace(keras.Sequential, name, _wrap_change)


def _wrap_change(original: Any) -> Any:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **options: Any) -> Any:
        for layer in self._flatten_layers():
            check = getattr(layer, "plan_check", None)
            if check is not None:
                check.change()
        return original(self, *args, **options)

    return wrapper
