"""Optimizers of experts: record every optimizer that has made a step, because its state must move with the experts."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import keras

from commlib_tensorflow._keras_reduction import replace
from commlib_tensorflow.pipelines._updates import lists_of

_seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def watch_steps() -> None:
    """Record Keras optimizers when they make a step, or when their step is traced, from now on."""
    name = "_backend_apply_gradients"
    replace(next(kind for kind in keras.optimizers.Optimizer.__mro__ if name in vars(kind)), name, _wrap_apply)


def _wrap_apply(original: Any) -> Any:
    @functools.wraps(original)
    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> Any:
        if self not in _seen:
            _seen[self] = max(_seen.values(), default=0) + 1
        return original(self, grads, trainable_variables)

    return _backend_apply_gradients


def states_for(weight: Any, given: Any = None) -> Iterator[tuple[str, Any]]:
    """Yield (name, variable) of element-wise optimizer state of a weight, in the order of the optimizers' first steps.

    given: an optimizer that may not have made a step yet.
    """
    known: set[int] = set()
    every = [*sorted(_seen, key=lambda one: _seen[one]), *([] if given is None else inner_optimizers(given))]
    for optimizer in {id(one): one for one in every}.values():
        place = optimizer._trainable_variables_indices.get(optimizer._var_key(weight))
        for name, variables in sorted(lists_of(optimizer).items()) if place is not None else ():
            value = variables[place]
            if value is not None and id(value) not in known:
                known.add(id(value))
                yield f"{name.lstrip('_')} of {optimizer.__class__.__name__}", value


def inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer, or the one inside a loss-scaling one, and the inner optimizers that share its weights."""
    plain = getattr(optimizer, "inner_optimizer", optimizer)
    yield plain
    yield from getattr(plain, "_inner_optimizers", ())
