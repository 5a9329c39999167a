"""The argument `ranks`: which ranks a call is for, and the communicator that it means."""

from __future__ import annotations

from typing import Protocol

from commlib.communicator import Communicator
from commlib.errors import UsageError


class RankGroup(Protocol):
    """Ranks that have a communicator: a `commlib.Mesh` with one axis, or a registered `ProcessSet`."""

    def communicator(self, verb: str) -> Communicator:
        """Return the communicator of these ranks. Raises UsageError for `verb` if there is none."""
        ...


Ranks = Communicator | RankGroup
"""Ranks as users pass them: a Communicator such as `mesh["tp"]`, a Mesh with one axis, or a registered ProcessSet."""


def communicator_of(ranks: Ranks, verb: str, *, whole: bool = False) -> Communicator:
    """Return the communicator of `ranks`, for a call of `verb`.

    whole: a mesh of several axes means all its ranks. Otherwise it is refused, because one axis was probably forgotten.
    Raises UsageError.
    """
    if isinstance(ranks, Communicator):
        return ranks
    if whole and isinstance(everyone := getattr(ranks, "comm", None), Communicator):
        return everyone
    if callable(getattr(ranks, "communicator", None)):
        return ranks.communicator(verb)
    raise ranks_error(verb, f"{type(ranks).__name__} {ranks!r}")


def ranks_error(verb: str, what: str) -> UsageError:
    """Return the error for ranks that have no communicator."""
    return UsageError(
        f"{verb}: ranks is the {what}: expected a Communicator such as commlib.init() or mesh['tp'], a Mesh with one "
        "axis, or a registered ProcessSet"
    )


def check_one_choice(verb: str, **choices: object) -> None:
    """Raise UsageError if more than one argument selects the ranks of a call of `verb`."""
    names = [f"{name}=" for name, value in choices.items() if value is not None]
    if len(names) > 1:
        raise UsageError(f"{verb}: {' and '.join(names)} both say which ranks: pass one of them")
