"""Measurements over MPI: they yield a table of choices."""

from __future__ import annotations

import pytest

from commlib.cost.chooser import Chooser, Tuning
from commlib.cost.table import Table, mpi_library
from commlib.schedule import algorithms
from commlib.tune.measure import VERBS, measure

pytestmark = [pytest.mark.any_mpi, pytest.mark.any_ranks]


@pytest.mark.ranks(min=2)
def test_a_measured_table_determines_choices(comm, tmp_path):
    table = measure(comm, 0.2)
    assert len(set(comm.all_gather_object(Tuning(table=table).to_bytes()))) == 1  # all ranks have the same

    table.save(tmp_path / "tuning.json")
    assert Table.load(tmp_path / "tuning.json") == table
    (machine,) = table.machines
    assert machine.library == mpi_library() != ""
    assert machine.node is not None and machine.network is None  # the tests run on one node
    assert machine.node.alpha > 0 or machine.node.beta > 0

    chooser = Chooser(machine.machine, table.of_library(mpi_library()))
    for verb in VERBS:
        entry = table.find(verb, 1, comm.size)
        assert entry is not None
        names = {time.algorithm for time in entry.times}
        assert names >= set(algorithms(verb))
        fastest = next(time for time in entry.competitors(1024) if time.algorithm in algorithms(verb))
        choice = chooser.choose(verb, comm.size, 1024, kind="node")
        assert (choice.algorithm, choice.seconds, choice.source) == (fastest.algorithm, fastest.seconds, "table")
        assert "native" in names or verb != "all_reduce"
