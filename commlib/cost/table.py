"""Table: times measured on a cluster, and their file.

    {"format": 1,
     "machines": [{"library": "Open MPI 5.0",
                   "node": {"alpha": 5e-06, "beta": 2e-10}, "network": null, "gamma": 1.2e-10}],
     "entries":  [{"verb": "all_reduce", "nodes": 1, "ranks_per_node": 8, "library": "Open MPI 5.0", "item_size": "any",
                   "times": [{"up_to": 32768, "algorithm": "ring", "segments": 0, "seconds": 1.2e-05}, ...]}]}

`nodes` is the number of ranks that exchange messages, one of each node, and `ranks_per_node` such groups share its
network card; on one node, `ranks_per_node` ranks exchange messages. An entry with a "device" is for arrays of that
device and for whole calls among all ranks: on `nodes` nodes, the largest with `ranks_per_node` ranks. All times of
an entry with the same `up_to` compete. segments: 0 leaves the number to the model.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from commlib import folders
from commlib.cost.records import Entry, FittedMachine, items, mapping, read_entry, read_fitted
from commlib.errors import UsageError
from commlib.folders import NotPrivateError

FORMAT = 1
_MOST_BYTES = 64 << 20  # a thousand entries take 3 MiB


@dataclass(frozen=True, slots=True)
class Table:
    """The measurements: entries and fitted machines, one for each key."""

    entries: tuple[Entry, ...] = ()
    machines: tuple[FittedMachine, ...] = ()

    def find(
        self, verb: str, nodes: int, ranks_per_node: int, item_size: int | None = None, *, device: str = ""
    ) -> Entry | None:
        """Return the entry for a scope and a device: the one for this item size, else the one for any size."""
        wanted = verb, nodes, ranks_per_node, device
        fits = [e for e in self.entries if (e.verb, e.nodes, e.ranks_per_node, e.device) == wanted]
        return next((e for size in (item_size, "any") for e in fits if e.item_size == size), None)

    def of_library(self, library: str) -> Table:
        """Return the measurements with one MPI library."""
        return Table(
            tuple(entry for entry in self.entries if entry.library == library),
            tuple(machine for machine in self.machines if machine.library == library),
        )

    def updated(self, newer: Table) -> Table:
        """Return both tables merged; the newer wins for equal keys, but keeps older links that it did not measure."""
        machines = {old.library: old for old in self.machines}
        for new in newer.machines:
            old = machines.get(new.library, new)
            machines[new.library] = FittedMachine(
                new.library, new.node or old.node, new.network or old.network, new.gamma
            )
        entries = {entry.key: entry for entry in (*self.entries, *newer.entries)}
        return Table(tuple(entries.values()), tuple(machines.values()))

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON-compatible values, for `from_dict`."""
        return {
            "format": FORMAT,
            "machines": [asdict(machine) for machine in self.machines],
            "entries": [asdict(entry) | {"times": list(map(asdict, entry.times))} for entry in self.entries],
        }

    @classmethod
    def from_dict(cls, data: Any, where: str = "tuning table") -> Table:
        """Validate and return a table. Raises UsageError, which names the location."""
        version = mapping(data, where).get("format")
        if version != FORMAT:
            raise UsageError(
                f"{where} has format {version!r}, but this version reads {FORMAT}: run 'commlib tune' again"
            )
        return cls(
            tuple(read_entry(item, f"{where}: entries[{i}]") for i, item in enumerate(items(data, "entries", where))),
            tuple(
                read_fitted(item, f"{where}: machines[{i}]") for i, item in enumerate(items(data, "machines", where))
            ),
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, private: bool = False) -> Table:
        """Read a file. Raises UsageError if it cannot be read or is not a table.

        private: raise NotPrivateError if another user could have changed it.
        """
        try:
            data = json.loads(_read_private(Path(path)) if private else _read(path))
        except NotPrivateError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(
                f"cannot read the tuning table {path} ({error}): run 'commlib tune', or set COMMLIB_TUNING_FILE=none"
            ) from error
        return cls.from_dict(data, f"tuning table {path}")

    def save(self, path: str | os.PathLike[str], *, private: bool = False) -> None:
        """Write a file atomically. Raises UsageError if it cannot be written.

        private: refuse a folder that another user can change, and make the file readable for this user only.
        """
        target = Path(path)
        content = json.dumps(self.to_dict(), indent=1) + "\n"
        temporary = target.with_name(f"{target.name}.{os.getpid()}")
        try:
            if private:
                with folders.open_private(target.parent, create=True) as here:
                    folders.write_private(target.name, here, content.encode())
                return
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(content, encoding="utf-8")
            temporary.replace(target)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise UsageError(f"cannot write the tuning table {path} ({error})") from error


def _read(path: str | os.PathLike[str]) -> str:
    with open(path, "rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
    return data.decode()


def _read_private(path: Path) -> str:
    with folders.open_private(path.parent) as here:
        return folders.read_private(path.name, here).decode()


def default_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the default location of tables: commlib/tuning.json in the user's cache folder."""
    return folders.user_cache(environment) / "tuning.json"


def mpi_library() -> str:
    """Return name and version (major.minor) of the MPI library loaded in this process, "" if there is none."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return ""
    name, version = mpi.get_vendor()
    return f"{name} {'.'.join(map(str, version[:2]))}"
