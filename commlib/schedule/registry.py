"""Registry: the table of algorithms with their names, claims and programs.

To add an algorithm, write one generator with one decorator:

    @algorithm("all_reduce", "ring", regions=per_rank, rounds=..., sent=...)
    def ring(rank: int, size: int) -> Iterator[Round]: ...

Verification, simulation, tests, benchmarks and the chooser iterate over this table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from commlib.arguments import suggest
from commlib.errors import UsageError
from commlib.schedule.ir import Program, Round

Generate = Callable[..., Iterator[Round]]
Regions = Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of an algorithm's docstring, in a form that a test can check; functions of (size, segments).

    rounds: how many messages follow one another when every rank has one send port and one receive port: the time
        in the simulation at alpha = 1, beta = gamma = 0.
    sent: the most that any rank sends, as a fraction of the data (the bytes of the first region).
    at_most: `rounds` is a bound; `sent` is always exact.
    """

    rounds: Callable[[int, int], int]
    sent: Callable[[int, int], Fraction | int]
    at_most: bool = False


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm for one collective.

    rooted: it takes `root`. segmented: it takes `segments`, the number of pieces in its pipeline. even_only: data
    passes through chunks of other ranks, so all chunks must have the same size.
    """

    verb: str
    name: str
    generate: Generate
    regions: Regions
    claims: Claims
    rooted: bool
    segmented: bool
    even_only: bool

    @property
    def description(self) -> str:
        """The docstring: one line, then rounds and bytes, then the source."""
        return inspect.cleandoc(self.generate.__doc__ or "")

    def rounds(self, rank: int, size: int, *, root: int = 0, segments: int = 1) -> Iterator[Round]:
        """Generate the rounds of one rank, uncached and unchecked (for simulations of many ranks)."""
        options: dict[str, int] = {}
        if self.rooted:
            options["root"] = root
        if self.segmented:
            options["segments"] = segments
        return self.generate(rank, size, **options)


table: dict[tuple[str, str], Algorithm] = {}
"""All algorithms, by verb and name. The decorator `algorithm` fills it."""


def algorithm(
    verb: str,
    name: str,
    *,
    regions: Regions,
    rounds: Callable[[int, int], int],
    sent: Callable[[int, int], Fraction | int],
    at_most: bool = False,
    rooted: bool = False,
    segmented: bool = False,
    even_only: bool = False,
) -> Callable[[Generate], Generate]:
    """Register a generator under `verb` and `name`, and return it unchanged so that others can build on it."""

    def register(generate: Generate) -> Generate:
        claims = Claims(rounds, sent, at_most)
        table[verb, name] = Algorithm(verb, name, generate, regions, claims, rooted, segmented, even_only)
        return generate

    return register


def verbs() -> tuple[str, ...]:
    """Return the collectives that have at least one algorithm."""
    return tuple(dict.fromkeys(verb for verb, _ in table))


def algorithms(verb: str) -> tuple[str, ...]:
    """Return the names of the algorithms of one collective. Raises UsageError for an unknown one."""
    names = tuple(name for of, name in table if of == verb)
    if not names:
        raise UsageError(f"no collective is called {verb!r}; known are {', '.join(verbs())}{suggest(verb, verbs())}")
    return names


def find(verb: str, name: str) -> Algorithm:
    """Return one entry of the table. Raises UsageError, with the known names, if there is none."""
    names = algorithms(verb)
    if name not in names:
        raise UsageError(f"{verb} has no algorithm {name!r}; known are {', '.join(names)}{suggest(name, names)}")
    return table[verb, name]


def program(verb: str, name: str, rank: int, size: int, *, root: int = 0, segments: int = 1) -> Program:
    """Return the program of `rank` among `size` ranks. Cached. Raises UsageError for invalid arguments."""
    chosen = find(verb, name)
    what = f"{verb} {name}"
    if size < 1:
        raise UsageError(f"{what}: size must be at least 1, got {size}")
    if not 0 <= rank < size:
        raise UsageError(f"{what}: rank must be in 0..{size - 1}, got {rank}")
    if not 0 <= root < size:
        raise UsageError(f"{what}: root must be in 0..{size - 1}, got {root}")
    if root and not chosen.rooted:
        raise UsageError(f"{what}: {verb} has no root, got root={root}")
    if segments < 1:
        raise UsageError(f"{what}: segments must be at least 1, got {segments}")
    if segments > 1 and not chosen.segmented:
        able = ", ".join(n for n in algorithms(verb) if table[verb, n].segmented) or "none"
        raise UsageError(f"{what} is not pipelined, got segments={segments}; algorithms of {verb} that are: {able}")
    return _build(verb, name, rank, size, root, segments)


@lru_cache(maxsize=1024)
def _build(verb: str, name: str, rank: int, size: int, root: int, segments: int) -> Program:
    chosen = table[verb, name]
    rounds = tuple(chosen.rounds(rank, size, root=root, segments=segments))
    return Program(verb, name, rank, size, root, chosen.regions(size, segments), rounds)
