"""Trainable state: detect layers and weights frozen or thawed after compile, or changed after the model was split."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import keras

from commlib.errors import UsageError


class TrainableState:
    """What is trainable in a model since the last `settle`, and the variables of its layers since it was split.

    parts: all stages, so that all ranks see it. model: the user's whole model. rank: names this rank in errors.
    """

    def __init__(self, parts: Sequence[Any], model: Any, rank: str) -> None:
        self._parts, self._rank = parts, rank
        self._layers = list({id(layer): layer for part in parts for layer in part._flatten_layers()}.values())
        self._variables = self._variables_now()
        layers = [*self._layers, *model._flatten_layers()]
        self._owners = [_Owner(layer) for layer in {id(layer): layer for layer in layers}.values()]
        self._every = [owner.layer for owner in self._owners]
        self._ids = self._ids_now()
        self.settle()

    def settle(self) -> None:
        """Record what is trainable now. Raises UsageError as `check_variables` does."""
        self.check_variables()
        self._then = self._now()

    def check_variables(self) -> None:
        """Raise UsageError if layers have gained or lost variables or layers since the model was split."""
        if self._ids_now() == self._ids:
            return
        for owner in self._owners:
            if fault := owner.fault():
                raise UsageError(
                    f"pipeline: {fault} since the model was split into stages, which still compute with the old ones "
                    f"(this is {self._rank}): call quantize, enable_lora, add_weight, add and the like before "
                    "pipeline()"
                )

    def check_roots(self, models: Sequence[Any]) -> None:
        """Raise UsageError if a model around the stages is frozen, but not all of its layers are."""
        thawed = next((variable for part in self._parts for variable in part.trainable_variables), None)
        frozen = next((model for model in models if not model.trainable), None)
        if thawed is not None and frozen is not None:
            raise UsageError(
                f"pipeline: model {frozen.name!r} has trainable=False, but {thawed.path} has trainable=True, so Keras "
                "would train nothing: set it to True on the model, and to the values you want on the layers"
            )

    def lines(self) -> list[str]:
        """Return lines about frozen layers and variables, which ranks compare: by number, as names may differ."""
        layers, variables = self._then[: len(self._layers)], self._then[len(self._layers) :]
        lines = [f"layer {number} of the stages is frozen" for number, one in enumerate(layers) if not one]
        lines += [f"variable {number} of the stages is frozen" for number, one in enumerate(variables) if not one]
        return lines

    def check(self) -> None:
        """Raise UsageError if anything was frozen or thawed since."""
        now = self._now()
        if now == self._then:
            return
        every = [*(f"layer {layer.name!r}" for layer in self._layers), *(variable.path for variable in self._variables)]
        name, is_trainable = next(
            (name, is_now) for name, was, is_now in zip(every, self._then, now, strict=True) if was != is_now
        )
        raise UsageError(
            f"pipeline: trainable of {name} was set to {is_trainable} after compile(): call compile() again, on all "
            "ranks, because Keras also applies it only then"
        )

    def _ids_now(self) -> list[int]:
        return list(map(id, chain.from_iterable(chain.from_iterable(map(_stores_of, self._every)))))

    def _now(self) -> list[bool]:
        return [one.trainable for one in (*self._layers, *self._variables)]

    def _variables_now(self) -> list[Any]:
        return list({id(variable): variable for part in self._parts for variable in part.variables}.values())


_stores_of = attrgetter("_trainable_variables", "_non_trainable_variables", "_seed_generators", "_layers")
"""The lists in which Keras stores a layer's own objects: `variables` and `layers` are new lists on each access."""


class _Owner:
    """A layer, with its variables and layers when the model was split."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._then = [one for store in _stores_of(layer) for one in store]

    def fault(self) -> str:
        """Return the gained or lost object as text; "" if there is none."""
        now = [one for store in _stores_of(self.layer) for one in store]
        new, removed = _difference(now, self._then), _difference(self._then, now)
        if not new and not removed:
            is_same = list(map(id, now)) == list(map(id, self._then))
            return "" if is_same else f"{_describe(self.layer)} has its variables or layers in another order"
        return f"{_describe(self.layer)} has {'a new' if new else 'lost its'} {_describe((new or removed)[0])}"


def _difference(some: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    known = set(map(id, others))
    return [one for one in some if id(one) not in known]


def _describe(one: Any) -> str:
    if isinstance(one, keras.Variable):
        return f"variable, {one.path}, of shape {tuple(one.shape)},"
    return f"{'model' if isinstance(one, keras.Model) else 'layer'} {one.name!r}"
