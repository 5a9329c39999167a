"""Registry: the table of schedules, with their stages per rank, placement and programs.

To add a schedule, write one generator with one decorator. Verification, simulation, tests, pictures and "auto" iterate
over the table:

    @plan("1f1b")
    def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Action]: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from commlib.arguments import suggest, whole_numbers
from commlib.errors import UsageError
from commlib.pipeline.schedule.ir import Action, Kind, Schedule, Weights

Generate = Callable[..., Iterator[Action]]
Placing = Callable[[int, int], tuple[int, ...]]
Enough = Callable[[int, int], int]


def place_looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Place stages cyclically: stage s on rank s mod `ranks`."""
    return tuple(range(ranks)) * chunks


def place_folded(ranks: int, chunks: int) -> tuple[int, ...]:
    """Place stages as a V: down the ranks and up again."""
    return tuple(rank if chunk % 2 == 0 else ranks - 1 - rank for chunk in range(chunks) for rank in range(ranks))


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """One schedule for any number of ranks and microbatches.

    chunks: the default number of stages on each rank. is_looped: any number of them is allowed, and `generate` takes
    it. enough: maps (ranks, microbatches) to the number of microbatches that the pattern needs; `make` drops the
    surplus ones. updates: it takes `every`, the microbatches from one STEP to the next.
    """

    name: str
    generate: Generate
    chunks: int
    place: Placing
    enough: Enough
    weights: Weights

    @property
    def is_looped(self) -> bool:
        """Whether any number of stages can be on a rank."""
        return "chunks" in inspect.signature(self.generate).parameters

    @property
    def updates(self) -> bool:
        """Whether it updates weights itself, and so takes `every`."""
        return "every" in inspect.signature(self.generate).parameters

    @property
    def description(self) -> str:
        """The docstring: one line, then the idle time and the memory, then the source."""
        return inspect.cleandoc(self.generate.__doc__ or "")


table: dict[str, SchedulePlan] = {}
"""All schedules, by name. The decorator `plan` fills it."""


def plan(
    name: str,
    *,
    chunks: int = 1,
    place: Placing = place_looped,
    enough: Enough = lambda ranks, microbatches: microbatches,
    weights: Weights = Weights.FLUSH,
) -> Callable[[Generate], Generate]:
    """Register a generator for one rank; see `SchedulePlan`."""

    def enter(generate: Generate) -> Generate:
        table[name] = SchedulePlan(name, generate, chunks, place, enough, weights)
        return generate

    return enter


def find(name: str) -> SchedulePlan:
    """Return a schedule by name, case-insensitive, with "-" or "_". Raises UsageError for an unknown name."""
    plan = table.get(name.lower().replace("-", "_"))
    if plan is None:
        raise UsageError(
            f"unknown schedule {name!r}; expected one of {', '.join(table)}, or a CSV file{suggest(name, table)}"
        )
    return plan


@lru_cache(maxsize=256)
def make(name: str, ranks: int, microbatches: int, *, stages: int | None = None, every: int | None = None) -> Schedule:
    """Return a schedule for `ranks` ranks and `microbatches` microbatches.

    stages: the total (default: the plan's usual number for each rank). every: microbatches between updates of the
    weights, for schedules that update. Raises UsageError for numbers that the schedule does not allow.
    """
    plan = find(name)
    if whole_numbers((ranks, microbatches)) is None or ranks < 1 or microbatches < 1:
        raise UsageError(
            f"schedule {plan.name}: {ranks} ranks and {microbatches!r} microbatches; expected at least 1 of each"
        )
    chunks = plan.chunks if stages is None else _chunks(plan, ranks, stages)
    options = {"chunks": chunks} if plan.is_looped else {}
    if plan.updates:
        options["every"] = _every(plan, ranks, every)
    elif every is not None:
        raise UsageError(f"schedule {plan.name} leaves updates to the optimizer, so it takes no every={every}")
    enough = max(microbatches, plan.enough(ranks, microbatches))
    programs = tuple(
        tuple(action for action in plan.generate(rank, ranks, enough, **options) if _is_included(action, microbatches))
        for rank in range(ranks)
    )
    return Schedule(plan.name, microbatches, plan.place(ranks, chunks), programs, plan.weights, options.get("every", 0))


def _is_included(action: Action, microbatches: int) -> bool:
    """Return whether an action's microbatch is one of `microbatches`.

    Microbatches wait for each other only through the order of actions on a rank, so dropping some never makes another
    one wait.
    """
    return action.kind is Kind.STEP or action.microbatch < microbatches


def _chunks(plan: SchedulePlan, ranks: int, stages: int) -> int:
    chunks, rest = divmod(stages, ranks)
    if rest or chunks < 1 or not (plan.is_looped or chunks == plan.chunks):
        expected = "a multiple of that" if plan.is_looped else f"{ranks * plan.chunks}: {plan.chunks} on each"
        raise UsageError(f"schedule {plan.name}: {stages} stages on {ranks} ranks; expected {expected}")
    return chunks


def _every(plan: SchedulePlan, ranks: int, every: int | None) -> int:
    least = ranks if plan.weights is Weights.PREVIOUS else 1
    if every is not None and every < least:
        why = f": fewer than the {ranks} ranks leave more than two versions of the weights in use" if least > 1 else ""
        raise UsageError(f"schedule {plan.name}: every is {every}, expected at least {least}{why}")
    return every or least
