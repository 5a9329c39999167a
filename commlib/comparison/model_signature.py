"""Model comparison: check that all ranks shard the same model, by its layers and their settings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from commlib.comparison.agreement import describe, digest_of, lines_of
from commlib.comparison.parameter_check import GatherRanks, check_agreement

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """The layers of a model, in order. lines: descriptions of the framework's layers, which must be equal on all ranks.

    named: the same lines, with names that may differ between ranks. own: settings of user-written layers, which may or
    may not affect the results of the model.
    """

    lines: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    own: dict[str, str] = field(default_factory=dict)

    def add(
        self, layer: str, kind: type, settings: Mapping[str, Any], own: Mapping[str, Any], *, name: str = ""
    ) -> None:
        """Add a layer: its class and settings. name: its name in errors."""
        every = [f": {kind.__module__}.{kind.__qualname__}", *lines_of("", settings)]
        self.lines.extend(f"{layer}{line}" for line in every)
        self.named.extend(f"{layer}, {name or kind.__qualname__}{line}" for line in every)
        self.own.update({f"{layer}, {kind.__qualname__}: {key}": describe(value) for key, value in own.items()})

    def compare(self, comm: GatherRanks, what: str) -> None:
        """Compare the model with that of the other ranks. Collective.

        Raises MismatchError on all ranks if they hold different models. Rank 0 warns of the first setting of
        user-written layers that differs, because it may or may not belong to the model.
        """
        if comm.size == 1:
            return
        if len(set(comm.all_gather_object(digest_of(self.lines)))) > 1:
            check_agreement(comm, what, self.named)
        own = [f"{name}={value}" for name, value in self.own.items()]
        if len(set(comm.all_gather_object(digest_of(own)))) == 1:
            return
        everyone: list[dict[str, str]] = comm.all_gather_object(self.own)
        name, rank = next(
            (name, rank)
            for name in dict.fromkeys(name for one in everyone for name in one)
            for rank, one in enumerate(everyone)
            if one.get(name) != everyone[0].get(name)
        )
        if comm.rank == 0:
            here, there = (one.get(name, "nothing") for one in (everyone[0], everyone[rank]))
            warnings.warn(
                f"{what}: {name} is {here} on rank 0 and {there} on rank {rank} of {comm.size}. If the model's results "
                "depend on it, ranks hold different models. Give it the same value on all ranks",
                stacklevel=3,
            )


def is_plain(value: Any) -> bool:
    """Return whether a setting is a number, a text, or None, or a sequence of these."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return type(value) in _PLAIN


def is_function(value: Any) -> bool:
    """Return whether a setting is a function, or a class."""
    return isinstance(value, partial) or (callable(value) and hasattr(value, "__qualname__"))


def own_settings(attributes: Mapping[str, Any], *, every: bool = False) -> dict[str, Any]:
    """Return the attributes of a user-written layer that probably affect its results: floats and functions.

    Integers, flags and texts may be the rank or a text to print. every: return these, too.
    """
    public = {name: value for name, value in attributes.items() if not name.startswith("_")}
    compared = {name for name, value in public.items() if type(value) is float or is_function(value)}
    return {name: value for name, value in public.items() if name in compared or (every and is_plain(value))}
