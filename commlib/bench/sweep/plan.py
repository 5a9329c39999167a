"""SweepPlan: the contents of a sweep, from a TOML file or flags, and the resulting cases.

A plan is a product: every verb with every size, dtype, operation, algorithm and place, on every world. A world is the
first ranks of the first nodes of a job. Options without effect on a verb (an operation of a gather) add no cases.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from commlib.arguments import suggest
from commlib.bench.options import DEVICES, ONLY_ON, PEERS, BenchOptionsError, parse_size
from commlib.bench.verbs import VERBS, BenchVerb
from commlib.dtypes import DTYPES, NUMPY
from commlib.schedule import registry

ALL = 0  # all nodes of the job, or all ranks of a node
EVERY = "every"  # each algorithm of a verb, and "auto"
PLACES = ("usual", "in", "out")


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The contents of a sweep.

    nodes, ranks_per_node: each combination makes a world; 0 means all of the job. places: "usual" (the verb's usual
    form), "in" (place) or "out" (of place). sizes: in bytes. device: "host" or "cuda", where the arrays are.
    case_seconds: a case that takes longer ends the job; start the sweep again to continue with the next case. seconds:
    no case begins after this time; start the sweep again for the rest.
    """

    verbs: tuple[str, ...] = ("all_reduce",)
    sizes: tuple[int, ...] = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
    dtypes: tuple[str, ...] = ("float32",)
    ops: tuple[str, ...] = ("sum",)
    algorithms: tuple[str, ...] = ("auto",)
    nodes: tuple[int, ...] = (ALL,)
    ranks_per_node: tuple[int, ...] = (ALL,)
    peers: tuple[str, ...] = ()
    places: tuple[str, ...] = ("usual",)
    symmetric: bool = True
    check: bool = True
    rounds: int = 5
    iters: int | None = None
    warmup_iters: int | None = None
    case_seconds: float = 600.0
    seconds: float | None = None
    device: str = "host"


@dataclass(frozen=True, slots=True, order=True)
class SweepCase:
    """One measurement, with everything that distinguishes it. nbytes: as requested. peers: measured in turn with it."""

    nodes: int
    ranks_per_node: int
    verb: str
    dtype: str
    op: str
    algorithm: str
    in_place: bool
    symmetric: bool
    nbytes: int
    peers: tuple[str, ...] = field(default=())
    device: str = "host"

    @property
    def world(self) -> tuple[int, int]:
        """Number of nodes, and of ranks on each."""
        return self.nodes, self.ranks_per_node

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def key(self) -> str:
        """The case in one line, which identifies it in a file."""
        return " ".join(filter(None, [self.name, "+".join(("", *self.peers))]))

    @property
    def name(self) -> str:
        """The case without its peers, which identifies it when runs are compared."""
        words = (
            f"{self.nodes}x{self.ranks_per_node}",
            self.verb,
            self.dtype,
            self.op,
            self.algorithm,
            "in-place" if self.in_place else "out-of-place",
            "symmetric" if self.symmetric else "ordinary",
            str(self.nbytes),
            "" if self.device == "host" else self.device,
        )
        return " ".join(filter(None, words))


def read(path: Path) -> SweepPlan:
    """Return the plan of a TOML file. Raises Refused, with the file's name, if it cannot be read or is not a plan."""
    try:
        return parse_plan(tomllib.loads(path.read_text()))
    except OSError as error:
        raise BenchOptionsError(f"plan {path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BenchOptionsError(f"plan {path}: not TOML: {error}") from None
    except BenchOptionsError as error:
        raise BenchOptionsError(f"plan {path}: {error}") from None


def parse_plan(table: Mapping[str, Any]) -> SweepPlan:
    """Return the plan of a TOML table: lists, or single values for lists of one. Raises Refused."""
    known = {entry.name: entry for entry in fields(SweepPlan)}
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in known:
            hint = suggest(name, known) or f"; known are {', '.join(known)}"
            raise BenchOptionsError(f"{name!r} is not a key of a plan{hint}")
        values[name] = _value(name, value, isinstance(getattr(SweepPlan(), name), tuple))
    return check_plan(replace(SweepPlan(), **values))


def _value(name: str, value: Any, is_list: bool) -> Any:
    if is_list:
        given = value if isinstance(value, list | tuple) else [value]
        return tuple(_item(name, item) for item in given)
    if name == "device":
        return _item(name, value)
    wanted: tuple[type, ...] = (bool,) if name in ("symmetric", "check") else (int,)
    if name in ("case_seconds", "seconds"):
        wanted = (int, float)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise BenchOptionsError(f"{name} is {value!r}: expected {'true or false' if bool in wanted else 'a number'}")
    return value


def _item(name: str, item: Any) -> Any:
    if name == "sizes":
        return parse_size(str(item))
    if name in ("nodes", "ranks_per_node"):
        if item == "all":
            return ALL
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise BenchOptionsError(f"{name} has {item!r}: expected whole numbers, or 'all'")
        return item
    if not isinstance(item, str):
        raise BenchOptionsError(f"{name} has {item!r}: expected texts")
    return item


def check_plan(plan: SweepPlan) -> SweepPlan:
    """Return the plan without repeats. Raises Refused for unknown names and invalid numbers."""
    known = {"verbs": VERBS, "dtypes": DTYPES, "peers": PEERS, "places": PLACES}
    single: dict[str, Any] = {}
    for entry in fields(plan):
        value = getattr(plan, entry.name)
        if not isinstance(value, tuple):
            continue
        for item in value:
            if entry.name in known and item not in known[entry.name]:
                hint = suggest(item, known[entry.name]) or f"; known are {', '.join(known[entry.name])}"
                raise BenchOptionsError(f"{entry.name} has {item!r}{hint}")
        if not value and entry.name != "peers":
            raise BenchOptionsError(f"{entry.name} is empty: nothing would be measured")
        single[entry.name] = tuple(dict.fromkeys(value))
    if plan.device not in DEVICES:
        raise BenchOptionsError(f"device is {plan.device!r}: expected one of {', '.join(DEVICES)}")
    for peer in plan.peers:
        if (only_on := ONLY_ON.get(peer, plan.device)) != plan.device:
            raise BenchOptionsError(f"peers has {peer!r}, which is for device = {only_on!r}, not {plan.device!r}")
    for name, least in (("rounds", 1), ("iters", 1), ("warmup_iters", 0), ("case_seconds", 1), ("seconds", 0)):
        value = getattr(plan, name)
        if value is not None and value < least:
            raise BenchOptionsError(f"{name} is {value}: expected at least {least}")
    return replace(plan, **single)


def to_table(plan: SweepPlan) -> dict[str, Any]:
    """Return the plan for JSON; `parse_plan` reads it."""
    values = asdict(plan).items()
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values if value is not None}


def cases(plan: SweepPlan, ranks_of_nodes: Sequence[int]) -> tuple[list[SweepCase], list[str]]:
    """Return the cases in the order of measurement, and descriptions of worlds that the job is too small for.

    ranks_of_nodes: the number of ranks on each node of the job.
    """
    selected: dict[SweepCase, None] = {}
    unable: dict[str, None] = {}
    for planned_nodes in plan.nodes:
        nodes = planned_nodes or len(ranks_of_nodes)
        if nodes > len(ranks_of_nodes):
            unable[f"nodes = {nodes}: this job has {len(ranks_of_nodes)}"] = None
            continue
        most = min(ranks_of_nodes[:nodes])
        for planned_ranks in plan.ranks_per_node:
            ranks = planned_ranks or most
            if ranks > most:
                unable[f"ranks_per_node = {ranks} with nodes = {nodes}: the smallest of them has {most} here"] = None
                continue
            for verb in plan.verbs:
                selected.update(dict.fromkeys(_of_verb(plan, VERBS[verb], nodes, ranks)))
    return list(selected), list(unable)


def _of_verb(plan: SweepPlan, verb: BenchVerb, nodes: int, ranks: int) -> Iterator[SweepCase]:
    has_data = verb.name != "barrier"
    device = plan.device if has_data else "host"
    useless = {"pieces": verb.name != "all_reduce", "ordinary": not (has_data and plan.symmetric)}
    peers = tuple(peer for peer in plan.peers if not useless.get(peer))
    for algorithm in _algorithms(plan, verb):
        for dtype in plan.dtypes if has_data else ("",):
            for op in plan.ops if verb.reduces else ("",):
                for in_place in dict.fromkeys(_in_place(verb, place) for place in plan.places):
                    sizes = _distinct(plan.sizes, verb, dtype, nodes * ranks) if has_data else (0,)
                    for nbytes in sizes:
                        symmetric = plan.symmetric and has_data
                        yield SweepCase(
                            nodes,
                            ranks,
                            verb.name,
                            dtype,
                            op,
                            algorithm,
                            in_place,
                            symmetric,
                            nbytes,
                            peers,
                            device,
                        )


def _algorithms(plan: SweepPlan, verb: BenchVerb) -> tuple[str, ...]:
    if not verb.has_algorithms:
        return ("auto",)
    named = (("auto", *registry.algorithms(verb.name)) if name == EVERY else (name,) for name in plan.algorithms)
    return tuple(dict.fromkeys(name for names in named for name in names))


def _in_place(verb: BenchVerb, place: str) -> bool:
    """Return whether to call a verb in place, if the verb supports the requested place."""
    if place == "usual" or verb.in_place in ("only", "not"):
        return verb.in_place in ("usual", "only")
    return place == "in"


def _distinct(sizes: Sequence[int], verb: BenchVerb, dtype: str, ranks: int) -> tuple[int, ...]:
    """Return the sizes without repeats of one element per rank."""
    counts: dict[int, int] = {}
    for nbytes in sizes:
        elements = nbytes // NUMPY[dtype].itemsize
        counts.setdefault(verb.count(elements, ranks), nbytes)
    return tuple(counts.values())
