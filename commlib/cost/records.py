"""Records: the measured times in a table, read from JSON and validated. Errors name the location."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, TypeVar

from commlib.arguments import suggest
from commlib.cost.model import DEFAULT, Machine
from commlib.errors import UsageError
from commlib.schedule import LinkCost, algorithms

BEYOND_SCHEDULES = ("node", "native", "nccl", "hierarchical", "host")
"""Names of algorithms without a schedule, and of paths for device arrays."""

# Limits far beyond any cluster and any useful value. Building a program with so many segments takes seconds; a rank is
# a C int in MPI.
MOST_SEGMENTS = 1 << 16
_MOST_BYTES, _MOST_RANKS, _MOST_SECONDS, _MOST_SECONDS_PER_BYTE = (1 << 63) - 1, (1 << 31) - 1, 1e6, 1.0

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class MeasuredTime:
    """A measurement: for data of up to `up_to` bytes, above the next smaller entry, `algorithm` took `seconds`."""

    up_to: int
    algorithm: str
    segments: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Entry:
    """The measured times of one verb in one scope, in ascending order of `up_to`, then of `seconds`.

    library: the MPI library, as `mpi_library` writes it. item_size: bytes of an element, or "any". device: the kind of
    device with the arrays, "" for host memory.
    """

    verb: str
    nodes: int
    ranks_per_node: int
    library: str
    item_size: int | str
    times: tuple[MeasuredTime, ...]
    device: str = ""

    @property
    def key(self) -> tuple[str, int, int, str, int | str, str]:
        return self.verb, self.nodes, self.ranks_per_node, self.library, self.item_size, self.device

    def competitors(self, nbytes: int) -> tuple[MeasuredTime, ...]:
        """Return the measurements for data of this size, the fastest first; none beyond the largest measured size."""
        for up_to, times in groupby(self.times, lambda time: time.up_to):
            if nbytes <= up_to:
                return tuple(times)
        return ()


@dataclass(frozen=True, slots=True)
class FittedMachine:
    """The measured parameters of a machine with one MPI library. network: None if there was one node."""

    library: str
    node: LinkCost | None
    network: LinkCost | None
    gamma: float

    @property
    def machine(self) -> Machine:
        """The machine, with default values for the parameters that were not measured."""
        return Machine(self.node or DEFAULT.node, self.network or DEFAULT.network, self.gamma)


def mapping(data: Any, where: str) -> dict[str, Any]:
    """Return a JSON object. Raises UsageError for any other value."""
    if not isinstance(data, dict):
        raise UsageError(f"{where}: expected an object, got {data!r:.60}")
    return data


def items(data: dict[str, Any], name: str, where: str) -> list[Any]:
    """Return the list under a name of an object. Raises UsageError if there is none."""
    entries = data.get(name)
    if not isinstance(entries, list):
        raise UsageError(f"{where}: expected a list {name!r}, got {entries!r:.60}")
    return entries


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
    """Validate and return one entry. Raises UsageError."""
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


def _measured(data: Any, known: tuple[str, ...], where: str) -> MeasuredTime:
    data = mapping(data, where)
    name = _text(data, "algorithm", where)
    if name not in known:
        raise UsageError(f"{where}: unknown algorithm {name!r}; known are {', '.join(known)}{suggest(name, known)}")
    return MeasuredTime(
        _number(data, "up_to", where, least=0, most=_MOST_BYTES, kind=int),
        name,
        _number(data, "segments", where, least=0, most=MOST_SEGMENTS, kind=int),
        _number(data, "seconds", where, least=0, most=_MOST_SECONDS, kind=float),
    )


def _link(data: Any, where: str) -> LinkCost | None:
    if data is None:
        return None
    data = mapping(data, where)
    most = {"alpha": _MOST_SECONDS, "beta": _MOST_SECONDS_PER_BYTE}
    return LinkCost(*(_number(data, f.name, where, least=0, most=most[f.name], kind=float) for f in fields(LinkCost)))


def read_fitted(data: Any, where: str) -> FittedMachine:
    """Validate and return one machine. Raises UsageError."""
    data = mapping(data, where)
    return FittedMachine(
        _text(data, "library", where),
        _link(data.get("node"), f"{where}: node"),
        _link(data.get("network"), f"{where}: network"),
        _number(data, "gamma", where, least=0, most=_MOST_SECONDS_PER_BYTE, kind=float),
    )
