"""Measuring, with ranks as threads: the times mean nothing, but all sizes are measured and all ranks agree."""

from __future__ import annotations

import pytest

from commlib.communicator import Communicator
from commlib.cost.chooser import Chooser
from commlib.cost.hierarchical import RAIL_BYTES
from commlib.cost.table import Table
from commlib.errors import UsageError
from commlib.schedule import algorithms
from commlib.tune import measure as module
from commlib.tune import stopwatch
from commlib.tune.measure import VERBS, measure
from commlib.tune.scopes import survey
from commlib.tune.stopwatch import Stopwatch
from tests.bodies import loopback


def places(nodes: list[int]) -> list[list[tuple[int, int, int]]]:
    """Return the places of each rank: (nodes, ranks per node, size of its own group or 0)."""

    def rank_main(comm: Communicator) -> list[tuple[int, int, int]]:
        places_ = survey(comm).places
        return [(p.nodes, p.ranks_per_node, p.group.size if p.group is not None else 0) for p in places_]

    return loopback.run(len(nodes), rank_main, nodes=nodes)


def test_one_node_has_one_place() -> None:
    assert places([0, 0, 0]) == [[(1, 3, 3)]] * 3


def test_single_ranks_have_one_place() -> None:
    assert places([0, 1, 2]) == [[(3, 1, 3)]] * 3


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 0, 1]])
def test_nodes_have_places_for_node_rail_and_rails(nodes: list[int]) -> None:
    """The node; the rail of its first rank; and both rails at once."""
    seen = places(nodes)
    for rank, node in enumerate(nodes):
        is_first = node not in nodes[:rank]
        assert seen[rank] == [(1, 2, 2), (2, 1, 2 if is_first else 0), (2, 2, 2)]


def test_the_first_of_uneven_nodes_represents_the_others() -> None:
    """There are as many rails as the smallest node has ranks."""
    first, second, beyond = [(1, 2, 2), (2, 1, 2), (2, 2, 2)], [(1, 2, 2), (2, 1, 0), (2, 2, 2)], (1, 2, 0)
    others = [[beyond, *first[1:]], [beyond, *second[1:]], [beyond, (2, 1, 0), (2, 2, 0)]]
    assert places([0, 0, 1, 1, 1]) == [first, second, *others]


def test_small_data_is_measured_on_one_rail_and_large_data_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIZES", (RAIL_BYTES // 4, RAIL_BYTES, RAIL_BYTES * 4))
    monkeypatch.setattr(stopwatch, "MOST_REPETITIONS", 0)
    monkeypatch.setattr(module, "VERBS", ("broadcast",))
    table = loopback.run(4, lambda comm: measure(comm, 1000.0), nodes=[0, 0, 1, 1])[0]
    measured = {(e.nodes, e.ranks_per_node): {time.up_to // 2 for time in e.times} for e in table.entries}
    assert measured[1, 2] == set(module.SIZES)
    assert measured[2, 1] == set(module.SIZES[:2])
    assert measured[2, 2] == set(module.SIZES[1:])


def check(tables: list[Table], expected: set[tuple[int, int]]) -> None:
    table = tables[0]
    assert all(other == table for other in tables)
    assert Table.from_dict(table.to_dict()) == table
    assert {(entry.nodes, entry.ranks_per_node) for entry in table.entries} == expected
    for entry in table.entries:
        names = {time.algorithm for time in entry.times}
        assert names >= set(algorithms(entry.verb)), entry
        assert "nccl" not in names  # refused algorithms are left out
        assert all(time.seconds > 0 for time in entry.times)
        for up_to in {time.up_to for time in entry.times}:
            assert {time.algorithm for time in entry.competitors(up_to)} == names
    assert {entry.verb for entry in table.entries} == set(VERBS)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [([0, 0], {(1, 2)}), ([0, 1], {(2, 1)}), ([0, 0, 1], {(1, 2), (2, 1)}), ([0, 0, 1, 1], {(1, 2), (2, 1)})],
)
def test_a_tiny_budget_gives_a_whole_table(nodes: list[int], expected: set[tuple[int, int]]) -> None:
    progress_: list[tuple[float, str]] = []

    def rank_main(comm: Communicator) -> Table:
        return measure(comm, 0.01, lambda *what: progress_.append(what) if comm.rank == 0 else None)

    tables = loopback.run(len(nodes), rank_main, nodes=nodes)
    check(tables, expected)
    machine = tables[0].machines[0]
    assert (machine.node is not None, machine.network is not None) == (any(n == 1 for n, _ in expected),
                                                                      any(n > 1 for n, _ in expected))  # fmt: skip
    assert progress_[0] == (0.0, "warming up") and progress_[-1] == (1.0, "done")
    assert any("all_gather bruck of 1024 bytes" in what for _, what in progress_)


def test_sizes_are_measured_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIZES", (1024, 4096))
    monkeypatch.setattr(stopwatch, "MOST_REPETITIONS", 2)
    table = loopback.run(2, lambda comm: measure(comm, 1000.0))[0]
    entry = table.find("broadcast", 1, 2)
    assert entry is not None
    assert {time.up_to for time in entry.times} == {2048, 8192}
    among = (*algorithms("broadcast"), "node")
    choice = Chooser(table.machines[0].machine, table).choose("broadcast", 2, 3000, kind="node", among=among)
    assert (choice.algorithm, choice.source) == (entry.competitors(4096)[0].algorithm, "table")


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="one rank sends no messages"):
        loopback.run(1, measure)
    with pytest.raises(UsageError, match="seconds must be positive, got 0"):
        loopback.run(2, lambda comm: measure(comm, 0))


def test_the_slowest_rank_counts_on_all_ranks() -> None:
    import time

    def rank_main(comm: Communicator) -> list[float]:
        watch = Stopwatch(comm, 1.0)
        return watch.times(None if comm.rank == 0 else lambda: time.sleep(0.02 * comm.rank), 2)

    first, *others = loopback.run(3, rank_main)
    assert all(seconds >= 0.04 for seconds in first)
    assert all(other == first for other in others)
