"""Goals: the greatest share of MPI's time that a call of commlib may take, as data."""

from __future__ import annotations

from dataclasses import dataclass

FORMS = ("blocking", "asynchronous", "planned")
MEMORIES = ("ordinary", "symmetric")
_KI, _MI = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal: commlib's time / MPI's is at most `share`. An empty form, memory or verb means all; sizes in bytes."""

    share: float
    form: str = ""
    memory: str = ""
    verb: str = ""
    least: int = 0
    most: int = 1 << 62

    def applies(self, verb: str, form: str, memory: str, nbytes: int) -> bool:
        """Return whether this is a goal of a cell."""
        given = (self.verb, self.form, self.memory)
        return all(own in ("", of) for own, of in zip(given, (verb, form, memory), strict=True)) and (
            self.least <= nbytes <= self.most
        )


GOALS = (
    Goal(1.0),
    Goal(0.7, form="planned"),
    Goal(0.5, memory="symmetric", least=16 * _KI),
    Goal(0.25, memory="symmetric", verb="all_reduce", least=64 * _KI),
    Goal(1 / 1.3, memory="ordinary", verb="all_reduce", least=_KI, most=64 * _MI),
)


def find_goal(verb: str, form: str, memory: str, nbytes: int) -> float:
    """Return the least share of all goals of a cell."""
    return min(goal.share for goal in GOALS if goal.applies(verb, form, memory, nbytes))
