"""States: what optimizers of Keras keep for weights of experts, by the names of files: see `commlib.expert.checkpoint`.

A file has what Keras keeps as it is; what PyTorch keeps, too, has the names of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.expert.checkpoint import FIRST, LARGEST, SECOND, UPDATE, momentum
from commlib_tensorflow.expert._keepers import within
from commlib_tensorflow.pipelines._updates import lists_of, singles_of

_COMMON: tuple[tuple[type, Mapping[str, str]], ...] = (
    (keras.optimizers.Adam, {"_momentums": FIRST, "_velocities": SECOND, "_velocity_hats": LARGEST}),
    (keras.optimizers.SGD, {"momentums": UPDATE}),
)
_OF_ALL = {"_model_variables_moving_average": "keras.average"}
_LEFT_OUT = ("_iterations", "_learning_rate", "_accumulated_gradients")


class States:
    """What an optimizer keeps for weights. Raises UsageError for one that cannot be saved, or read, now.

    verb: for errors.
    """

    def __init__(self, verb: str, optimizer: Any) -> None:
        every = list(within(optimizer)) if optimizer is not None else []
        self._all = [one for one in every if one is every[0] or one.built]  # those within may have no weights
        for one in self._all:
            _check(verb, one)

    @property
    def name(self) -> str:
        """The class of the optimizer, for errors."""
        return ", ".join(f"this {one.__class__.__name__}" for one in self._leaves)

    @property
    def is_there(self) -> bool:
        """Whether there is an optimizer."""
        return bool(self._all)

    @property
    def _leaves(self) -> list[Any]:
        """Those that update weights, and not only hand them on to others."""
        return [one for one in self._all if not getattr(one, "_inner_optimizers", ())]

    def of(self, variable: Any) -> dict[str, Any]:
        """Return the variables that are kept for one, by their names."""
        found: dict[str, Any] = {}
        for one, place in self._places(variable):
            kept = {name: variables[place] for name, variables in lists_of(one).items()}
            for name, value in {**singles_of(one), **kept}.items():
                if name not in _LEFT_OUT and value is not None:
                    found[_named(one, name)] = value
        return found

    def step(self, variable: Any) -> Array | None:
        """Return how often a weight was updated; None without an optimizer of it."""
        for one, _ in self._places(variable):
            return np.array(int(one.iterations), np.int64)
        return None

    def going_on(self, steps: set[int]) -> Iterator[tuple[Any, Any]]:
        """Yield (variable, value) of counts that let the optimizer go on from a step: none, without one in a file."""
        if len(steps) > 1:
            raise UsageError(
                f"load_experts: weights were updated {min(steps)} to {max(steps)} times, and optimizers of Keras count "
                "once for all of them: give no optimizer, and begin anew"
            )
        for one in self._all if steps else ():
            leaves = [one] if one in self._leaves else self._leaves
            yield one._iterations, max(_raw(leaf, *steps) for leaf in leaves)
            for accumulated in lists_of(one).get("_accumulated_gradients", ()):
                if accumulated is not None:
                    yield accumulated, np.zeros(accumulated.shape, accumulated.dtype)

    def value(self, layer: Mapping[str, Array], name: str, key: str, variable: Any, steps: set[int]) -> Array:
        """Return what a file has for a weight's `key`, as the optimizer keeps it."""
        if key != UPDATE:
            return layer[f"{name}/{key}"]
        ((one, _),) = self._places(variable)
        return momentum(layer, name, UPDATE, _rate(one, *steps))

    def _places(self, variable: Any) -> Iterator[tuple[Any, int]]:
        """Yield the optimizer that updates a weight, and the weight's place there."""
        for one in self._leaves:
            place = one._trainable_variables_indices.get(one._var_key(variable))
            if place is not None:
                yield one, place
                return


def _check(verb: str, one: Any) -> None:
    kind = one.__class__.__name__
    if not one.built and verb == "save_experts":
        return  # it keeps nothing yet
    if not one.built:
        raise UsageError(
            f"{verb}: this {kind} has not been built: call optimizer.build(model.trainable_variables), or give none"
        )
    passes = one.gradient_accumulation_steps
    if verb == "save_experts" and passes and (done := int(one._iterations) % passes):
        raise UsageError(
            f"{verb}: this {kind} has added up {done} of {passes} passes (gradient_accumulation_steps): what is added "
            "up so far is each rank's own: save after the last pass of a step"
        )
    known = {id(v) for v in [*singles_of(one).values(), *(v for own in lists_of(one).values() for v in own)]}
    if unknown := [variable.path for variable in one._variables if id(variable) not in known]:
        raise UsageError(
            f"{verb}: this {kind} keeps {unknown[0]!r} neither as an attribute nor in a list with one for each weight, "
            "so it is not known of which weight it is: give no optimizer"
        )


def _named(optimizer: Any, attribute: str) -> str:
    if attribute in _OF_ALL:
        return _OF_ALL[attribute]
    for kind, names in _COMMON:
        if isinstance(optimizer, kind) and attribute in names:
            return names[attribute]
    return f"keras.{optimizer.__class__.__name__}.{attribute.lstrip('_')}"


def _raw(optimizer: Any, steps: int) -> int:
    """Return what an optimizer counts, which are passes, after so many updates."""
    return steps * (optimizer.gradient_accumulation_steps or 1)


def _rate(optimizer: Any, *steps: int) -> float:
    """Return the learning rate after so many updates; now, without a number."""
    rate = optimizer._learning_rate
    if steps and isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return float(rate(_raw(optimizer, *steps)))
    return float(optimizer.learning_rate)
