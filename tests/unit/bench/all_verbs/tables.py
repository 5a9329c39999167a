"""Records of `commlib bench all` with given figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

US = 1e-6
FACTS = {
    "date": "2026-11-29T14:00:00+00:00", "ranks": 2, "cores": 2, "cpu": "Some CPU", "load": 0.1, "mpi": "Some MPI 1",
    "hosts": ["one", "one"], "commit": "0123456789", "versions": {"commlib": "1"},
    "command": ["bench", "all", "--json", "all.json"],
}  # fmt: skip
SMALL_NOISE = (1.0, 1.01, 0.99, 1.005, 0.995, 1.01, 0.99, 1.0, 1.0)


def rounds(microseconds: float, noise: Sequence[float] = SMALL_NOISE) -> list[float]:
    """Return the seconds of nine rounds around a time."""
    return [microseconds * US * factor for factor in noise]


def row(
    seconds: Mapping[str, Sequence[float]],
    verb: str = "all_reduce",
    memory: str = "ordinary",
    nbytes: int = 4,
    wrong: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return a row of a record."""
    wrong = dict.fromkeys(seconds, 0) | dict(wrong or {})
    return {"verb": verb, "memory": memory, "bytes": nbytes, "size": nbytes, "seconds": dict(seconds), "wrong": wrong}


def record(*rows: dict[str, Any], forms: Sequence[str] = ("blocking",), **facts: Any) -> dict[str, Any]:
    """Return a record."""
    return {
        "benchmark": "commlib bench all",
        "facts": {**FACTS, **facts},
        "options": {"forms": list(forms)},
        "notes": [],
        "rows": list(rows),
    }
