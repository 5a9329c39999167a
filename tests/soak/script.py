"""Script: draw the calls and their order from the seed, the same on all ranks."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from commlib.dtypes import DTYPES
from commlib.schedule import algorithms
from tests.oracles.oracle import REDUCIBLE

# How often each verb is drawn. Those that make or free memory or groups are slow, and rarer in real programs, too.
WEIGHTS = {
    "all_reduce": 24,
    "plan": 8,
    "reduce_scatter": 6,
    "reduce_scatter_v": 4,
    "scan": 3,
    "exscan": 3,
    "reduce": 6,
    "broadcast": 6,
    "all_gather": 6,
    "all_gather_v": 4,
    "gather": 4,
    "scatter": 4,
    "all_to_all": 6,
    "all_to_all_v": 4,
    "message": 14,
    "send_recv": 6,
    "barrier": 3,
    "broadcast_object": 3,
    "all_gather_object": 3,
    "allocate": 2,
    "split": 1,
}
REDUCTIONS = {"all_reduce", "plan", "reduce_scatter", "reduce_scatter_v", "scan", "exscan", "reduce"}
ROOTED = {"reduce", "broadcast", "gather", "scatter", "broadcast_object"}
ON_SLOTS = {"all_reduce", "plan", "reduce_scatter", "reduce", "broadcast", "all_gather", "gather"}
IN_PLACE = {"all_reduce", "plan", "reduce", "all_to_all"}
WITH_OUT = {*IN_PLACE, "reduce_scatter", "all_gather", "gather", "scatter"}
WITHOUT_ROWS = {"all_reduce", "reduce", "broadcast", "all_gather", "gather", "message", "send_recv"}  # may be 0-d

# MPI has these dtypes, and keeps all their digits.
NATIVE = [
    (dtype, op)
    for dtype, op in REDUCIBLE
    if dtype not in ("float16", "bfloat16") and (op != "mean" or dtype in ("float32", "float64"))
]

SYMMETRIC = (2, 3)  # these slots of each team are symmetric memory,
SLOTS = (0, 1, *SYMMETRIC)  # the others are ordinary arrays that are reused repeatedly

KINDS = 3  # of each verb of a team, and of each verb on each kind of slot

# Elements, at most, and how often. Beyond 4 KiB, 16 KiB, 256 KiB and 512 KiB other protocols and algorithms take over.
SIZES = {1: 4, 1_000: 50, 16_000: 30, 100_000: 12, 300_000: 4}


@dataclass(frozen=True, slots=True)
class Team:
    """Some ranks of the world, in the order of their ranks in the group `name`."""

    number: int
    name: str
    members: tuple[int, ...]


class Kind(NamedTuple):
    """The properties that a program repeats from call to call, the key of caches."""

    dtype: str
    shape: tuple[int, ...]
    op: str
    root: int  # also who sends a message
    algorithm: str
    out: str  # "new", "given" or "in place"


@dataclass(frozen=True, slots=True)
class Step:
    """One call of one team. Fields that a verb does not use are drawn all the same, and have no effect."""

    number: int
    team: Team
    verb: str
    kind: Kind
    peer: int  # the receiver of a message, the shift of a ring, the number of groups of a split
    tag: int
    slot: int | None  # the team's lasting array that is read, instead of a new one
    strided: bool  # new arrays are views with gaps
    seed: int  # of all ranks' data: rank r's is drawn from seed + r


def splits(size: int) -> dict[str, list[tuple[int, ...]]]:
    """Return the groups of a world, by name: each is split into teams without a common rank."""
    ranks = tuple(range(size))
    half = (size + 1) // 2
    named: dict[str, list[tuple[int, ...]]] = {
        "world": [ranks],
        "halves": [ranks[:half], ranks[half:]],
        "even and odd": [ranks[::2], ranks[1::2]],
        "reversed": [ranks[::-1]],
        "all but the last": [ranks[:-1]],
        "last two": [ranks[-2:]],
        "alone": [(rank,) for rank in ranks],
    }
    return {name: [team for team in split if team] for name, split in named.items()}


def teams(size: int) -> list[Team]:
    """Return the teams of a world."""
    pairs = [(name, members) for name, split in splits(size).items() for members in split]
    return [Team(number, name, members) for number, (name, members) in enumerate(pairs)]


class Script:
    """The steps of one thread, without end: first the allocation of every team's slots, then anything.

    novelty: the share of calls of a kind that need not have occurred before.
    """

    def __init__(self, seed: int, thread: int, teams: list[Team], novelty: float = 0.02) -> None:
        self._random = random.Random(f"soak {seed}, thread {thread}")
        self._teams, self._novelty = teams, novelty
        # A team of one rank has little to test.
        self._weights = [4 * len(team.members) if len(team.members) > 1 else 1 for team in teams]
        self._slots: dict[tuple[int, int], Kind] = {}  # the kind with which a team's slot was allocated
        self._kinds: defaultdict[tuple[int, str, Kind | None], list[Kind]] = defaultdict(list)

    def __iter__(self) -> Iterator[Step]:
        numbers = itertools.count()
        for team, place in itertools.product(self._teams, SLOTS):
            yield self._step(next(numbers), team, "allocate", place)
        while True:
            (team,) = self._random.choices(self._teams, self._weights)
            (verb,) = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))
            slot: int | None = None
            if verb in ("allocate", "plan") or (verb in ON_SLOTS and self._random.random() < 0.4):
                slot = self._random.choice(SLOTS)
            yield self._step(next(numbers), team, verb, slot)

    def _step(self, number: int, team: Team, verb: str, slot: int | None) -> Step:
        chance = self._random
        if verb == "allocate" or slot is None:
            kind = self._kind(team, verb, None)
        else:
            kind = self._kind(team, verb, self._slots[team.number, slot])
        if verb == "allocate":
            assert slot is not None
            self._slots[team.number, slot] = kind
        peer, tag = chance.randrange(len(team.members)), chance.randrange(3)
        return Step(number, team, verb, kind, peer, tag, slot, chance.random() < 0.15, chance.randrange(2**40))

    def _kind(self, team: Team, verb: str, whole: Kind | None) -> Kind:
        """Return the kind of a call, on a slot if `whole` gives its kind."""
        known = self._kinds[team.number, verb, whole]
        if self._random.random() < self._novelty and verb != "allocate":  # a new kind of slot makes all on it new
            return self._new_kind(team, verb, whole)
        if len(known) < KINDS:
            known.append(self._new_kind(team, verb, whole))
            return known[-1]
        return self._random.choice(known)

    def _new_kind(self, team: Team, verb: str, whole: Kind | None) -> Kind:
        chance = self._random
        dtype, op = chance.choice(DTYPES), ""
        if verb in REDUCTIONS:
            dtype, op = chance.choice(REDUCIBLE)
        shape = self._shape(verb, len(team.members))
        out = chance.choice([*["new"] * 2, *["given"] * (verb in WITH_OUT), *["in place"] * 2 * (verb in IN_PLACE)])
        if whole is not None:
            dtype, (length,) = whole.dtype, whole.shape
            op = chance.choice([op for known, op in REDUCIBLE if known == dtype]) if op else ""
            # With out, the result goes to the other half. The same array repeatedly takes the short path.
            shape = (length // 2 if out == "given" else length if chance.random() < 0.6 else chance.randint(0, length),)
        return Kind(dtype, shape, op, chance.randrange(len(team.members)), self._algorithm(verb, dtype, op), out)

    def _length(self) -> int:
        (most,) = self._random.choices(list(SIZES), list(SIZES.values()))
        return self._random.randint(0, most)

    def _shape(self, verb: str, size: int) -> tuple[int, ...]:
        length = self._length()
        if verb == "allocate":
            return (length,)
        if verb in ("scatter", "all_to_all"):
            length = length // size * size
        if length == 1 and verb in WITHOUT_ROWS:
            return ()
        columns = self._random.choice((0, 0, 1, 3))
        rows = length // columns if columns else length
        if verb in ("scatter", "all_to_all"):
            rows = rows // size * size
        return (rows, columns) if columns else (rows,)

    def _algorithm(self, verb: str, dtype: str, op: str) -> str:
        name = "all_reduce" if verb == "plan" else verb
        if name not in ON_SLOTS | {"scatter", "all_to_all"} or self._random.random() < 0.6:
            return "auto"
        native = ["native"] if name == "all_reduce" and (dtype, op) in NATIVE else []
        return self._random.choice([*algorithms(name), *native])
