"""Distributed optimizers of Keras 3: where the reduction hooks in, and what of Keras has to know about it.

Keras calls `_clip_gradients` once for each real update: after it has added up the gradients of several passes, before
it clips. That is private, so there is a second way, by `apply`, for a Keras that has it no more; it reduces in every
pass.

Two things of Keras are replaced by what does the same for everybody else, and more for distributed optimizers:

- `LossScaleOptimizer.check_finite` agrees among the ranks. It decides whether the step is taken at all, by gradients
  that were not reduced yet: an overflow on one rank alone would send the ranks different ways, and hang them.
- `jit_compile` of models: a function that XLA compiles cannot call the host, so "auto" is False and True is refused.
"""

from __future__ import annotations

import functools
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
    replace,
)

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
    """Reduces what `_clip_gradients` gets: once for each real update."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Update variables with reduced gradients, as Keras does."""
        grads, reduction = list(grads), self._commlib
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        reduction.expected = with_gradients(self, grads, trainable_variables)
        if reduction.size > 1:
            check_variables(reduction.expected)
        reduction.ran = reduction.given_reduced = reduction.are_reduced(grads)
        super().apply(grads, trainable_variables)  # type: ignore[misc]
        if not reduction.ran and reduction.expected and not (_accumulates(self) and tf.executing_eagerly()):
            raise UsageError(
                f"{type(self).__name__}.apply() updates variables without calling _clip_gradients(), so its gradients "
                "were not reduced: leave this optimizer as it is and take the gradients from a DistributedGradientTape"
            )

    def _clip_gradients(self, grads: Any) -> Any:
        self_: Any = self
        reduced = grads if self._commlib.given_reduced else self._reduced(grads)
        if self_.global_clipnorm and self._commlib.size > 1:
            return self._commlib.clip(reduced, self._commlib.expected, self_.global_clipnorm)
        return super()._clip_gradients(reduced)  # type: ignore[misc]

    def _reduced(self, grads: Any) -> list[Any]:
        self_: Any = self
        everything = self_._trainable_variables
        places = [self_._get_variable_index(variable) for variable in self._commlib.expected]
        # With the variables that have no gradient: another rank may have one for them.
        gradients: list[Any] = [None] * len(everything)
        for place, gradient in zip(places, grads, strict=True):
            gradients[place] = gradient
        everything_reduced = self._commlib.reduce(gradients, everything)
        return [everything_reduced[place] for place in places]


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
