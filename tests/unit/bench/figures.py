"""Rows with given figures."""

from __future__ import annotations

from typing import Any

from commlib.bench.options import BenchOptions, check
from commlib.bench.rows import BenchRow


def row(verb: str = "all_reduce", **changes: Any) -> BenchRow:
    """A row of 1 MiB on 4 ranks: 100 us, MPI 250 us, a pass over memory 80 us at best."""
    values: dict[str, Any] = {
        "verb": verb,
        "ranks": 4,
        "dtype": "float32",
        "op": "sum",
        "root": None,
        "size": 1 << 20,
        "count": 1 << 18,
        "seconds": {"commlib": [90e-6, 100e-6, 300e-6], "mpi": [250e-6, 260e-6, 200e-6]},
        "wrong": {"commlib": 0, "mpi": 0},
        "bound_seconds": [120e-6, 80e-6, 90e-6],
        **changes,
    }
    return BenchRow(**values)


def settings(verb: str = "all_reduce", **changes: Any) -> Any:
    return check(BenchOptions(verb, **changes), ranks=4)
