"""Records: hold a table's measured times. Each part is read from JSON and checked, with words that say where."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, TypeVar

from commlib.cost.model import DEFAULT, Machine
from commlib.errors import UsageError
from commlib.schedule import Link, algorithms

BEYOND_SCHEDULES = ("node", "native", "nccl", "hierarchical", "host")
"""Names of algorithms that have no schedule, and of ways of devices' arrays."""

# What no cluster has, far beyond what is of use. A program of so many segments takes seconds to make; the number of a
# rank is a C int in MPI.
MOST_SEGMENTS = 1 << 16
_MOST_BYTES, _MOST_RANKS, _MOST_SECONDS, _MOST_SECONDS_PER_BYTE = (1 << 63) - 1, (1 << 31) - 1, 1e6, 1.0

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class Measured:
    """For data of up to `up_to` bytes (and above the next smaller one's), `algorithm` took `seconds`."""

    up_to: int
    algorithm: str
    segments: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Entry:
    """Hold measured times of one verb in one place, in ascending order of `up_to`, then of `seconds`.

    library: the MPI library, as `mpi_library` writes it. item_size: bytes of an element, or "any". device: the kind of
    device that has the arrays, "" for the host.
    """

    verb: str
    nodes: int
    ranks_per_node: int
    library: str
    item_size: int | str
    times: tuple[Measured, ...]
    device: str = ""

    @property
    def key(self) -> tuple[str, int, int, str, int | str, str]:
        return self.verb, self.nodes, self.ranks_per_node, self.library, self.item_size, self.device

    def competitors(self, nbytes: int) -> tuple[Measured, ...]:
        """Return what was measured for data of this size, the fastest first; nothing beyond what was measured."""
        for up_to, times in groupby(self.times, lambda time: time.up_to):
            if nbytes <= up_to:
                return tuple(times)
        return ()


@dataclass(frozen=True, slots=True)
class Fitted:
    """Hold the measured figures of a machine with one MPI library. network: None where there was one node."""

    library: str
    node: Link | None
    network: Link | None
    gamma: float

    @property
    def machine(self) -> Machine:
        """The machine, with the usual values for what was not measured."""
        return Machine(self.node or DEFAULT.node, self.network or DEFAULT.network, self.gamma)


def mapping(data: Any, where: str) -> dict[str, Any]:
    """Return a JSON object. Raises UsageError."""
    if not isinstance(data, dict):
        raise UsageError(f"{where}: expected an object, got {data!r:.60}")
    return data


def items(data: dict[str, Any], name: str, where: str) -> list[Any]:
    """Return the list that an object has under a name. Raises UsageError."""
    found = data.get(name)
    if not isinstance(found, list):
        raise UsageError(f"{where}: expected a list {name!r}, got {found!r:.60}")
    return found


def _number(data: dict[str, Any], name: str, where: str, *, least: float, most: float, kind: type[T]) -> T:
    value: Any = data.get(name)
    fits = isinstance(value, int | kind) and not isinstance(value, bool)
    if not (fits and least <= value < float("inf")):
        raise UsageError(f"{where}: {name} must be a number ({kind.__name__}) of at least {least}, got {value!r:.60}")
    if value > most:
        raise UsageError(f"{where}: {name} must be at most {most}, got {value!r:.60}")
    return kind(value)


def _text(data: dict[str, Any], name: str, where: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise UsageError(f"{where}: {name} must be a string, got {value!r:.60}")
    return value


def read_entry(data: Any, where: str) -> Entry:
    """Check and return one entry. Raises UsageError."""
    data = mapping(data, where)
    verb = _text(data, "verb", where)
    known = (*algorithms(verb), *BEYOND_SCHEDULES)
    times = tuple(_measured(item, known, f"{where}: times[{i}]") for i, item in enumerate(items(data, "times", where)))
    size = data.get("item_size")
    return Entry(
        verb,
        _number(data, "nodes", where, least=1, most=_MOST_RANKS, kind=int),
        _number(data, "ranks_per_node", where, least=1, most=_MOST_RANKS, kind=int),
        _text(data, "library", where),
        "any" if size == "any" else _number(data, "item_size", where, least=1, most=_MOST_BYTES, kind=int),
        tuple(sorted(times, key=lambda time: (time.up_to, time.seconds))),
        _text(data, "device", where) if "device" in data else "",
    )


def _measured(data: Any, known: tuple[str, ...], where: str) -> Measured:
    data = mapping(data, where)
    name = _text(data, "algorithm", where)
    if name not in known:
        raise UsageError(f"{where}: unknown algorithm {name!r}; known are {', '.join(known)}")
    return Measured(
        _number(data, "up_to", where, least=0, most=_MOST_BYTES, kind=int),
        name,
        _number(data, "segments", where, least=0, most=MOST_SEGMENTS, kind=int),
        _number(data, "seconds", where, least=0, most=_MOST_SECONDS, kind=float),
    )


def _link(data: Any, where: str) -> Link | None:
    if data is None:
        return None
    data = mapping(data, where)
    most = {"alpha": _MOST_SECONDS, "beta": _MOST_SECONDS_PER_BYTE}
    return Link(*(_number(data, f.name, where, least=0, most=most[f.name], kind=float) for f in fields(Link)))


def read_fitted(data: Any, where: str) -> Fitted:
    """Check and return one machine. Raises UsageError."""
    data = mapping(data, where)
    return Fitted(
        _text(data, "library", where),
        _link(data.get("node"), f"{where}: node"),
        _link(data.get("network"), f"{where}: network"),
        _number(data, "gamma", where, least=0, most=_MOST_SECONDS_PER_BYTE, kind=float),
    )
