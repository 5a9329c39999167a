"""Chooser: select the algorithm that was fastest in measurements, else the fastest by the model."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from commlib.cost.model import DEFAULT, ETHERNET, Machine, best
from commlib.cost.records import MeasuredTime
from commlib.cost.table import Table, default_path, mpi_library
from commlib.errors import UsageError
from commlib.folders import NotPrivateError
from commlib.schedule import LinkCost, algorithms

LinkKind = Literal["node", "network"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen algorithm, its number of segments, and its expected seconds. source: "table" or "model"."""

    algorithm: str
    segments: int
    seconds: float
    source: str


class Chooser:
    """Chooses algorithms, the same on all ranks with the same machine and table.

    It reads no clock and measures nothing; ties go to the algorithm that was registered first. It caches its choices: a
    repeated query takes less than a microsecond.
    """

    def __init__(self, machine: Machine = DEFAULT, table: Table | None = None) -> None:
        self.machine, self.table = machine, table
        self._cached_choice = lru_cache(maxsize=4096)(self._choose)
        self._ranking = lru_cache(maxsize=1024)(self._rank)

    def choose(
        self,
        verb: str,
        size: int,
        nbytes: int,
        *,
        kind: LinkKind,
        sharing: int = 1,
        among: tuple[str, ...] | None = None,
    ) -> Choice:
        """Return the algorithm to run on `nbytes` of data (`cost.model` defines `nbytes` for each verb).

        size: the number of ranks that exchange messages. kind: "node" for shared memory of one node, "network" for one
        rank of each node. sharing: the number of such groups that share a node's network card and its bandwidth. among:
        the allowed algorithms, which may include ones known only to a table ("native"); None for all with a schedule.
        Raises UsageError for an invalid argument.
        """
        return self._cached_choice(verb, size, nbytes, kind, sharing, among)

    def measured(
        self, verb: str, nodes: int, ranks_per_node: int, nbytes: int, *, device: str
    ) -> tuple[MeasuredTime, ...]:
        """Return the measurements of calls on device arrays of this size, the fastest first.

        Empty if there are none, or beyond the largest measured size. nbytes: as for `choose`.
        """
        entry = self.table.find(verb, nodes, ranks_per_node, device=device) if self.table is not None else None
        return entry.competitors(nbytes) if entry is not None else ()

    def _choose(
        self, verb: str, size: int, nbytes: int, kind: LinkKind, sharing: int, among: tuple[str, ...] | None
    ) -> Choice:
        link = self._link(kind, sharing)
        measured = self._choose_measured(verb, size, nbytes, kind, sharing, among)
        if measured is not None:
            return measured
        # Sizes within a factor of two share a ranking, so a program with many sizes does not rank for each.
        ranking = self._ranking(verb, size, 1 << max(0, nbytes - 1).bit_length(), link)
        name = next((name for name in ranking if among is None or name in among), None)
        if name is None:
            raise UsageError(
                f"{verb}: none of {', '.join(among or ('()',))} has a schedule; "
                f"expected one of {', '.join(algorithms(verb))}"
            )
        segments, seconds = best(verb, name, size, nbytes, link, self.machine.gamma)
        return Choice(name, segments, seconds, "model")

    def _link(self, kind: str, sharing: int) -> LinkCost:
        if kind == "node":
            return self.machine.node
        if kind != "network":
            raise UsageError(f"kind must be 'node' or 'network', got {kind!r}")
        if sharing < 1:
            raise UsageError(f"sharing must be at least 1, got {sharing}")
        return LinkCost(self.machine.network.alpha, self.machine.network.beta * sharing)

    def _rank(self, verb: str, size: int, nbytes: int, link: LinkCost) -> tuple[str, ...]:
        """Return the algorithms of a verb, the fastest first."""
        times = {name: best(verb, name, size, nbytes, link, self.machine.gamma)[1] for name in algorithms(verb)}
        # Sorting is stable; times that differ only by rounding errors are ties.
        return tuple(sorted(times, key=lambda name: float(f"{times[name]:.9e}")))

    def _choose_measured(
        self, verb: str, size: int, nbytes: int, kind: LinkKind, sharing: int, among: tuple[str, ...] | None
    ) -> Choice | None:
        nodes, ranks_per_node = (1, size) if kind == "node" else (size, sharing)
        entry = self.table.find(verb, nodes, ranks_per_node) if self.table is not None and size > 1 else None
        for time in entry.competitors(nbytes) if entry is not None else ():
            if time.algorithm in (algorithms(verb) if among is None else among):
                segments = time.segments
                if not segments and time.algorithm in algorithms(verb):
                    link = self._link(kind, sharing)
                    segments, _ = best(verb, time.algorithm, size, nbytes, link, self.machine.gamma)
                # The entry also covers all smaller data, and a segment has at least a byte.
                return Choice(time.algorithm, max(1, min(segments, nbytes)), time.seconds, "table")
        return None


# Linux lists the cards of InfiniBand, RoCE, Omni-Path and EFA, and those of Slingshot, in these folders.
FABRICS = (Path("/sys/class/infiniband"), Path("/sys/class/cxi"))


def usual_machine() -> Machine:
    """Return the default parameters of this cluster, by the type of its network."""
    return DEFAULT if any(folder.is_dir() and any(folder.iterdir()) for folder in FABRICS) else ETHERNET


class TuningSettings(Protocol):
    """The settings that `Tuning` needs. `commlib.config.settings.Config` implements it."""

    @property
    def tuning_file(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Tuning:
    """The input of all choices. Rank 0 loads it and broadcasts it, so every rank chooses alike."""

    machine: Machine = DEFAULT
    table: Table | None = None

    @classmethod
    def load(cls, settings: TuningSettings) -> Tuning:
        """Read the table named by the settings, restricted to measurements with the loaded MPI library.

        "" is the default path: the file may be missing, but only this user may have written it. "none" means no table.
        Raises UsageError if the named file is missing or invalid.
        """
        named, default = settings.tuning_file, default_path()
        if named == "none" or not (named or os.path.exists(default)):
            return cls(usual_machine())
        try:
            table = Table.load(named or default, private=not named).of_library(mpi_library())
        except NotPrivateError as error:
            import logging

            logging.getLogger("commlib").warning(
                "the tuning table %s is ignored: %s. Set COMMLIB_TUNING_FILE=%s to use it, or =none to use none",
                default,
                error,
                default,
            )
            return cls(usual_machine())
        return cls(table.machines[0].machine if table.machines else usual_machine(), table)

    def to_bytes(self) -> bytes:
        """Return the tuning as bytes to send. Exact: JSON keeps every digit of a float."""
        table = None if self.table is None else self.table.to_dict()
        return json.dumps({"machine": asdict(self.machine), "table": table}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Tuning:
        """Return the tuning that `to_bytes` encoded."""
        content: dict[str, Any] = json.loads(data)
        machine, table = content["machine"], content["table"]
        return cls(
            Machine(LinkCost(**machine["node"]), LinkCost(**machine["network"]), machine["gamma"]),
            None if table is None else Table.from_dict(table),
        )
