"""Likeness: of what a model consists on each rank, so that all ranks divide the same one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from commlib.comparison.agreement import digest_of, lines_of, said
from commlib.comparison.parameter_check import Gathers, check_agreement

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Likeness:
    """What a model consists of, in its order. lines: what ranks must have alike, of layers of the framework.

    named: the same lines, with names that may differ between ranks. own: settings of layers that a user has written,
    and so may go with what the model computes or not.
    """

    lines: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    own: dict[str, str] = field(default_factory=dict)

    def add(
        self, layer: str, kind: type, settings: Mapping[str, Any], own: Mapping[str, Any], *, name: str = ""
    ) -> None:
        """Note a layer: what it is, and its settings. name: how errors call it, too."""
        every = [f": {kind.__module__}.{kind.__qualname__}", *lines_of("", settings)]
        self.lines.extend(f"{layer}{line}" for line in every)
        self.named.extend(f"{layer}, {name or kind.__qualname__}{line}" for line in every)
        self.own.update({f"{layer}, {kind.__qualname__}: {key}": said(value) for key, value in own.items()})

    def compare(self, comm: Gathers, what: str) -> None:
        """Compare it with that of the other ranks. Collective.

        Raises MismatchError on all ranks if they hold different models. Rank 0 warns of the first of the user's own
        settings that differs, of which nothing tells whether it is the model's.
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
                f"{what}: {name} is {here} on rank 0 and {there} on rank {rank} of {comm.size}: if what the model "
                "computes goes by it, ranks hold different models: give all the same",
                stacklevel=3,
            )


def is_plain(value: Any) -> bool:
    """Return whether a setting is a number, a text, or nothing, or several of these."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return type(value) in _PLAIN


def is_function(value: Any) -> bool:
    """Return whether a setting is a function, or a class."""
    return isinstance(value, partial) or (callable(value) and hasattr(value, "__qualname__"))


def own_settings(attributes: Mapping[str, Any], *, every: bool = False) -> dict[str, Any]:
    """Return which attributes of a layer of the user's own say what it computes, as far as can be told.

    Integers, switches and texts may say which rank this is, or what it prints. every: return these, too.
    """
    public = {name: value for name, value in attributes.items() if not name.startswith("_")}
    told = {name for name, value in public.items() if type(value) is float or is_function(value)}
    return {name: value for name, value in public.items() if name in told or (every and is_plain(value))}
