"""Cells: MPI's fastest form is named, the goals decide, and no cell is dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from commlib.bench.all_verbs import cells, goals, selection, text
from commlib.bench.all_verbs.cells import find_cells, merge
from commlib.bench.all_verbs.goals import FORMS, find_goal
from commlib.bench.options import BenchOptionsError
from commlib.bench.verbs import VERBS
from tests.unit.bench.all_verbs.tables import record, rounds, row

GOALS_OF = {
    ("broadcast", "blocking", "ordinary", 4): 1.0,
    ("barrier", "asynchronous", "ordinary", 0): 1.0,
    ("gather", "planned", "ordinary", 4): 0.7,
    ("gather", "planned", "symmetric", 1 << 10): 0.7,
    ("gather", "planned", "symmetric", 16 << 10): 0.5,
    ("all_reduce", "blocking", "symmetric", 16 << 10): 0.5,
    ("all_reduce", "blocking", "symmetric", 64 << 10): 0.25,
    ("all_reduce", "blocking", "ordinary", 64): 1.0,
    ("all_reduce", "blocking", "ordinary", 1 << 10): 1 / 1.3,
    ("all_reduce", "asynchronous", "ordinary", 64 << 20): 1 / 1.3,
    ("all_reduce", "planned", "ordinary", 1 << 20): 0.7,
}


@pytest.mark.parametrize("cell", GOALS_OF, ids=str)
def test_the_least_share_of_all_goals_decides(cell):
    assert find_goal(*cell) == GOALS_OF[cell]


def test_a_form_is_compared_with_the_fastest_call_that_is_prepared_as_it_is():
    seconds = {
        "blocking": rounds(4), "planned": rounds(1.5), "mpi": rounds(3), "persistent": rounds(2), "block": rounds(2.5),
    }  # fmt: skip
    blocking, planned = find_cells(record(row(seconds), forms=["blocking", "planned"]))
    assert (blocking.best, blocking.text(), blocking.status) == ("block", "4.00:2.50b", "slow")
    assert (planned.best, planned.text(), planned.status) == ("persistent", "1.50:2.00p", "slow")
    assert blocking.share == pytest.approx(1.6) and planned.share == pytest.approx(0.75)
    [fast] = find_cells(record(row({**seconds, "blocking": rounds(2.5)})))
    assert fast.status == "good"


def test_a_wrong_result_of_mpi_does_not_compete():
    seconds = {"blocking": rounds(4), "mpi": rounds(5), "pieces": rounds(1)}
    [cell] = find_cells(record(row(seconds, wrong={"pieces": 3})))
    assert (cell.best, cell.status) == ("mpi", "good")


def test_cells_without_a_good_figure_stay():
    made = record(
        row({"mpi": rounds(2)}),
        row({}, nbytes=64),
        row({"blocking": rounds(1), "mpi": rounds(2)}, nbytes=1024, wrong={"blocking": 7}),
        row({"blocking": rounds(1)}, nbytes=16384),
    )
    chosen = find_cells(made)
    assert [cell.status for cell in chosen] == ["failed", "unmeasured", "wrong", "good"]
    assert [cell.text() for cell in chosen] == ["failed:2.00", "unmeasured", "1.00:2.00 WRONG", "1.00:-"]
    lines = list(text.lines(chosen, ["a remark"], width=None))
    assert "# a remark" in lines and "wrong: all_reduce 1024 B, blocking, ordinary: 7 wrong elements" in lines
    assert lines[-1] == "# 1 of 4 cells reach the goal, 1 failed, 1 unmeasured, 1 wrong"


def test_a_verb_without_a_plan_has_no_planned_cell():
    made = record(*(row({}, verb) for verb in ("send_recv", "scan")), forms=FORMS)
    assert [(cell.verb, cell.form) for cell in find_cells(made)].count(("send_recv", "planned")) == 0
    assert len(find_cells(made)) == 5


def test_a_table_has_a_line_for_each_size_and_a_column_for_each_verb():
    seconds = {"blocking": rounds(100), "mpi": rounds(50)}
    made = record(row(seconds), row(seconds, nbytes=1 << 20), row(seconds, "barrier", nbytes=0))
    assert text.grid(find_cells(made), around="**") == [
        ["bytes", "all_reduce", "barrier"],
        ["-", "", "**100:50.0**"],
        ["4", "**100:50.0**", ""],
        ["1M", "**100:50.0**", ""],
    ]
    lines = list(text.lines(find_cells(made), [], width=None))
    slow = [line for line in lines if line.startswith("slow: ")]
    assert len(slow) == 3 and slow[0].endswith("blocking, ordinary: 100:50.0 us, 2.00 times mpi, goal 1.00")
    assert "# goals, commlib's time / MPI's: all 1.00; planned 0.70; symmetric from 16K 0.50" in "\n".join(lines)
    assert lines[-1] == "# 0 of 3 cells reach the goal, 3 slow"


def test_cells_of_several_starts_are_merged():
    starts = [find_cells(record(row({"blocking": rounds(ours), "mpi": rounds(2)})))[0] for ours in (1, 5, 3)]
    assert merge(starts).text() == "3.00:2.00"
    [unmeasured] = find_cells(record(row({})))
    assert merge([unmeasured, starts[0]]).text() == "1.00:2.00" and merge([unmeasured]).status == "unmeasured"
    [failed] = find_cells(record(row({"mpi": rounds(2)})))
    assert merge([failed, starts[0]]).status == "failed"


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "other.json"
    for content in ("[]", "{", json.dumps({"benchmark": "named"}), json.dumps({"benchmark": cells.BENCHMARK})):
        path.write_text(content)
        with pytest.raises(BenchOptionsError, match="expected a file of `commlib bench all --json`"):
            cells.read(path)
    with pytest.raises(BenchOptionsError, match="cannot be read: No such file"):
        cells.read(tmp_path / "none.json")


def test_everything_is_selected_unless_narrowed():
    usual = selection.select()
    assert set(usual.verbs) == set(VERBS) and usual.forms == goals.FORMS and usual.memories == goals.MEMORIES
    assert len(usual.rows()) == 14 * 2 * 9 + 1
    narrow = selection.select(verbs="scan, barrier", sizes="4,1K,4", forms="planned", memory="symmetric", seconds=1)
    assert [(one.verb, one.memory, one.nbytes) for one in narrow.rows()] == [
        ("scan", "symmetric", 4), ("scan", "symmetric", 1024), ("barrier", "symmetric", 0),
    ]  # fmt: skip


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "verb": ({"verbs": "all_redcue"}, "--verbs 'all_redcue' is unknown; known are all_reduce, .*did you mean"),
    "form": ({"forms": "async"}, "--forms 'async' is unknown; known are blocking, asynchronous, planned"),
    "memory": ({"memory": "shared"}, "--memory 'shared' is unknown"),
    "size": ({"sizes": "4,4Q"}, "size '4Q': expected"),
    "seconds": ({"seconds": 0}, "--seconds is 0: expected more than 0"),
    "rounds": ({"rounds": 0}, "--rounds is 0: expected at least 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_refused(case):
    options, message = BAD[case]
    with pytest.raises(BenchOptionsError, match=message):
        selection.select(**options)
