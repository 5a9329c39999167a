"""`commlib bench all` on ranks: every cell is measured and right, and a wrong or failing one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from commlib.bench import commlib_contender, measure, session
from commlib.bench.all_verbs import cells, run
from commlib.bench.all_verbs.cells import find_cells
from commlib.bench.all_verbs.selection import ALL_VERBS, select
from commlib.errors import UsageError

pytestmark = pytest.mark.any_ranks


@pytest.fixture(autouse=True)
def short_bursts(monkeypatch):
    """No test here is about speed."""
    monkeypatch.setattr(measure, "BURST_SECONDS", 0.0005)
    monkeypatch.setattr(session, "FEWEST_ROUNDS", 2)


@pytest.fixture
def measured(comm, tmp_path):
    """Return a function that runs a selection: its result, and the cells of the file."""

    def measure_all(**options):
        path = comm.broadcast_object(tmp_path) / "all.json"
        result = run.run(select(json=path, rounds=2, **options))
        comm.barrier()
        return result, find_cells(cells.read(path))

    return measure_all


def test_every_verb_in_every_form(measured):
    (is_right, _), found = measured(sizes="4,16K", seconds=60)
    assert is_right and {cell.verb for cell in found} == set(ALL_VERBS)
    assert len(found) == (13 * 3 + 2) * 2 * 2 + 3
    assert {cell.status for cell in found} <= {"good", "slow"}
    assert all(cell.wrong == 0 and len(cell.ours) >= 2 and "mpi" in cell.peers for cell in found)
    assert all(("persistent" in cell.peers) == (cell.form == "planned") for cell in found)


def test_a_large_all_reduce_and_reduce_scatter_have_more_forms_of_mpi(measured):
    _, found = measured(verbs="all_reduce,reduce_scatter", sizes="64K,16M", memory="symmetric", forms="blocking")
    assert [(cell.verb, cell.nbytes, sorted(cell.peers)) for cell in found] == [
        ("all_reduce", 64 << 10, ["mpi"]),
        ("all_reduce", 16 << 20, ["mpi", "pieces"]),
        ("reduce_scatter", 64 << 10, ["block", "mpi"]),
        ("reduce_scatter", 16 << 20, ["block", "mpi"]),
    ]


def test_rows_without_time_are_unmeasured(measured):
    (is_right, is_fast), found = measured(verbs="scan,gather", sizes="4", seconds=1e-9)
    assert (is_right, is_fast) == (True, False) and {cell.status for cell in found} == {"unmeasured"}


def test_wrong_and_failing_calls_are_told(comm, measured, monkeypatch):
    correct = commlib_contender.call

    def broken(comm, case, **options):
        if options.get("plan"):
            raise UsageError("no plan today")
        run = correct(comm, case, **options)
        if not options.get("asynchronous"):
            return run

        def run_and_spoil():
            run()
            case.out[0] += 1

        return run_and_spoil

    monkeypatch.setattr(commlib_contender, "call", broken)
    (is_right, _), found = measured(verbs="all_reduce", sizes="4", memory="ordinary")
    assert not is_right
    status = {cell.form: cell.status for cell in found}
    assert (status["asynchronous"], status["planned"]) == ("wrong", "failed") and status["blocking"] in ("good", "slow")


def test_a_file_that_cannot_be_written_is_refused_first():
    with pytest.raises(UsageError, match="cannot write this file"):
        run.run(select(json=Path("/dev/null/x.json")))
