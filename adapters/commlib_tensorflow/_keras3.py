"""Distributed optimizers of Keras 3: the hooks for the reduction, and the changes to Keras that it needs.

Keras calls `_clip_gradients` once for each update: after it has summed the gradients of several passes, before it
clips. The method is private, so for a Keras without it there is a second hook, in `apply`, which reduces in every pass.

Three functions of Keras are replaced. They behave as before for other optimizers, and do more for distributed ones:
- `LossScaleOptimizer.check_finite` agrees among the ranks. It decides whether to take the step, from gradients that are
not reduced yet: an overflow on one rank alone would make that rank skip the step, and hang the others.
- `jit_compile` of models: a function that XLA compiles cannot call the host, so "auto" becomes False and True is
refused.
- `ModelCheckpoint` warns where ranks may write one file: see `_one_file`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from commlib.errors import UsageError
from commlib.horovod.wrapping import PlainPickling
from commlib_tensorflow._checkpoint_files import watch_checkpoints
from commlib_tensorflow._gradient_tensors import OptionalGradient
from commlib_tensorflow._keras_reduction import (
    DistributedKeras,
    DistributedMixin,
    KerasGradients,
    become,
    check_momentum,
    check_variables,
    key_of,
    replace,
)

NO_XLA = (
    "jit_compile=True does not work with a DistributedOptimizer: a function that XLA compiles cannot call the host, "
    "which reduces the gradients. Leave jit_compile out, or compile the layers alone with tf.function(jit_compile=True)"
)

NO_XLA_DIVIDED = (
    "jit_compile=True does not work with a model whose layers are sharded over ranks: a function that XLA compiles "
    "cannot call the host, which moves tensors between ranks. Pass jit_compile=False to compile()"
)


class DistributedKeras3(PlainPickling, DistributedKeras):
    """Optimizer of Keras 3: its pickle is a plain optimizer, its copy a distributed one."""

    def __copy__(self) -> Any:
        """Return another distributed optimizer with the settings that Keras copies."""
        function, arguments = self.__reduce_ex__(4)[:2]
        copied = function(*arguments)
        copied.__class__ = type(self)
        copied._commlib_begin()
        return copied

    def __deepcopy__(self, memo: Any) -> Any:
        """Return another distributed optimizer with the settings that Keras copies."""
        return self.__copy__()


class ClipHook(DistributedKeras3):
    """Reduces in `_clip_gradients`, once for each update; outside of graphs in `apply`, if possible.

    Another rank may have a gradient that is None here. Until that is known the gradient is zeros; if no rank has it,
    its variable is not changed.
    """

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Update variables with reduced gradients, as Keras does. A gradient only on other ranks is zeros here."""
        self_: Any = self
        grads, reduction = list(grads), self._commlib
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        known = self_._trainable_variables if trainable_variables is None else trainable_variables
        check_momentum(self, reduction.reducer.options.compression)
        reduction.ran = reduction.given_reduced = reduction.are_reduced(grads)
        if not reduction.reducer.alone:
            check_variables(grads, known)
            if not reduction.ran and len(grads) == len(known) and self._has_all(known):
                if tf.executing_eagerly() and not _has_accumulation(self) and self_.loss_scale_factor is None:
                    grads = self._reduce(grads, known)
                    reduction.given_reduced, reduction.ran = True, False  # until Keras clips them
                elif reduction.reducer.compressor is None:
                    grads = self._fill_missing(grads, known)
        reduction.expected = with_gradients(grads, known)
        try:
            super().apply(grads, trainable_variables)  # type: ignore[misc]
        finally:
            reduction.absent = {}
        if not reduction.ran and reduction.expected and not (_has_accumulation(self) and tf.executing_eagerly()):
            raise UsageError(
                f"{type(self).__name__}.apply() updates variables without calling _clip_gradients(), so its gradients "
                "were not reduced: leave this optimizer undistributed and take gradients from a DistributedGradientTape"
            )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a variable, if any rank has a gradient for it."""
        update = super().update_step  # type: ignore[misc]
        if not self._commlib.absent:
            update(gradient, variable, learning_rate)
            return
        self._if_any_rank(variable, lambda: update(gradient, variable, learning_rate))

    def _apply_weight_decay(self, variables: Any) -> None:
        decay, absent = super()._apply_weight_decay, self._commlib.absent  # type: ignore[misc]
        decay([variable for variable in variables if key_of(variable) not in absent] if absent else variables)
        for variable in variables if absent else ():
            if key_of(variable) in absent:
                self._if_any_rank(variable, functools.partial(decay, [variable]))

    def _clip_gradients(self, grads: Any) -> Any:
        self_: Any = self
        reduction = self._commlib
        reduced = grads if reduction.given_reduced else self._reduce_or_zero(grads)
        reduction.ran = True
        if self_.global_clipnorm and reduction.size > 1:
            return reduction.clip(reduced, reduction.expected, self_.global_clipnorm)
        return super()._clip_gradients(reduced)  # type: ignore[misc]

    def _has_all(self, variables: Sequence[Any]) -> bool:
        """Return whether Keras will accept gradients of these variables."""
        self_: Any = self
        if not self_.built or list(map(id, variables)) == list(map(id, self_._trainable_variables)):
            return True
        known = set(map(key_of, self_._trainable_variables))
        return all(key_of(variable) in known for variable in variables)

    def _fill_missing(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """Return gradients with zeros for those that another rank may have; record their variables as absent."""
        reduction, filled = self._commlib, list(grads)
        places = [place for place in reduction.shared(variables) if grads[place] is None]
        for place in places:
            variable = variables[place]
            reduction.absent[key_of(variable)] = None
            filled[place] = tf.zeros(variable.shape, variable.dtype)
        if places:
            names = [getattr(variables[place], "path", None) or variables[place].name for place in places]
            warnings.warn(
                f"Gradients do not exist for variables {names} when minimizing the loss on this rank. They count as "
                "zeros where another rank has them.",
                stacklevel=3,
            )
        return filled

    def _reduce_or_zero(self, grads: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients of the expected variables; record which of the absent ones another rank has."""
        reduction, variables = self._commlib, self._commlib.expected
        absent = [place for place, variable in enumerate(variables) if key_of(variable) in reduction.absent]
        given, given_if = list(grads), {}
        for place in absent:
            was_there = _has_accumulation(self) and tf.reduce_any(tf.not_equal(grads[place], 0))  # in earlier passes
            if was_there is False or (tf.executing_eagerly() and not was_there):
                given[place] = None
            elif not tf.executing_eagerly():
                given_if[place] = was_there
        reduced = self._reduce(given, variables, given_if)
        for place in absent:
            one = reduced[place]
            if not isinstance(one, OptionalGradient):
                one = OptionalGradient(tf.zeros_like(grads[place]) if one is None else one, one is not None)
            reduced[place], reduction.absent[key_of(variables[place])] = one
        return reduced

    def _reduce(
        self, grads: Sequence[Any], variables: Sequence[Any], given_if: Mapping[int, Any] = MappingProxyType({})
    ) -> list[Any]:
        self_: Any = self
        everything = self_._trainable_variables if self_.built else variables
        if not given_if and list(map(id, variables)) == list(map(id, everything)):
            return self._commlib.reduce(grads, everything, strict=())
        # Include the other variables of the optimizer: no rank may have a gradient for them.
        places = [self_._get_variable_index(one) for one in variables] if self_.built else range(len(variables))
        gradients: list[Any] = [None] * len(everything)
        for place, gradient in zip(places, grads, strict=True):
            gradients[place] = gradient
        others = set(range(len(everything))).difference(places)
        given_if = {places[number]: condition for number, condition in given_if.items()}
        reduced = self._commlib.reduce(gradients, everything, strict=others, given_if=given_if)
        return [reduced[place] for place in places]

    def _if_any_rank(self, variable: Any, do: Callable[[], None]) -> None:
        """Call `do` for a variable, if any rank has a gradient for it."""
        absent = self._commlib.absent
        exists = absent.get(key_of(variable), True) if absent else True

        def done() -> Any:
            do()
            return tf.constant(0)

        if isinstance(exists, bool):
            if exists:
                do()
        else:
            tf.cond(exists, done, lambda: tf.constant(0))


class ApplyHook(DistributedKeras3):
    """Reduces in `apply`, in every pass."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Update variables with reduced gradients, as Keras does."""
        self_: Any = self
        check_momentum(self, self._commlib.reducer.options.compression)
        variables = list(self_._trainable_variables if trainable_variables is None else trainable_variables)
        grads = list(grads)
        reduced = grads if self._commlib.are_reduced(grads) else self._commlib.reduce(grads, variables)
        super().apply(reduced, trainable_variables)  # type: ignore[misc]


def distribute(optimizer: Any, reduction: KerasGradients, backward_passes_per_step: int) -> None:
    """Make an optimizer of Keras 3, or the one within a LossScaleOptimizer, reduce its gradients."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, DistributedMixin):
        raise UsageError("this optimizer is a DistributedOptimizer already")
    if hasattr(inner, "optimizers"):
        raise UsageError(
            f"{type(inner).__name__} leaves all updates to the optimizers in it: make each of those distributed instead"
        )

    def prepare(one: Any) -> None:
        if backward_passes_per_step > 1:
            _accumulate(one, backward_passes_per_step)

    prepare(inner)  # it may raise, and then nothing has changed
    become(inner, hook_of(type(inner)), reduction, prepare)
    _replace_in_keras()


def hook_of(plain: type) -> type[DistributedMixin]:
    """Return the class that makes optimizers of class `plain` reduce."""
    return ClipHook if callable(getattr(plain, "_clip_gradients", None)) else ApplyHook


def with_gradients(grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Return the variables that have a gradient, in order."""
    return [variable for gradient, variable in zip(grads, variables, strict=False) if gradient is not None]


def _has_accumulation(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "gradient_accumulation_steps", None))


def _accumulate(optimizer: Any, passes: int) -> None:
    """Let Keras sum the gradients of `passes` passes.

    Keras also divides by `passes`, which `KerasGradients` may undo.
    """
    if not hasattr(optimizer, "gradient_accumulation_steps"):
        raise UsageError("backward_passes_per_step needs a Keras whose optimizers have gradient_accumulation_steps")
    given = optimizer.gradient_accumulation_steps
    if given:
        if given != passes:
            raise UsageError(
                f"backward_passes_per_step={passes} contradicts gradient_accumulation_steps={given} of the optimizer: "
                "give one of them"
            )
        return
    if optimizer.built and int(optimizer.iterations) > 0:
        raise UsageError(
            f"backward_passes_per_step={passes}: this optimizer has already taken {int(optimizer.iterations)} steps, "
            "and passes are counted from now on: make it distributed before its first step"
        )
    optimizer.gradient_accumulation_steps = passes
    if optimizer.built:
        optimizer._accumulated_gradients = [
            optimizer.add_variable_from_reference(variable, name="gradient_accumulator")
            for variable in optimizer._trainable_variables
        ]


def is_distributed(model: Any) -> bool:
    """Return whether a model is trained with a distributed optimizer, possibly within a LossScaleOptimizer."""
    optimizers = [value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)]
    return any(
        isinstance(getattr(optimizer, "inner_optimizer", optimizer), DistributedMixin) for optimizer in optimizers
    )


def never_compile(model: Any) -> None:
    """Make a model whose layers call the host refuse XLA from now on."""
    model._commlib_calls_host = True
    _replace_in_keras()


def _refusal(model: Any) -> str | None:
    """Return why XLA cannot compile a model; None if it can."""
    if getattr(model, "_commlib_calls_host", False):
        return NO_XLA_DIVIDED
    return NO_XLA if is_distributed(model) else None


def _replace_in_keras() -> None:
    replace(keras.optimizers.LossScaleOptimizer, "check_finite", _wrap_check_finite)
    watch_checkpoints(keras.callbacks.ModelCheckpoint)
    for name, make in (("_resolve_auto_jit_compile", _wrap_resolve_jit), ("jit_compile", _wrap_jit_setter)):
        # Private. If Keras lacks them, the host function itself refuses to be compiled, only later.
        owner = next((one for one in keras.Model.__mro__ if name in vars(one)), None)
        if owner is not None:
            replace(owner, name, make)


def _wrap_check_finite(original: Any) -> Any:
    @functools.wraps(original)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        inner = self.inner_optimizer
        return inner._commlib.agree_finite(finite) if isinstance(inner, DistributedMixin) else finite

    return check_finite


def _wrap_resolve_jit(original: Any) -> Any:
    @functools.wraps(original)
    def _resolve_auto_jit_compile(self: Any) -> bool:
        return _refusal(self) is None and bool(original(self))

    return _resolve_auto_jit_compile


def _wrap_jit_setter(original: Any) -> Any:
    def get(self: Any) -> Any:
        return original.fget(self)

    def set_(self: Any, value: Any) -> None:
        if value and (why := _refusal(self)) is not None:
            raise UsageError(why)
        original.fset(self, value)

    return property(get, set_, original.fdel, original.__doc__)
