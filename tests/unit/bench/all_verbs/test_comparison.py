"""`commlib bench compare`: a cell that regressed by 10 % is found, and noise that could hide it is told."""

from __future__ import annotations

import json

import pytest

from commlib.bench.all_verbs import comparison
from commlib.bench.all_verbs.comparison import compare, judge, median_interval
from commlib.bench.options import BenchOptionsError
from commlib.cli import main
from tests.unit.bench.all_verbs.tables import record, rounds, row

WIDE_NOISE = (1.0, 1.2, 0.85, 1.15, 0.8, 1.1, 0.9, 1.25, 0.8)
SIZES = (4, 64, 1024)


def table(ours=2.0, theirs=3.0, noise=None, **facts):
    """Return a record of three cells; the figures are of the second."""
    noise = {} if noise is None else {"noise": noise}
    cell = {"blocking": rounds(ours, **noise), "mpi": rounds(theirs)}
    usual = {"blocking": rounds(2.0), "mpi": rounds(3.0)}
    return record(*(row(cell if nbytes == 64 else usual, nbytes=nbytes) for nbytes in SIZES), **facts)


def verdicts(before, after):
    return [one.verdict for one in compare(before, after).differences]


@pytest.mark.parametrize("factor, verdict", [(1.1, "slower"), (1.3, "slower"), (1.05, "same"), (0.95, "same")])
def test_a_cell_that_regressed_by_a_tenth_is_found(factor, verdict):
    assert verdicts(table(), table(2.0 * factor)) == ["same", verdict, "same"]


def test_a_cell_that_got_faster_is_told():
    assert verdicts(table(), table(2.0 / 1.1)) == ["same", "faster", "same"]


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_noise_wider_than_a_tenth_is_told(factor):
    found = compare(table(noise=WIDE_NOISE), table(2.0 * factor))
    assert [one.verdict for one in found.differences] == ["same", "noisy", "same"]
    lines = list(comparison.report(found, table(), table()))
    assert any(
        line.startswith("noisy: a difference of 10% cannot be seen: all_reduce 64 B, blocking") for line in lines
    )


def test_a_regression_beyond_wide_noise_is_found():
    assert verdicts(table(noise=WIDE_NOISE), table(4.0, noise=WIDE_NOISE)) == ["same", "slower", "same"]


def test_a_slower_machine_is_no_regression():
    found = compare(table(), table(3.0, 4.5))
    [one] = [one for one in found.differences if one.slower]
    assert (one.verdict, round(one.share, 3), round(one.time, 3)) == ("same", 1.0, 1.5)
    lines = list(comparison.report(found, table(), table(3.0, 4.5)))
    assert "longer, but not as a share of MPI's time: all_reduce 64 B, blocking, ordinary: time x 1.50" in lines


def test_a_regression_on_a_faster_machine_is_found():
    found = compare(table(), table(1.1, 1.5))
    assert found.differences[1].verdict == "slower" and found.differences[1].time < 1


def test_the_same_form_of_mpi_is_compared():
    """Another form of MPI's that wins only once would change the ratio without any change of a call."""
    before, after = (
        record(row({"planned": rounds(2), "mpi": rounds(3), "persistent": rounds(other)}), forms=["planned"])
        for other in (2.9, 3.1)
    )
    assert verdicts(before, after) == ["same"]


def test_few_rounds_give_no_verdict():
    assert judge([1.0] * 4, [2.0] * 9) == "noisy" and judge([1.0] * 5, [2.0] * 9) == "slower"


def test_more_rounds_narrow_the_interval_of_the_median():
    assert median_interval([3, 1, 2, 5, 4]) == (1, 5)
    assert median_interval(range(9)) == (1, 7)
    assert median_interval(range(25)) == (7, 17)


def test_a_cell_without_a_right_result_any_more_is_lost():
    lost = table()
    lost["rows"][1]["wrong"]["blocking"] = 5
    assert verdicts(table(), lost) == ["same", "lost", "same"]
    del lost["rows"][1]["seconds"]["blocking"]
    assert verdicts(table(), lost) == ["same", "lost", "same"]


def test_a_cell_that_is_unmeasured_in_one_file_is_not_compared():
    unmeasured = table()
    unmeasured["rows"][1] |= {"seconds": {}, "wrong": {}}
    for before, after in ((table(), unmeasured), (unmeasured, table())):
        found = compare(before, after)
        assert [one.verdict for one in found.differences] == ["same", "same"]
        assert len(found.only_before) + len(found.only_after) == 1


def test_cells_of_one_file_are_named():
    before, after = table(), table()
    del before["rows"][0], after["rows"][2]
    found = compare(before, after)
    lines = list(comparison.report(found, before, after))
    assert "# only in the first file: all_reduce 1024 B, blocking, ordinary" in lines
    assert "# only in the second file: all_reduce 4 B, blocking, ordinary" in lines
    assert lines[-1] == "# 1 cells in both files: 0 regressed, 0 faster, 0 noisy, 1 same"


@pytest.mark.parametrize("facts", [{"ranks": 4}, {"mpi": "Other MPI 2"}])
def test_other_ranks_or_mpi_libraries_are_not_compared(facts):
    with pytest.raises(BenchOptionsError, match="no cell in common"):
        compare(table(), table(**facts))


def run(monkeypatch, tmp_path, *records):
    """Return the exit code of the command."""
    for name in ("PMIX_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    paths = [tmp_path / f"{number}.json" for number in range(len(records))]
    for path, content in zip(paths, records, strict=True):
        path.write_text(json.dumps(content))
    monkeypatch.setattr("sys.argv", ["commlib", "bench", "compare", *map(str, paths)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


def test_the_exit_code_is_1_after_a_regression(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, table(), table(2.2)) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2] == (
        "regressed by 10% or more: all_reduce 64 B, blocking, ordinary: 2.00:3.00 -> 2.20:3.00 us, "
        "share of MPI's time x 1.10, time x 1.10"
    )
    assert printed[-1] == "# 3 cells in both files: 1 regressed, 0 faster, 0 noisy, 2 same"
    assert run(monkeypatch, tmp_path, table(), table(2.1)) == 0


def test_files_without_a_common_cell_give_exit_code_2(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, table(), table(ranks=4)) == 2
    assert "no cell in common" in capsys.readouterr().err


def test_a_busy_machine_is_told(monkeypatch, tmp_path, capsys):
    run(monkeypatch, tmp_path, table(load=5.0), table())
    assert "# BUSY: load 5.0 on 2 usable cores" in capsys.readouterr().out
