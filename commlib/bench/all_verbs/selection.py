"""Selection: the verbs, sizes, forms and memories of a table, and the rows to measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commlib.arguments import suggest
from commlib.bench.all_verbs.goals import FORMS, MEMORIES
from commlib.bench.options import BenchOptionsError, parse_size

ALL_VERBS = (
    *("all_reduce", "reduce", "broadcast", "gather", "scatter", "all_gather", "all_gather_v", "reduce_scatter"),
    *("reduce_scatter_v", "all_to_all", "all_to_all_v", "scan", "exscan", "barrier", "send_recv"),
)
ALL_SIZES = (4, 64, 1 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
ROUNDS = 15


@dataclass(frozen=True, slots=True)
class TableRow:
    """One measurement: all forms of a verb and of MPI's call on the same arrays. nbytes: 0 for a barrier."""

    verb: str
    memory: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Selection:
    """What to measure. seconds: the time for all rows together. rounds: at most so many for each row."""

    verbs: tuple[str, ...] = ALL_VERBS
    sizes: tuple[int, ...] = ALL_SIZES
    forms: tuple[str, ...] = FORMS
    memories: tuple[str, ...] = MEMORIES
    seconds: float = 900.0
    rounds: int = ROUNDS
    json: Path | None = None

    def rows(self) -> list[TableRow]:
        """Return the rows, in the order of measurement. A barrier has one, with the first memory."""
        with_data = (verb for verb in self.verbs if verb != "barrier")
        rows = [
            TableRow(verb, memory, nbytes) for verb in with_data for memory in self.memories for nbytes in self.sizes
        ]
        return [*rows, TableRow("barrier", self.memories[0], 0)] if "barrier" in self.verbs else rows


def select(
    *,
    verbs: str | None = None,
    sizes: str | None = None,
    forms: str | None = None,
    memory: str | None = None,
    seconds: float | None = None,
    rounds: int | None = None,
    json: Path | None = None,
) -> Selection:
    """Return the selection of the command's options; lists are separated by commas. Raises BenchOptionsError."""
    usual = Selection()
    seconds, rounds = usual.seconds if seconds is None else seconds, usual.rounds if rounds is None else rounds
    if seconds <= 0:
        raise BenchOptionsError(f"--seconds is {seconds:g}: expected more than 0")
    if rounds < 1:
        raise BenchOptionsError(f"--rounds is {rounds}: expected at least 1")
    return Selection(
        verbs=_known("--verbs", verbs, ALL_VERBS),
        sizes=ALL_SIZES if sizes is None else tuple(dict.fromkeys(map(parse_size, sizes.split(",")))),
        forms=_known("--forms", forms, FORMS),
        memories=_known("--memory", memory, MEMORIES),
        seconds=seconds,
        rounds=rounds,
        json=json,
    )


def _known(option: str, given: str | None, known: Sequence[str]) -> tuple[str, ...]:
    """Return the names in the order of `known`, or all of them if none are given."""
    names = known if given is None else [name.strip() for name in given.split(",")]
    for name in names:
        if name not in known:
            hint = suggest(name, known)
            raise BenchOptionsError(f"{option} {name!r} is unknown; known are {', '.join(known)}{hint}")
    return tuple(name for name in known if name in names)
