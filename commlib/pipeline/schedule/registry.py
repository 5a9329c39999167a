"""The table of schedules: how many stages each wants on a rank, where they stand, and what each rank does.

Adding a schedule is one generator and one decorator; verification, simulation, tests, pictures and "auto" run over the
table:

    @plan("1f1b")
    def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Action]: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from commlib.errors import UsageError
from commlib.pipeline.schedule.ir import Action, Kind, Schedule, Weights

Generate = Callable[..., Iterator[Action]]
Place = Callable[[int, int], tuple[int, ...]]
Enough = Callable[[int, int], int]


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Place stages round and round: stage s on rank s mod `ranks`."""
    return tuple(range(ranks)) * chunks


def folded(ranks: int, chunks: int) -> tuple[int, ...]:
    """Place stages as a V: down the ranks and up again."""
    return tuple(rank if chunk % 2 == 0 else ranks - 1 - rank for chunk in range(chunks) for rank in range(ranks))


@dataclass(frozen=True, slots=True)
class Plan:
    """One schedule for any number of ranks and microbatches.

    chunks: stages on each rank by default. looped: any number of them will do, and `generate` takes it.
    enough: of (ranks, microbatches), how many microbatches its pattern needs; what is not there is left out of it.
    updates: it takes `every`, the microbatches from one STEP to the next.
    """

    name: str
    generate: Generate
    chunks: int
    place: Place
    enough: Enough
    weights: Weights

    @property
    def is_looped(self) -> bool:
        """Whether any number of stages can be on a rank."""
        return "chunks" in inspect.signature(self.generate).parameters

    @property
    def updates(self) -> bool:
        """Whether it updates weights by itself, and so takes `every`."""
        return "every" in inspect.signature(self.generate).parameters

    @property
    def description(self) -> str:
        """The docstring: one line, then the idle time and the memory, then the source."""
        return inspect.cleandoc(self.generate.__doc__ or "")


table: dict[str, Plan] = {}
"""All schedules, by name. `plan` writes it."""


def plan(
    name: str,
    *,
    chunks: int = 1,
    place: Place = looped,
    enough: Enough = lambda ranks, microbatches: microbatches,
    weights: Weights = Weights.FLUSH,
) -> Callable[[Generate], Generate]:
    """Enter a generator for one rank into the table; see `Plan`."""

    def enter(generate: Generate) -> Generate:
        table[name] = Plan(name, generate, chunks, place, enough, weights)
        return generate

    return enter


def find(name: str) -> Plan:
    """Return a schedule by name, whatever its case, with "-" or "_". Raises UsageError for unknown ones."""
    plan = table.get(name.lower().replace("-", "_"))
    if plan is None:
        raise UsageError(f"there is no schedule {name!r}; there are {', '.join(table)}, and any given as CSV")
    return plan


@lru_cache(maxsize=256)
def make(name: str, ranks: int, microbatches: int, *, stages: int | None = None, every: int | None = None) -> Schedule:
    """Return a schedule for so many ranks and microbatches.

    stages: in all (default: what the schedule mostly has on each rank). every: microbatches from one update of the
    weights to the next, of schedules that update. Raises UsageError for numbers that it cannot have.
    """
    plan = find(name)
    if ranks < 1 or microbatches < 1:
        raise UsageError(f"schedule {plan.name}: {ranks} ranks and {microbatches} microbatches; expected 1 at least")
    chunks = plan.chunks if stages is None else _chunks(plan, ranks, stages)
    options = {"chunks": chunks} if plan.is_looped else {}
    if plan.updates:
        options["every"] = _every(plan, ranks, every)
    elif every is not None:
        raise UsageError(f"schedule {plan.name} leaves updates to the optimizer, so it takes no every={every}")
    enough = max(microbatches, plan.enough(ranks, microbatches))
    programs = tuple(
        tuple(action for action in plan.generate(rank, ranks, enough, **options) if _is_there(action, microbatches))
        for rank in range(ranks)
    )
    return Schedule(plan.name, microbatches, plan.place(ranks, chunks), programs, plan.weights, options.get("every", 0))


def _is_there(action: Action, microbatches: int) -> bool:
    """Return whether an action's microbatch is one of so many.

    Microbatches wait for each other only where one rank has one thing to do after another, so that leaving some of them
    out never makes another one wait.
    """
    return action.kind is Kind.STEP or action.microbatch < microbatches


def _chunks(plan: Plan, ranks: int, stages: int) -> int:
    chunks, left = divmod(stages, ranks)
    if left or chunks < 1 or not (plan.is_looped or chunks == plan.chunks):
        wanted = "a multiple of that" if plan.is_looped else f"{ranks * plan.chunks}: {plan.chunks} on each"
        raise UsageError(f"schedule {plan.name}: {stages} stages on {ranks} ranks; expected {wanted}")
    return chunks


def _every(plan: Plan, ranks: int, every: int | None) -> int:
    least = ranks if plan.weights is Weights.PREVIOUS else 1
    if every is not None and every < least:
        why = f": fewer than the {ranks} ranks leave more than two versions of the weights in use" if least > 1 else ""
        raise UsageError(f"schedule {plan.name}: every is {every}, expected at least {least}{why}")
    return every or least
