"""Trainable: notice layers and weights that are frozen, thawed or added after compile, when Keras takes them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commlib.errors import UsageError


class Trainable:
    """What of a model is trainable, as it was when this was last settled.

    parts: all stages, so that all ranks see it.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts
        self._layers = list({id(layer): layer for part in parts for layer in part._flatten_layers()}.values())
        self._variables = self._variables_now()
        self.settle()

    def settle(self) -> None:
        """Take what is trainable now. Raises UsageError for a model that has got other variables since it was cut."""
        known = set(map(id, self._variables))
        if new := [variable for variable in self._variables_now() if id(variable) not in known]:
            raise UsageError(
                f"pipeline: the model has a new variable, {new[0].path}, of shape {tuple(new[0].shape)}, since it was "
                "cut into stages: add_weight, enable_lora, quantize and the like come before pipeline()"
            )
        self._then = self._now()

    def check_roots(self, models: Sequence[Any]) -> None:
        """Raise UsageError where a model around the stages is frozen, but not all of its layers are."""
        thawed = next((variable for part in self._parts for variable in part.trainable_variables), None)
        frozen = next((model for model in models if not model.trainable), None)
        if thawed is not None and frozen is not None:
            raise UsageError(
                f"pipeline: trainable of model {frozen.name!r} is False, and that of {thawed.path} is True, so that "
                "Keras would train nothing: set it on the model to True, and on the layers to what is meant"
            )

    def lines(self) -> list[str]:
        """Return what is frozen, for ranks to compare: by number, as names count what a process has made before."""
        layers, variables = self._then[: len(self._layers)], self._then[len(self._layers) :]
        found = [f"layer {number} of the stages is frozen" for number, one in enumerate(layers) if not one]
        found += [f"variable {number} of the stages is frozen" for number, one in enumerate(variables) if not one]
        return found

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
            "ranks, which is when Keras takes it in, too"
        )

    def _now(self) -> list[bool]:
        return [one.trainable for one in (*self._layers, *self._variables)]

    def _variables_now(self) -> list[Any]:
        return list({id(variable): variable for part in self._parts for variable in part.variables}.values())
