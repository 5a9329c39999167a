"""`commlib tune` ends with the sizes that it had no time to measure."""

from __future__ import annotations

from commlib.cli.tune import summary
from commlib.cost.hierarchical import RAIL_BYTES
from commlib.cost.records import Entry, FittedMachine, MeasuredTime
from commlib.cost.table import Table
from commlib.schedule import LinkCost
from commlib.tune.measure import SIZES


def table(*reached: tuple[str, int, int, int]) -> Table:
    """Return a table measured up to the given sizes: verb, nodes, ranks per node, largest size."""
    entries = (
        Entry(v, n, r, "Some MPI", "any", (MeasuredTime(2 * size, "ring", 0, 1e-5),)) for v, n, r, size in reached
    )
    return Table(tuple(entries), (FittedMachine("Some MPI", LinkCost(1e-6, 1e-10), None, 1e-10),))


def test_unmeasured_sizes_are_named() -> None:
    text = summary(table(("all_reduce", 1, 2, 1 << 20), ("all_gather", 1, 2, 1 << 16), ("all_reduce", 4, 1, 1024)))
    assert text.split("\n\n")[-1].splitlines() == [
        "among the 2 ranks of a node: no time for all beyond 64K",
        "between 4 nodes, one rank of each: no time for all beyond 1K",
        "the model decides for those: more --seconds measure them",
    ]


def test_a_complete_table_gives_no_notice() -> None:
    """One rail among several carries small data only, and is measured with small data only."""
    whole = [("all_reduce", 1, 2, SIZES[-1]), ("all_reduce", 4, 1, RAIL_BYTES), ("all_reduce", 4, 2, SIZES[-1])]
    assert "no time" not in summary(table(*whole))


def test_device_paths_have_their_own_table() -> None:
    times = (
        MeasuredTime(2048, "nccl", 0, 1e-5),
        MeasuredTime(2048, "host", 0, 3e-4),
        MeasuredTime(1 << 30, "host", 0, 1e-2),
    )
    text = summary(Table((Entry("all_reduce", 2, 4, "Some MPI", "any", times, "cuda"),)))
    assert text.split("\n\n")[0] == "arrays on cuda, among all ranks of 2 nodes, up to 4 on each"
    rows = [line.split() for line in text.split("\n\n")[1].splitlines()]
    assert rows == [["all_reduce", "fastest", "took", "next", "took"],
                    ["1K", "nccl", "10.0", "us", "host", "300", "us"],
                    ["512M", "host", "10.0", "ms", "-"]]  # fmt: skip
    assert "no time" not in text


def test_unmeasured_device_paths_keep_their_order() -> None:
    entry = Entry("all_reduce", 1, 4, "Some MPI", "any", (MeasuredTime(2048, "node", 0, 1e-5),), "cuda")
    assert summary(Table((entry,))).split("\n\n")[-1].splitlines() == [
        "arrays on cuda, among the 4 ranks of a node: no time for all beyond 1K",
        "the order of the paths decides for those: more --seconds measure them",
    ]
