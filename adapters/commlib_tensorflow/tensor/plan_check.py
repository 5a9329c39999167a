"""Plan checks: check a plan of a Keras model against the rules, before it is sharded or at its first call."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.checks.guided_run import GuidedRun
from commlib.tensor_parallel.checks.kinds import KINDS, CallKinds
from commlib.tensor_parallel.checks.plan_checks import (
    check_first_call,
    check_parts,
    describe_failed_check,
    describe_outside_call,
    describe_repeated_failure,
    describe_too_many_kinds,
    describe_unchecked,
)
from commlib.tensor_parallel.checks.trace_run import OutputPlacements, TracedRun
from commlib.tensor_parallel.checks.weight_shapes import list_weight_shapes
from commlib.tensor_parallel.run.divisibility import Divisibility
from commlib.tensor_parallel.styles import Style
from commlib.tensor_parallel.trace import ModelTrace
from commlib_tensorflow._recomputation_check import Recomputation, recomputation
from commlib_tensorflow.tensor._call_context import current_call, is_running, isolate_call
from commlib_tensorflow.tensor._call_hooks import hook_calls
from commlib_tensorflow.tensor._calls import ModelCall, is_trained, kind_of_call
from commlib_tensorflow.tensor._forward import can_run_whole, forward, split_calls
from commlib_tensorflow.tensor._numbers import styles_of_numbers
from commlib_tensorflow.tensor._runs import run_model
from commlib_tensorflow.tensor._sharded_layer import gives_part
from commlib_tensorflow.tensor._weights import sharded_weights
from commlib_tensorflow.tensor.layers import check_layers, find_layer
from commlib_tensorflow.tensor.names import layers_of
from commlib_tensorflow.tensor.tracing import Layers, concrete, styles_in, try_trace


class CheckedModel:
    """A Keras model for `plan_checks`: a call is one value, or a `ModelCall`, or specs of either.

    training: call the model in training mode. Numeric runs use it, too, unless the model then draws random numbers.
    """

    def __init__(self, model: Any, layers: Layers, axis: ParallelAxis | None = None, *, training: bool = False) -> None:
        self._model, self._layers, self._axis, self._training = model, layers, axis, training
        self._size = 1 if axis is None else axis.size
        self._hidden: list[str] = []
        self._eager: list[str] = []
        self._stopped: UsageError | None = None
        self._replaces_zeros = True

    def attempt(self, call: Any, styles: Collection[str]) -> tuple[ModelTrace, Exception | None]:
        """Return the model's trace, and the error of the call if it failed."""
        weights = list_weight_shapes(sharded_weights(self._layers, styles, self._size))
        trace, error = try_trace(
            self._model, self._layers, call, styles, self._hidden,
            eager=self._eager, training=self._training, weights=weights,
        )  # fmt: skip
        self._stopped = error if isinstance(error, UsageError) else None
        return trace, error

    def trains_alike(self, trace: ModelTrace, call: Any, styles: Collection[str]) -> bool:
        """Return whether the model does the same in training as in evaluation (`trace`), for a call and styles.

        True if all layers are Keras' own, or if the training call fails: then the model cannot be trained.
        """
        if self.is_of_keras:
            return True
        weights = list_weight_shapes(sharded_weights(self._layers, styles, self._size))
        trained, error = try_trace(self._model, self._layers, call, styles, training=True, weights=weights)
        self._stopped = error if isinstance(error, UsageError) else None
        return error is not None or (trained.steps, trained.retained) == (trace.steps, trace.retained)

    @property
    def is_of_keras(self) -> bool:
        """Whether all layers of the model are Keras' own."""
        return all(_is_of_keras(layer) for layer in (self._model, *self._layers.values()))

    def warn(self, *, stops: bool = True) -> bool:
        """Warn once of layers that the rules have not seen, and of a call that they could not follow to its end.

        stops: also warn of such a call. Returns whether there was one.
        """
        text, self._stopped = self._stopped, None
        if text is not None and stops:
            warnings.warn(f"{text}", stacklevel=3)
        if self._eager:
            line, self._eager = self._eager[0], []
            warnings.warn(
                f"plan: {type(self._model).__name__} checks whether it runs eagerly at {line}, but its plan is checked "
                "in a graph, also with verify= and example=: remove this branch, or call it in a graph, as fit does",
                stacklevel=3,
            )
        if self._hidden:
            names, self._hidden = ", ".join(dict.fromkeys(self._hidden)), []
            warnings.warn(
                f"plan: {names} run in a loop, a branch or a function of TensorFlow, where the rules do not apply: "
                "give verify=, which compares values",
                stacklevel=3,
            )
        return text is not None

    def run(self, call: Any, styles: Collection[str], outputs: OutputPlacements) -> TracedRun:
        """Run the model forward and backward."""
        return run_model(self._model, self._layers, call, styles, outputs)

    def forward(
        self, call: Any, styles: Mapping[str, Style], guide: GuidedRun | None, *, evaluate: bool
    ) -> TracedRun | None:
        """Run the model forward, unsharded or as one rank. Collective.

        Weights that are all zeros get other values for the run, unless the unsharded model then fails or returns
        non-finite values.
        """
        if self._axis is None or not can_run_whole(self._layers, self._axis):
            return None
        training = self._training and not evaluate
        run = functools.partial(forward, self._model, self._layers, self._axis, call, styles, guide, training=training)
        result = run(replaces_zeros=self._replaces_zeros)
        if guide is None and self._replaces_zeros:
            works = result.is_finite or not result.zeros
            self._replaces_zeros = all(self._axis.comm.all_gather_object(works))
            result = result if self._replaces_zeros else run(replaces_zeros=False)
        return result

    def whole_and_part(self, call: Any, dims: Mapping[int, int], *, is_part: bool) -> tuple[Any, Any] | None:
        """Return the unsharded call, and this rank's call with its shards. Collective."""
        return None if self._axis is None else split_calls(self._axis, ModelCall.of(call), dims, is_part=is_part)

    def tensor_values(self, call: Any) -> list[Any]:
        """Return the values of tensors and arrays, including nested ones; none in a graph."""
        given = ModelCall.of(call).tensors
        if not tf.executing_eagerly() or any(isinstance(one, tf.TensorSpec | keras.KerasTensor) for one in given):
            return []
        return [np.asarray(one) for one in given]

    def room(self) -> int:
        """Return the maximum: only host memory is counted."""
        return sys.maxsize

    def styles(self) -> dict[str, Style]:
        """Return the styles of the sharded layers."""
        return styles_in(self._layers) | styles_of_numbers(self._model, self._layers)

    def check_layer(self, name: str, style: Style, axis: ParallelAxis) -> None:
        """Raise UsageError unless a layer can be sharded in a style over the ranks of an axis."""
        layer = self._layers[name]
        check_layers([(name, layer, style, find_layer(name, layer, style))], Divisibility(axis))


def _is_of_keras(layer: Any) -> bool:
    return type(layer).__module__.startswith("keras.") and not isinstance(layer, keras.layers.Lambda)


def known_call(model: Any) -> Any:
    """Return specs of the inputs of a functional or Sequential model; None for other models.

    Unknown lengths get arbitrary numbers.
    """
    if isinstance(model, keras.Sequential):
        given = model.inputs[0] if model.built and model.inputs else None
    else:
        given = getattr(model, "_inputs_struct", None)  # `inputs` lacks the keys of a dict
    return None if given is None else keras.tree.map_structure(_spec, given)


def _spec(one: Any) -> tf.TensorSpec:
    return tf.TensorSpec(concrete(one.shape), one.dtype)


class PlanCheck:
    """State shared by the sharded layers of a model: whether its plan was checked, and which callers are allowed."""

    def __init__(self, model: Any, axis: ParallelAxis, *, divided_output: bool) -> None:
        self._model, self.axis, self.divided_output = weakref.ref(model), axis, divided_output
        self._name = type(model).__name__
        self.warns = axis.rank == 0
        self.done = False
        """Whether the plan was checked, for one kind of call at least."""
        self.kinds = CallKinds()
        """The checked kinds of calls of the model."""
        self.is_checking = False
        self.in_pieces = False
        """A pipeline calls the layers, and has checked the plan."""
        self._is_changed = False
        """Layers were added to or removed from the model since its plan was checked."""
        self._callers: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()
        """Outermost layers that call these layers: the modes that are allowed, or the modes and layers."""
        self.warned: set[str] = set()
        """Warnings already issued."""

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Mark the model's run within the context as a check."""
        self.is_checking = True
        try:
            yield
        finally:
            self.is_checking = False

    def settle(self, *kinds: Hashable) -> None:
        """Record that the plan was checked, for calls of these kinds."""
        self.done = True
        for kind in kinds:
            self.kinds.settle(kind)

    def change(self) -> None:
        """Record that layers were added or removed: the model is checked again at its next call."""
        self._is_changed, self.kinds = True, CallKinds()
        self._callers.clear()

    def called(self, layers: Layers, args: tuple[Any, ...], options: Mapping[str, Any]) -> Callable[[], None] | None:
        """Check the plan before a call of the model, if it is the first of its kind.

        Collective in that case. Raises UsageError, each time. Returns a function to run if a call succeeds that failed
        in the check.
        """
        model = self._model()
        training = is_trained(options)
        kind = kind_of_call(training, args, options, autocast=getattr(model, "autocast", True))
        if self.is_checking or kind in self.kinds or model is None:
            return None
        if not self.kinds.too_many:
            if fails := _check(model, layers, self, ModelCall.within(model, args, options), training):
                if self.kinds.miss(kind) and self.warns and self.axis.size > 1 and _FAILED not in self.warned:
                    self.warned.add(_FAILED)
                    warnings.warn(describe_repeated_failure(self._name, fails), stacklevel=4)
                return functools.partial(self._warn_on_success, fails)
            self.settle(kind)
        elif self.warns and self.axis.size > 1 and _MANY not in self.warned:
            self.warned.add(_MANY)
            warnings.warn(describe_too_many_kinds(self._name, KINDS), stacklevel=4)
        return None

    def _warn_on_success(self, fails: str) -> None:
        """Warn that a call succeeded that had failed in the check."""
        if self.warns and self.axis.size > 1 and _FAILED not in self.warned:
            self.warned.add(_FAILED)
            warnings.warn(describe_failed_check(self._name, fails), stacklevel=5)

    def used(self, layer: Any) -> None:
        """Check the caller of a sharded layer, if it is another model made of the same layers.

        Callers that cannot be checked cause one warning. Collective for such a model. Raises UsageError, each time.
        """
        call = current_call()
        caller, model = layer if call is None else call.entry_layer, self._model()
        if self.is_checking or self.in_pieces or (caller is model and not self._is_changed):
            return
        trains = call is not None and bool(call.get_value("training"))
        if not {trains, (trains, id(layer))}.isdisjoint(self._callers.get(caller, ())):
            return
        if caller is not model and is_running(model):
            if self._is_changed and known_call(model) is not None:
                check_another(model, self.axis, training=trains)
            self._callers.setdefault(caller, set()).add((trains, id(layer)))
        elif known_call(caller) is not None:
            check_another(caller, self.axis, training=trains)
            self._callers.setdefault(caller, set()).add(trains)
        elif caller is model:
            pass  # the call hook handles the model's own calls
        elif recomputation() is Recomputation.AGAIN:
            pass  # a backward repeats what the model has called
        elif self.warns and not self.done:
            self.warns = False
            warnings.warn(describe_unchecked(self._name, layer.name), stacklevel=4)
        elif self.axis.rank == 0 and layer.name not in self.warned and gives_part(layer) and not self.divided_output:
            self.warned.add(layer.name)
            warnings.warn(describe_outside_call(self._name, layer.name), stacklevel=4)


_MANY, _FAILED = "too many kinds", "failed alone"


def check_stages(comm: Communicator, graph: Any) -> None:
    """Check the plan of sharded layers in a model that a pipeline calls stage by stage, unless it was checked already.

    graph: a functional model inside the sharded one. Collective over `comm`.
    """
    layers = layers_of(graph)
    if not styles_in(layers):
        return
    given = (getattr(layer, "plan_check", None) for layer in layers.values())
    every = [one for one in given if isinstance(one, PlanCheck)]
    left = [one for one in every if not one.done]
    for one in every:
        one.in_pieces = True
    axes = {one.axis.comm: one.axis for one in left}
    axis = next(iter(axes.values())) if len(axes) == 1 else None
    traced, warns = CheckedModel(graph, layers, axis), any(one.warns for one in left)
    call = known_call(graph)
    check_parts(comm, traced, call, checked=not left, divided_output=True, warns=warns, axis=axis)
    for one in left:
        one.settle()


def check_another(model: Any, axis: ParallelAxis, *, training: bool) -> None:
    """Check a functional model made of layers of a sharded model, at its first call. Collective over the axis."""
    layers = layers_of(model)
    checks = {id(one): one for layer in layers.values() if (one := getattr(layer, "plan_check", None)) is not None}
    try:
        with ExitStack() as stack:
            for one in checks.values():
                stack.enter_context(one.checking())
            stack.enter_context(isolate_call())
            traced = CheckedModel(model, layers, axis, training=training)
            divided_output = all(one.divided_output for one in checks.values())
            call = known_call(model)
            check_first_call(axis, traced, call, divided_output=divided_output, warns=axis.rank == 0)
    except UsageError as error:
        raise UsageError(f"{model.name}, made of layers of a sharded model: {error}") from error


def attach_check(model: Any, layers: Layers, axis: ParallelAxis, *, divided_output: bool) -> PlanCheck:
    """Attach the check state to the sharded layers of a model; its plan is not checked yet."""
    unchecked = PlanCheck(model, axis, divided_output=divided_output)
    for name in styles_in(layers):
        if getattr(layers[name], "plan_check", None) is None or not layers[name].plan_check.done:
            layers[name].plan_check = unchecked
    return unchecked


def check_at_calls(model: Any, layers: Layers, unchecked: PlanCheck, checked: Any) -> None:
    """Check a sharded model's plan at the first call of each kind.

    A model that was evaluated first may behave differently in training, or when called with a flag. checked: the
    arguments of an earlier check, in evaluation and in training; None if there was none.
    """
    if checked is not None:
        call = ModelCall.of(checked)
        unchecked.settle(*(kind_of_call(training, call.args, call.options) for training in (False, True)))
    hook_calls(model, functools.partial(unchecked.called, layers))


def _check(model: Any, layers: Layers, unchecked: PlanCheck, call: ModelCall, training: bool) -> str:
    """Check the plan for a call; return the error of the model's call as text, "" if it succeeded."""
    axis = unchecked.axis
    traced = CheckedModel(model, layers, axis, training=training)
    try:
        with unchecked.checking(), isolate_call():
            divided_output = unchecked.divided_output
            fails = check_first_call(axis, traced, call, divided_output=divided_output, warns=unchecked.warns)
        if unchecked.warns and traced.warn(stops=_FAILED not in unchecked.warned):
            unchecked.warned.add(_FAILED)
    except UsageError as error:
        raise UsageError(str(error)) from error  # Keras appends to the text: the class must take one argument
    return fails
