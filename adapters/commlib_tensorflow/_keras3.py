"""Distributed optimizers of Keras 3: where the reduction hooks in, and what of Keras has to know about it.

Keras calls `_clip_gradients` once for each real update: after it has added up the gradients of several passes, before
it clips. That is private, so there is a second way, by `apply`, for a Keras that has it no more; it reduces in every
pass.

Three things of Keras are replaced by what does the same for everybody else, and more for distributed optimizers:

- `LossScaleOptimizer.check_finite` agrees among the ranks. It decides whether the step is taken at all, by gradients
  that were not reduced yet: an overflow on one rank alone would send the ranks different ways, and hang them.
- `jit_compile` of models: a function that XLA compiles cannot call the host, so "auto" is False and True is refused.
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
from commlib.horovod.wrapping import PicklesAsPlain
from commlib_tensorflow._keras_reduction import (
    Distributed,
    DistributedKeras,
    Reduction,
    become,
    check_variables,
    key_of,
    replace,
)
from commlib_tensorflow._one_file import watch_checkpoints
from commlib_tensorflow.gradients import Maybe

NO_XLA = (
    "jit_compile=True does not go with a DistributedOptimizer: a function that XLA compiles cannot call the host, "
    "which reduces the gradients. Leave jit_compile out, or compile the layers alone with tf.function(jit_compile=True)"
)

NO_XLA_DIVIDED = (
    "jit_compile=True does not go with a model whose layers are divided among ranks: a function that XLA compiles "
    "cannot call the host, which moves tensors between them. Pass jit_compile=False to compile()"
)


class DistributedKeras3(PicklesAsPlain, DistributedKeras):
    """Add what optimizers of Keras 3 have besides: a pickle of one is plain, a copy of one is not."""

    def __copy__(self) -> Any:
        """Return another distributed optimizer, with what Keras copies of one: its settings."""
        function, arguments = self.__reduce_ex__(4)[:2]
        made = function(*arguments)
        made.__class__ = type(self)
        made._commlib_begin()
        return made

    def __deepcopy__(self, memo: Any) -> Any:
        """Return another distributed optimizer, with what Keras copies of one: its settings."""
        return self.__copy__()


class ReducesBeforeClipping(DistributedKeras3):
    """Reduces what `_clip_gradients` gets, once for each real update; outside of graphs what `apply` gets, if it may.

    So a gradient that is None here can be one that another rank has. Until that is known it is zeros, and if no rank
    has it, its variable is left alone.
    """

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Update variables with reduced gradients, as Keras does. Where only other ranks have one, it is zeros here."""
        self_: Any = self
        grads, reduction = list(grads), self._commlib
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        reduction.ran = reduction.given_reduced = reduction.are_reduced(grads)
        if reduction.size > 1:
            check_variables(with_gradients(self, grads, trainable_variables))
        if not (reduction.size == 1 or reduction.reducer.alone or reduction.ran):
            known = self_._trainable_variables if trainable_variables is None else trainable_variables
            if len(grads) == len(known) and self._knows(known):
                if tf.executing_eagerly() and not _accumulates(self) and self_.loss_scale_factor is None:
                    grads = self._reduced(grads, known)
                    reduction.given_reduced, reduction.ran = True, False  # until Keras clips them
                elif reduction.reducer.compressor is None:
                    grads = self._filled(grads, known)
        reduction.expected = with_gradients(self, grads, trainable_variables)
        try:
            super().apply(grads, trainable_variables)  # type: ignore[misc]
        finally:
            reduction.absent = {}
        if not reduction.ran and reduction.expected and not (_accumulates(self) and tf.executing_eagerly()):
            raise UsageError(
                f"{type(self).__name__}.apply() updates variables without calling _clip_gradients(), so its gradients "
                "were not reduced: leave this optimizer as it is and take the gradients from a DistributedGradientTape"
            )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a variable, if any rank has a gradient of it."""
        update = super().update_step  # type: ignore[misc]
        self._if_any(variable, lambda: update(gradient, variable, learning_rate))

    def _apply_weight_decay(self, variables: Any) -> None:
        decay, absent = super()._apply_weight_decay, self._commlib.absent  # type: ignore[misc]
        decay([variable for variable in variables if key_of(variable) not in absent] if absent else variables)
        for variable in variables if absent else ():
            if key_of(variable) in absent:
                self._if_any(variable, functools.partial(decay, [variable]))

    def _clip_gradients(self, grads: Any) -> Any:
        self_: Any = self
        reduction = self._commlib
        reduced = grads if reduction.given_reduced else self._reduced_or_zeros(grads)
        reduction.ran = True
        if self_.global_clipnorm and reduction.size > 1:
            return reduction.clip(reduced, reduction.expected, self_.global_clipnorm)
        return super()._clip_gradients(reduced)  # type: ignore[misc]

    def _knows(self, variables: Sequence[Any]) -> bool:
        """Return whether Keras will take gradients of these."""
        self_: Any = self
        if not self_.built:
            return True
        known = set(map(key_of, self_._trainable_variables))
        return all(key_of(variable) in known for variable in variables)

    def _filled(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """Return gradients with zeros for those that another rank may have; note of which variables they are."""
        reduction, filled = self._commlib, list(grads)
        places = [place for place in reduction.shared(variables) if grads[place] is None]
        for place in places:
            variable = variables[place]
            reduction.absent[key_of(variable)] = None
            filled[place] = tf.zeros(variable.shape, variable.dtype)
        if places:
            names = [getattr(variables[place], "path", None) or variables[place].name for place in places]
            warnings.warn(
                f"Gradients do not exist for variables {names} when minimizing the loss on this rank. They are zeros "
                "here, where another rank has them.",
                stacklevel=3,
            )
        return filled

    def _reduced_or_zeros(self, grads: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients of the expected variables; note which of the absent ones another rank has."""
        reduction, variables = self._commlib, self._commlib.expected
        absent = [place for place, variable in enumerate(variables) if key_of(variable) in reduction.absent]
        given, given_if = list(grads), {}
        for place in absent:
            was_there = _accumulates(self) and tf.reduce_any(tf.not_equal(grads[place], 0))  # in earlier passes
            if was_there is False or (tf.executing_eagerly() and not was_there):
                given[place] = None
            elif not tf.executing_eagerly():
                given_if[place] = was_there
        reduced = self._reduced(given, variables, given_if)
        for place in absent:
            one = reduced[place]
            if not isinstance(one, Maybe):
                one = Maybe(tf.zeros_like(grads[place]) if one is None else one, one is not None)
            reduced[place], reduction.absent[key_of(variables[place])] = one
        return reduced

    def _reduced(
        self, grads: Sequence[Any], variables: Sequence[Any], given_if: Mapping[int, Any] = MappingProxyType({})
    ) -> list[Any]:
        self_: Any = self
        # With the variables that are not asked for, which another rank must not either.
        everything = self_._trainable_variables if self_.built else variables
        places = [self_._get_variable_index(one) for one in variables] if self_.built else range(len(variables))
        gradients: list[Any] = [None] * len(everything)
        for place, gradient in zip(places, grads, strict=True):
            gradients[place] = gradient
        others = set(range(len(everything))).difference(places)
        given_if = {places[number]: condition for number, condition in given_if.items()}
        found = self._commlib.reduce(gradients, everything, strict=others, given_if=given_if)
        return [found[place] for place in places]

    def _if_any(self, variable: Any, do: Callable[[], None]) -> None:
        """Do something to a variable, if any rank has a gradient of it."""
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


class ReducesBeforeApplying(DistributedKeras3):
    """Reduces what `apply` gets, in every pass."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Update variables with reduced gradients, as Keras does."""
        self_: Any = self
        variables = list(self_._trainable_variables if trainable_variables is None else trainable_variables)
        grads = list(grads)
        reduced = grads if self._commlib.are_reduced(grads) else self._commlib.reduce(grads, variables)
        super().apply(reduced, trainable_variables)  # type: ignore[misc]


def distribute(optimizer: Any, reduction: Reduction, backward_passes_per_step: int) -> None:
    """Make an optimizer of Keras 3, or the one within a LossScaleOptimizer, reduce its gradients."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, Distributed):
        raise UsageError("this optimizer is a DistributedOptimizer already")
    if hasattr(inner, "optimizers"):
        raise UsageError(
            f"{type(inner).__name__} leaves all updates to the optimizers in it: make each of those distributed instead"
        )

    def prepare(one: Any) -> None:
        if backward_passes_per_step > 1:
            _accumulate(one, backward_passes_per_step)

    prepare(inner)  # which may refuse, and then nothing has changed
    become(inner, hook_of(type(inner)), reduction, prepare)
    _replace_in_keras()


def hook_of(plain: type) -> type[Distributed]:
    """Return how optimizers of this class are made to reduce."""
    return ReducesBeforeClipping if callable(getattr(plain, "_clip_gradients", None)) else ReducesBeforeApplying


def with_gradients(optimizer: Any, grads: list[Any], variables: list[Any] | None) -> list[Any]:
    """Return the variables that have a gradient, in order."""
    known = optimizer._trainable_variables if variables is None else variables
    return [variable for gradient, variable in zip(grads, known, strict=False) if gradient is not None]


def _accumulates(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "gradient_accumulation_steps", None))


def _accumulate(optimizer: Any, passes: int) -> None:
    """Let Keras add up the gradients of `passes` passes. It also divides by that, which `Reduction` may undo."""
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
            f"backward_passes_per_step={passes}: this optimizer has taken {int(optimizer.iterations)} steps already, "
            "and counts passes from now on: make it distributed before its first step"
        )
    optimizer.gradient_accumulation_steps = passes
    if optimizer.built:
        optimizer._accumulated_gradients = [
            optimizer.add_variable_from_reference(variable, name="gradient_accumulator")
            for variable in optimizer._trainable_variables
        ]


def is_distributed(model: Any) -> bool:
    """Say whether a model is trained with a distributed optimizer, possibly within a LossScaleOptimizer."""
    found = [value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)]
    return any(isinstance(getattr(optimizer, "inner_optimizer", optimizer), Distributed) for optimizer in found)


def never_compile(model: Any) -> None:
    """Let a model whose layers call the host refuse XLA from now on."""
    model._commlib_calls_host = True
    _replace_in_keras()


def _refusal(model: Any) -> str | None:
    """Return why a model cannot be compiled by XLA; None if it can."""
    if getattr(model, "_commlib_calls_host", False):
        return NO_XLA_DIVIDED
    return NO_XLA if is_distributed(model) else None


def _replace_in_keras() -> None:
    replace(keras.optimizers.LossScaleOptimizer, "check_finite", _agreeing)
    watch_checkpoints(keras.callbacks.ModelCheckpoint)
    for name, make in (("_resolve_auto_jit_compile", _resolving), ("jit_compile", _refusing)):
        # Private, and nothing is lost without: the function of the host refuses to be compiled, too, only later.
        owner = next((one for one in keras.Model.__mro__ if name in vars(one)), None)
        if owner is not None:
            replace(owner, name, make)


def _agreeing(original: Any) -> Any:
    @functools.wraps(original)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        inner = self.inner_optimizer
        return inner._commlib.agree_finite(finite) if isinstance(inner, Distributed) else finite

    return check_finite


def _resolving(original: Any) -> Any:
    @functools.wraps(original)
    def _resolve_auto_jit_compile(self: Any) -> bool:
        return _refusal(self) is None and bool(original(self))

    return _resolve_auto_jit_compile


def _refusing(original: Any) -> Any:
    def get(self: Any) -> Any:
        return original.fget(self)

    def set_(self: Any, value: Any) -> None:
        if value and (why := _refusal(self)) is not None:
            raise UsageError(why)
        original.fset(self, value)

    return property(get, set_, original.fdel, original.__doc__)
