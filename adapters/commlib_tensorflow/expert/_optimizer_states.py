"""Optimizer state of experts' weights, under the names used in files: see `commlib.expert.checkpoint`.

Keras' state is stored unchanged; state that PyTorch has, too, is stored under names common to both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.expert.checkpoint import FIRST, LARGEST, SECOND, UPDATE, momentum
from commlib_tensorflow.expert._expert_optimizers import inner_optimizers
from commlib_tensorflow.pipelines._updates import lists_of, singles_of

_COMMON: tuple[tuple[type, Mapping[str, str]], ...] = (
    (keras.optimizers.Adam, {"_momentums": FIRST, "_velocities": SECOND, "_velocity_hats": LARGEST}),
    (keras.optimizers.SGD, {"momentums": UPDATE}),
)
_OF_ALL = {"_model_variables_moving_average": "keras.average"}
_LEFT_OUT = ("_iterations", "_learning_rate", "_accumulated_gradients")


class OptimizerStates:
    """Optimizer state for weights. Raises UsageError if an optimizer cannot be saved, or loaded, now.

    verb: for errors.
    """

    def __init__(self, verb: str, optimizer: Any) -> None:
        every = list(inner_optimizers(optimizer)) if optimizer is not None else []
        self._all = [one for one in every if one is every[0] or one.built]  # inner ones may have no weights
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
        """The optimizers that update weights themselves, without inner ones."""
        return [one for one in self._all if not getattr(one, "_inner_optimizers", ())]

    def of(self, variable: Any) -> dict[str, Any]:
        """Return the state variables for one weight, by name."""
        states: dict[str, Any] = {}
        for one, place in self._places(variable):
            slots = {name: variables[place] for name, variables in lists_of(one).items()}
            for name, value in {**singles_of(one), **slots}.items():
                if name not in _LEFT_OUT and value is not None:
                    states[_file_name(one, name)] = value
        return states

    def step(self, variable: Any) -> Array | None:
        """Return the number of updates of a weight; None without an optimizer for it."""
        for one, _ in self._places(variable):
            return np.array(int(one.iterations), np.int64)
        return None

    def continue_from(self, steps: set[int]) -> Iterator[tuple[Any, Any]]:
        """Yield (variable, value) of counters that continue the optimizer from a step; nothing if the file has none."""
        if len(steps) > 1:
            raise UsageError(
                f"load_experts: weights were updated {min(steps)} to {max(steps)} times, but Keras optimizers have one "
                "counter for all weights: pass no optimizer, and restart its state"
            )
        for one in self._all if steps else ():
            leaves = [one] if one in self._leaves else self._leaves
            yield one._iterations, max(_passes_after(leaf, *steps) for leaf in leaves)
            for accumulated in lists_of(one).get("_accumulated_gradients", ()):
                if accumulated is not None:
                    yield accumulated, np.zeros(accumulated.shape, accumulated.dtype)

    def value(self, layer: Mapping[str, Array], name: str, key: str, variable: Any, steps: set[int]) -> Array:
        """Return a file's value for a weight's `key`, in the optimizer's form."""
        if key != UPDATE:
            return layer[f"{name}/{key}"]
        ((one, _),) = self._places(variable)
        return momentum(layer, name, UPDATE, _rate(one, *steps))

    def _places(self, variable: Any) -> Iterator[tuple[Any, int]]:
        """Yield the optimizer that updates a weight, and the weight's index in it."""
        for one in self._leaves:
            place = one._trainable_variables_indices.get(one._var_key(variable))
            if place is not None:
                yield one, place
                return


def _check(verb: str, one: Any) -> None:
    kind = one.__class__.__name__
    if not one.built and verb == "save_experts":
        return  # it has no state yet
    if not one.built:
        raise UsageError(
            f"{verb}: this {kind} has not been built: call optimizer.build(model.trainable_variables), or pass none"
        )
    passes = one.gradient_accumulation_steps
    if verb == "save_experts" and passes and (done := int(one._iterations) % passes):
        raise UsageError(
            f"{verb}: this {kind} has added up {done} of {passes} passes (gradient_accumulation_steps), and these sums "
            "differ between ranks: save after the last pass of a step"
        )
    known = {id(v) for v in [*singles_of(one).values(), *(v for own in lists_of(one).values() for v in own)]}
    if unknown := [variable.path for variable in one._variables if id(variable) not in known]:
        raise UsageError(
            f"{verb}: this {kind} keeps {unknown[0]!r} neither as an attribute nor in a list with one entry for each "
            "weight, so the weight it belongs to is unknown: pass no optimizer"
        )


def _file_name(optimizer: Any, attribute: str) -> str:
    if attribute in _OF_ALL:
        return _OF_ALL[attribute]
    for kind, names in _COMMON:
        if isinstance(optimizer, kind) and attribute in names:
            return names[attribute]
    return f"keras.{optimizer.__class__.__name__}.{attribute.lstrip('_')}"


def _passes_after(optimizer: Any, steps: int) -> int:
    """Return an optimizer's counter, which counts passes, after this many updates."""
    return steps * (optimizer.gradient_accumulation_steps or 1)


def _rate(optimizer: Any, *steps: int) -> float:
    """Return the learning rate after this many updates; the current one without a number."""
    rate = optimizer._learning_rate
    if steps and isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return float(rate(_passes_after(optimizer, *steps)))
    return float(optimizer.learning_rate)
