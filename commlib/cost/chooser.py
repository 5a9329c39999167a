"""Chooser: picks the algorithm that was fastest here, else the fastest by the model."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from commlib.cost.model import DEFAULT, ETHERNET, Machine, best
from commlib.cost.records import Measured
from commlib.cost.table import Table, default_path, mpi_library
from commlib.errors import UsageError
from commlib.folders import NotPrivateError
from commlib.schedule import Link, algorithms

Kind = Literal["node", "network"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Hold an algorithm, its number of segments, the expected seconds, and the source of that: "table" or "model"."""

    algorithm: str
    segments: int
    seconds: float
    source: str


class Chooser:
    """Chooses algorithms, the same on all ranks that have the same machine and table.

    It looks at no clock and measures nothing; ties go to the algorithm that was registered first. What was chosen is
    remembered, so that asking again takes less than a microsecond.
    """

    def __init__(self, machine: Machine = DEFAULT, table: Table | None = None) -> None:
        self.machine, self.table = machine, table
        self._remembered = lru_cache(maxsize=4096)(self._choose)
        self._ranking = lru_cache(maxsize=1024)(self._rank)

    def choose(
        self,
        verb: str,
        size: int,
        nbytes: int,
        *,
        kind: Kind,
        sharing: int = 1,
        among: tuple[str, ...] | None = None,
    ) -> Choice:
        """Return what to run on `nbytes` of data (see `tune.model` for what that is of each verb).

        size: ranks that exchange messages. kind: over memory of one node, or over the network, one rank of each node.
        sharing: how many such groups share a node's network card, and so its bandwidth. among: the algorithms that are
        allowed, which may be such as only a table knows ("native"); None for all that have a schedule. Raises
        UsageError for a bad argument.
        """
        return self._remembered(verb, size, nbytes, kind, sharing, among)

    def measured(self, verb: str, nodes: int, ranks_per_node: int, nbytes: int, *, device: str) -> tuple[Measured, ...]:
        """Return what was measured of calls on arrays of a kind of device, of this size, the fastest first.

        Nothing where nothing was, and beyond the largest size that was. nbytes: as for `choose`.
        """
        entry = self.table.find(verb, nodes, ranks_per_node, device=device) if self.table is not None else None
        return entry.competitors(nbytes) if entry is not None else ()

    def _choose(
        self, verb: str, size: int, nbytes: int, kind: Kind, sharing: int, among: tuple[str, ...] | None
    ) -> Choice:
        link = self._link(kind, sharing)
        measured = self._measured(verb, size, nbytes, kind, sharing, among)
        if measured is not None:
            return measured
        # Sizes within a factor of two are ranked alike, so that a program with many sizes does not pay for each.
        ranking = self._ranking(verb, size, 1 << max(0, nbytes - 1).bit_length(), link)
        name = next((name for name in ranking if among is None or name in among), None)
        if name is None:
            raise UsageError(
                f"none of {', '.join(among or ('()',))} is an algorithm of {verb} that has a schedule; "
                f"those are {', '.join(algorithms(verb))}"
            )
        segments, seconds = best(verb, name, size, nbytes, link, self.machine.gamma)
        return Choice(name, segments, seconds, "model")

    def _link(self, kind: str, sharing: int) -> Link:
        if kind == "node":
            return self.machine.node
        if kind != "network":
            raise UsageError(f"kind must be 'node' or 'network', got {kind!r}")
        if sharing < 1:
            raise UsageError(f"sharing must be at least 1, got {sharing}")
        return Link(self.machine.network.alpha, self.machine.network.beta * sharing)

    def _rank(self, verb: str, size: int, nbytes: int, link: Link) -> tuple[str, ...]:
        """Return the algorithms of a verb, the fastest first."""
        times = {name: best(verb, name, size, nbytes, link, self.machine.gamma)[1] for name in algorithms(verb)}
        # Sorting is stable, and what differs by a rounding error only is a tie.
        return tuple(sorted(times, key=lambda name: float(f"{times[name]:.9e}")))

    def _measured(
        self, verb: str, size: int, nbytes: int, kind: Kind, sharing: int, among: tuple[str, ...] | None
    ) -> Choice | None:
        nodes, ranks_per_node = (1, size) if kind == "node" else (size, sharing)
        entry = self.table.find(verb, nodes, ranks_per_node) if self.table is not None and size > 1 else None
        for time in entry.competitors(nbytes) if entry is not None else ():
            if time.algorithm in (algorithms(verb) if among is None else among):
                segments = time.segments
                if not segments and time.algorithm in algorithms(verb):
                    link = self._link(kind, sharing)
                    segments, _ = best(verb, time.algorithm, size, nbytes, link, self.machine.gamma)
                # The entry stands for all smaller data as well, and a segment has at least a byte.
                return Choice(time.algorithm, max(1, min(segments, nbytes)), time.seconds, "table")
        return None


# Where Linux lists the cards of InfiniBand, RoCE, Omni-Path and EFA, and those of Slingshot.
FABRICS = (Path("/sys/class/infiniband"), Path("/sys/class/cxi"))


def usual_machine() -> Machine:
    """Return what is assumed of this cluster while nothing has been measured: by the kind of its network."""
    return DEFAULT if any(folder.is_dir() and any(folder.iterdir()) for folder in FABRICS) else ETHERNET


class Settings(Protocol):
    """Name what a `Tuning` asks of the settings (`commlib.config.settings.Config` has it)."""

    @property
    def tuning_file(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Tuning:
    """Hold what choices depend on. Rank 0 loads it and sends it to all, so that every rank chooses alike."""

    machine: Machine = DEFAULT
    table: Table | None = None

    @classmethod
    def load(cls, settings: Settings) -> Tuning:
        """Read the table that the settings name, as far as it was measured with the MPI library that is loaded.

        "" is the default path, where there need not be any, and nobody but this user may have written; "none" is no
        table. Raises UsageError for a file that is asked for and missing, or broken.
        """
        named, default = settings.tuning_file, default_path()
        if named == "none" or not (named or os.path.exists(default)):
            return cls(usual_machine())
        try:
            table = Table.load(named or default, private=not named).of_library(mpi_library())
        except NotPrivateError as error:
            import logging

            logging.getLogger("commlib").warning(
                "the tuning table %s is not used: %s. COMMLIB_TUNING_FILE=%s uses it all the same, and =none uses none",
                default,
                error,
                default,
            )
            return cls(usual_machine())
        return cls(table.machines[0].machine if table.machines else usual_machine(), table)

    def to_bytes(self) -> bytes:
        """Return it for sending. Exact: JSON keeps every digit of a float."""
        table = None if self.table is None else self.table.to_dict()
        return json.dumps({"machine": asdict(self.machine), "table": table}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Tuning:
        """Return what `to_bytes` was called on."""
        content: dict[str, Any] = json.loads(data)
        machine, table = content["machine"], content["table"]
        return cls(
            Machine(Link(**machine["node"]), Link(**machine["network"]), machine["gamma"]),
            None if table is None else Table.from_dict(table),
        )
