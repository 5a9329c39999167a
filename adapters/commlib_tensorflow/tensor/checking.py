"""Checking: hold a plan of a Keras model against the rules, before it is divided or at its first call."""

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
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.checks.checks import (
    called_outside,
    check_first_call,
    check_parts,
    failed_again,
    failed_alone,
    not_checked,
    too_many_kinds,
)
from commlib.tensor_parallel.checks.guide import Guide
from commlib.tensor_parallel.checks.kinds import KINDS, Kinds
from commlib.tensor_parallel.checks.runs import Outputs, Run
from commlib.tensor_parallel.checks.seen_weights import seen_weights
from commlib.tensor_parallel.run.division import Division
from commlib.tensor_parallel.styles import Style
from commlib.tensor_parallel.trace import Trace
from commlib_tensorflow._again import Recomputation, recomputation
from commlib_tensorflow.tensor._apart import apart
from commlib_tensorflow.tensor._call_context import call_of_its_own, current_call, is_running
from commlib_tensorflow.tensor._calls import Call, is_trained, kind_of_call
from commlib_tensorflow.tensor._divided import gives_part
from commlib_tensorflow.tensor._forward import can_run_whole, forward
from commlib_tensorflow.tensor._hearing import hear_calls
from commlib_tensorflow.tensor._numbers import styles_of_numbers
from commlib_tensorflow.tensor._runs import ran
from commlib_tensorflow.tensor._weights import divided_weights
from commlib_tensorflow.tensor.layers import check_layers, find_layer
from commlib_tensorflow.tensor.names import layers_of
from commlib_tensorflow.tensor.tracing import Layers, attempted, concrete, styles_in


class Traced:
    """A model of Keras for `commlib.tensor_parallel.checks.checks`: a call is one value, or a `Call`, or specs of that.

    training: it is called so. Its numbers are, too, unless it draws random ones then.
    """

    def __init__(self, model: Any, layers: Layers, axis: Axis | None = None, *, training: bool = False) -> None:
        self._model, self._layers, self._axis, self._training = model, layers, axis, training
        self._size = 1 if axis is None else axis.size
        self._hidden: list[str] = []
        self._eager: list[str] = []
        self._stopped: UsageError | None = None
        self._stands_in = True

    def attempt(self, call: Any, styles: Collection[str]) -> tuple[Trace, Exception | None]:
        """Return the model's trace."""
        weights = seen_weights(divided_weights(self._layers, styles, self._size))
        trace, error = attempted(
            self._model, self._layers, call, styles, self._hidden,
            eager=self._eager, training=self._training, weights=weights,
        )  # fmt: skip
        self._stopped = error if isinstance(error, UsageError) else None
        return trace, error

    def trains_alike(self, trace: Trace, call: Any, styles: Collection[str]) -> bool:
        """Return whether the model does in training what it does in evaluation: `trace`, for a call and styles.

        So it does if nobody but Keras has written it, or where it cannot be called so: then it cannot be trained.
        """
        if self.is_of_keras:
            return True
        weights = seen_weights(divided_weights(self._layers, styles, self._size))
        trained, error = attempted(self._model, self._layers, call, styles, training=True, weights=weights)
        self._stopped = error if isinstance(error, UsageError) else None
        return error is not None or (trained.steps, trained.kept) == (trace.steps, trace.kept)

    @property
    def is_of_keras(self) -> bool:
        """Whether nobody but Keras has written the model."""
        return all(_is_of_keras(layer) for layer in (self._model, *self._layers.values()))

    def warn(self, *, stops: bool = True) -> bool:
        """Warn of layers that the rules have not seen, and of a call that they could not follow to its end, once.

        stops: also of this one. Return whether there was one.
        """
        said, self._stopped = self._stopped, None
        if said is not None and stops:
            warnings.warn(f"{said}", stacklevel=3)
        if self._eager:
            line, self._eager = self._eager[0], []
            warnings.warn(
                f"plan: {type(self._model).__name__} asks whether it runs eagerly at {line}, and its plan is checked "
                "in a graph, with verify= and example=, too: let it go one way, or call it in a graph, as fit does",
                stacklevel=3,
            )
        if self._hidden:
            names, self._hidden = ", ".join(dict.fromkeys(self._hidden)), []
            warnings.warn(
                f"plan: {names} run in a loop, a branch or a function of TensorFlow, which the rules cannot look into: "
                "give verify=, which compares numbers",
                stacklevel=3,
            )
        return said is not None

    def run(self, call: Any, styles: Collection[str], outputs: Outputs) -> Run:
        """Run the model forward and backward."""
        return ran(self._model, self._layers, call, styles, outputs)

    def forward(self, call: Any, styles: Mapping[str, Style], guide: Guide | None, *, evaluate: bool) -> Run | None:
        """Run the model forward, as a whole or as one rank. Collective.

        Weights that are zeros have other numbers for that, unless the whole fails with them, or gives no numbers.
        """
        if self._axis is None or not can_run_whole(self._layers, self._axis):
            return None
        training = self._training and not evaluate
        run = functools.partial(forward, self._model, self._layers, self._axis, call, styles, guide, training=training)
        found = run(stands_in=self._stands_in)
        if guide is None and self._stands_in:
            works = found.is_finite or not found.zeros
            self._stands_in = all(self._axis.comm.all_gather_object(works))
            found = found if self._stands_in else run(stands_in=False)
        return found

    def apart(self, call: Any, dims: Mapping[int, int], *, is_part: bool) -> tuple[Any, Any] | None:
        """Return the call of the whole, and that of this rank with its parts. Collective."""
        return None if self._axis is None else apart(self._axis, Call.of(call), dims, is_part=is_part)

    def given(self, call: Any) -> list[Any]:
        """Return the values of tensors and arrays, also of those within structures; none in a graph."""
        given = Call.of(call).tensors
        if not tf.executing_eagerly() or any(isinstance(one, tf.TensorSpec | keras.KerasTensor) for one in given):
            return []
        return [np.asarray(one) for one in given]

    def room(self) -> int:
        """Return any number: only the host's memory is counted."""
        return sys.maxsize

    def styles(self) -> dict[str, Style]:
        """Return the styles of the layers that are divided."""
        return styles_in(self._layers) | styles_of_numbers(self._model, self._layers)

    def check_layer(self, name: str, style: Style, axis: Axis) -> None:
        """Raise UsageError unless a layer can be divided in a style among the ranks of an axis."""
        layer = self._layers[name]
        check_layers([(name, layer, style, find_layer(name, layer, style))], Division(axis))


def _is_of_keras(layer: Any) -> bool:
    return type(layer).__module__.startswith("keras.") and not isinstance(layer, keras.layers.Lambda)


def known_call(model: Any) -> Any:
    """Return specs of what a functional or Sequential model is called with; None for other models.

    Lengths that the model leaves open get some number.
    """
    if isinstance(model, keras.Sequential):
        given = model.inputs[0] if model.built and model.inputs else None
    else:
        given = getattr(model, "_inputs_struct", None)  # `inputs` has lost the names of a dict
    return None if given is None else keras.tree.map_structure(_spec, given)


def _spec(one: Any) -> tf.TensorSpec:
    return tf.TensorSpec(concrete(one.shape), one.dtype)


class Unchecked:
    """What the divided layers of a model have: whether its plan was checked, and by what they may be called."""

    def __init__(self, model: Any, axis: Axis, *, divided_output: bool) -> None:
        self._model, self.axis, self.divided_output = weakref.ref(model), axis, divided_output
        self._name = type(model).__name__
        self.warns = axis.rank == 0
        self.done = False
        """The plan was checked, for one kind of call at least."""
        self.kinds = Kinds()
        """Of calls of the model."""
        self.is_checking = False
        self.in_pieces = False
        """A pipeline calls the layers, which has checked that."""
        self._is_changed = False
        """Layers have come into the model, or have gone, since its plan was checked."""
        self._callers: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()
        """Outermost layers that call some of these, and in which modes they may, or in which mode which of these."""
        self.told: set[str] = set()
        """What users were told of: once is enough."""

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Let the model be run to check it."""
        self.is_checking = True
        try:
            yield
        finally:
            self.is_checking = False

    def settle(self, *kinds: Hashable) -> None:
        """Note that the plan was checked, for calls of these kinds."""
        self.done = True
        for kind in kinds:
            self.kinds.settle(kind)

    def change(self) -> None:
        """Hear that layers come into the model, or go: it is checked again when it is called."""
        self._is_changed, self.kinds = True, Kinds()
        self._callers.clear()

    def called(self, layers: Layers, args: tuple[Any, ...], options: Mapping[str, Any]) -> Callable[[], None] | None:
        """Hear that the model is called: check its plan for this call, before it, if that is the first of its kind.

        Collective then. Raises UsageError, each time. Returns who wants to hear if the call goes on, which has failed.
        """
        model = self._model()
        training = is_trained(options)
        kind = kind_of_call(training, args, options, autocast=getattr(model, "autocast", True))
        if self.is_checking or kind in self.kinds or model is None:
            return None
        if not self.kinds.too_many:
            if fails := _check(model, layers, self, Call.within(model, args, options), training):
                if self.kinds.miss(kind) and self.warns and self.axis.size > 1 and _FAILED not in self.told:
                    self.told.add(_FAILED)
                    warnings.warn(failed_again(self._name, fails), stacklevel=4)
                return functools.partial(self._went_on, fails)
            self.settle(kind)
        elif self.warns and self.axis.size > 1 and _MANY not in self.told:
            self.told.add(_MANY)
            warnings.warn(too_many_kinds(self._name, KINDS), stacklevel=4)
        return None

    def _went_on(self, fails: str) -> None:
        """Hear that a call goes on that has failed when it was looked at."""
        if self.warns and self.axis.size > 1 and _FAILED not in self.told:
            self.told.add(_FAILED)
            warnings.warn(failed_alone(self._name, fails), stacklevel=5)

    def used(self, layer: Any) -> None:
        """Hear that a divided layer is used: check what calls it, if that is another model made of the same layers.

        What cannot be checked is warned of, once. Collective for such a model. Raises UsageError, each time.
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
            pass  # which hears of its calls itself
        elif recomputation() is Recomputation.AGAIN:
            pass  # a backward calls what the model has called
        elif self.warns and not self.done:
            self.warns = False
            warnings.warn(not_checked(self._name, layer.name), stacklevel=4)
        elif self.axis.rank == 0 and layer.name not in self.told and gives_part(layer) and not self.divided_output:
            self.told.add(layer.name)
            warnings.warn(called_outside(self._name, layer.name), stacklevel=4)


_MANY, _FAILED = "too many kinds", "failed alone"


def check_stages(comm: Communicator, graph: Any) -> None:
    """Check the plan of the divided layers of a model that a pipeline calls part by part, if nobody has yet.

    graph: a functional model, which is within the one that was divided. Collective over `comm`.
    """
    layers = layers_of(graph)
    if not styles_in(layers):
        return
    given = (getattr(layer, "plan_check", None) for layer in layers.values())
    every = [one for one in given if isinstance(one, Unchecked)]
    left = [one for one in every if not one.done]
    for one in every:
        one.in_pieces = True
    axes = {one.axis.comm: one.axis for one in left}
    axis = next(iter(axes.values())) if len(axes) == 1 else None
    traced, warns = Traced(graph, layers, axis), any(one.warns for one in left)
    call = known_call(graph)
    check_parts(comm, traced, call, checked=not left, divided_output=True, warns=warns, axis=axis)
    for one in left:
        one.settle()


def check_another(model: Any, axis: Axis, *, training: bool) -> None:
    """Check a functional model, made of layers of one that is divided, at its first call. Collective over the axis."""
    layers = layers_of(model)
    checks = {id(one): one for layer in layers.values() if (one := getattr(layer, "plan_check", None)) is not None}
    try:
        with ExitStack() as stack:
            for one in checks.values():
                stack.enter_context(one.checking())
            stack.enter_context(call_of_its_own())
            traced = Traced(model, layers, axis, training=training)
            divided_output = all(one.divided_output for one in checks.values())
            call = known_call(model)
            check_first_call(axis, traced, call, divided_output=divided_output, warns=axis.rank == 0)
    except UsageError as error:
        raise UsageError(f"{model.name}, made of layers of a divided model: {error}") from error


def watched(model: Any, layers: Layers, axis: Axis, *, divided_output: bool) -> Unchecked:
    """Let the divided layers of a model hear by what they are called; its plan is not checked yet."""
    unchecked = Unchecked(model, axis, divided_output=divided_output)
    for name in styles_in(layers):
        if getattr(layers[name], "plan_check", None) is None or not layers[name].plan_check.done:
            layers[name].plan_check = unchecked
    return unchecked


def check_at_calls(model: Any, layers: Layers, unchecked: Unchecked, checked: Any) -> None:
    """Check a divided model's plan when it is called for the first time, and at the first call of each other kind.

    A model that was evaluated first may do other things when it is trained, or when it is called with a flag. checked:
    what it was called with when it was checked, in evaluation and in training; None if it was not.
    """
    if checked is not None:
        call = Call.of(checked)
        unchecked.settle(*(kind_of_call(training, call.args, call.options) for training in (False, True)))
    hear_calls(model, functools.partial(unchecked.called, layers))


def _check(model: Any, layers: Layers, unchecked: Unchecked, call: Call, training: bool) -> str:
    """Check the plan for a call; return with what the model fails then, if it does."""
    axis = unchecked.axis
    traced = Traced(model, layers, axis, training=training)
    try:
        with unchecked.checking(), call_of_its_own():
            divided_output = unchecked.divided_output
            fails = check_first_call(axis, traced, call, divided_output=divided_output, warns=unchecked.warns)
        if unchecked.warns and traced.warn(stops=_FAILED not in unchecked.told):
            unchecked.told.add(_FAILED)
    except UsageError as error:
        raise UsageError(str(error)) from error  # Keras adds to its text, and needs a class that takes that alone
    return fails
