"""Runs: the results of one file as shown on a page, with an entry for each case."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from commlib.bench.options import BenchOptionsError
from commlib.bench.rows import OURS, BenchRow
from commlib.bench.sweep import results
from commlib.bench.sweep.plan import SweepCase


@dataclass(frozen=True, slots=True)
class CaseEntry:
    """One measured case. seconds: of each contender, one figure per round. share: of the bound, or None.

    environment: the number of the environment that it was measured in.
    """

    case: SweepCase
    seconds: dict[str, list[float]]
    busbw: dict[str, float]
    bound: float | None
    share: float | None
    is_wrong: bool
    nbytes: int
    row: BenchRow
    environment: int

    @property
    def rounds(self) -> int:
        """The number of rounds of every contender."""
        return min(map(len, self.seconds.values()))

    def time(self, name: str = OURS) -> float:
        """Return the median of the rounds, in seconds."""
        return statistics.median(self.seconds[name])

    def ratio(self, peer: str) -> float | None:
        """Return the peer's time divided by commlib's, or None if it was not measured."""
        return self.time(peer) / self.time() if peer in self.seconds else None


def middle_range(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the middle 80 % of the rounds."""
    times = sorted(seconds)
    cut = round(0.1 * (len(times) - 1))
    return times[cut], times[-1 - cut]


@dataclass(frozen=True, slots=True)
class UnmeasuredCase:
    """A case without figures, and the reason."""

    case: SweepCase
    status: str
    reason: str


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One file. environments: its environment lines; steps: lines of `commlib bench step`."""

    name: str
    environments: list[dict[str, Any]]
    entries: list[CaseEntry]
    unmeasured: list[UnmeasuredCase]
    steps: list[dict[str, Any]]
    notes: list[str]

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the last environment, in which most cases were measured."""
        result: dict[str, Any] = self.environments[-1]["facts"]
        return result

    @property
    def peers(self) -> list[str]:
        """Every peer measured with any case."""
        return list(dict.fromkeys(name for entry in self.entries for name in entry.seconds if name != OURS))


def read(path: Path) -> BenchRun:
    """Return the run of a file: JSON lines of a sweep, or the JSON of `commlib bench VERB --out`. Raises Refused."""
    if path.suffix == ".json":
        return _of_one_verb(path)
    sweep = results.read(path)
    try:
        return _of_sweep(path, sweep)
    except (KeyError, TypeError, ValueError) as error:
        raise BenchOptionsError(f"{path}: a case lacks a field that this version needs: {error!r}") from None


def _of_sweep(path: Path, sweep: results.SweepResults) -> BenchRun:
    lines = sweep.cases.values()
    measured = [line for line in lines if line["row"] is not None]
    entries = [_entry(_case(line["case"]), line["row"], line["environment"]) for line in measured]
    unmeasured = [
        UnmeasuredCase(_case(line["case"]), line["status"], line["reason"]) for line in lines if line["row"] is None
    ]
    notes = list(dict.fromkeys(note for line in lines for note in line["notes"]))
    if sweep.torn:
        notes.append(
            "The file ends with an incomplete line, which is ignored: the run was killed, or is still running."
        )
    return BenchRun(_name(path), sweep.environments, entries, unmeasured, list(sweep.steps.values()), notes)


def _name(path: Path) -> str:
    return path.name.removesuffix(".jsonl").removesuffix(".json")


def _case(values: dict[str, Any]) -> SweepCase:
    known = {"device": "host", **values, "peers": tuple(values["peers"])}  # older files have no device
    return SweepCase(**{entry.name: known[entry.name] for entry in fields(SweepCase)})


def _entry(case: SweepCase, row: dict[str, Any], environment: int = 0) -> CaseEntry:
    wrong = row["wrong"] or {}
    return CaseEntry(
        case=case,
        seconds=row["seconds"],
        busbw={name: figures["busbw"] for name, figures in row["figures"].items()},
        bound=min(row["bound_seconds"]) if row["of_bound"] is not None else None,
        share=row["of_bound"],
        is_wrong=wrong.get(OURS, 0) > 0,
        nbytes=row["size"],
        environment=environment,
        row=BenchRow(**{entry.name: row[entry.name] for entry in fields(BenchRow) if entry.name in row}),
    )


def _of_one_verb(path: Path) -> BenchRun:
    try:
        content = json.loads(path.read_text())
        facts, options, rows = content["facts"], content["options"], content["rows"]
        nodes = len(dict.fromkeys(facts["hosts"]))
        entries = [
            _entry(
                SweepCase(
                    nodes=nodes,
                    ranks_per_node=facts["ranks"] // nodes,
                    verb=row["verb"],
                    dtype=row["dtype"],
                    op=row["op"],
                    algorithm=options["algorithm"],
                    in_place=bool(row["in_place"]),
                    symmetric=options["symmetric"],
                    nbytes=row["size"],
                    peers=tuple(options["peers"]),
                    device=options.get("device", "host"),
                ),
                row,
            )
            for row in rows
        ]
    except OSError as error:
        raise BenchOptionsError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BenchOptionsError(f"{path}: expected the JSON of `commlib bench VERB --out`: {error!r}") from None
    environment = {"facts": facts, "plan": options}
    return BenchRun(_name(path), [environment], entries, [], [], content["notes"])
