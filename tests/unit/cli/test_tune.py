"""What `commlib tune` says at the end."""

from __future__ import annotations

from commlib.cli.tune import summary
from commlib.schedule import Link
from commlib.tune.entries import Entry, Fitted, Measured
from commlib.tune.measure import SIZES
from commlib.tune.table import Table


def table(*reached: tuple[str, int]) -> Table:
    entries = (Entry(v, 1, 2, "Some MPI", "any", (Measured(2 * n, "ring", 0, 1e-5),)) for v, n in reached)
    return Table(tuple(entries), (Fitted("Some MPI", Link(1e-6, 1e-10), None, 1e-10),))


def test_sizes_for_which_there_was_no_time_are_named() -> None:
    text = summary(table(("all_reduce", 1 << 20), ("all_gather", 1 << 20), ("all_to_all", 1 << 16)))
    assert "there was no time for all_reduce, all_gather beyond 1M; all_to_all beyond 64K\n" in text


def test_nothing_is_said_of_a_complete_table() -> None:
    assert "no time" not in summary(table(("all_reduce", SIZES[-1])))
