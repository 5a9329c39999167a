"""Rank 0 prints a table from given figures."""

from __future__ import annotations

import io
import os

import numpy as np
import pytest
from rich.console import Console

from commlib.bench import cases, table
from commlib.bench.report import Report
from commlib.bench.verbs import VERBS
from tests.unit.bench.figures import row, settings


def cells(one, peers=(), bound=True):
    return {column.title: column.cell(one) for column in table.columns(VERBS[one.verb], peers, bound=bound)}


def test_columns_and_cells():
    assert cells(row(), ["mpi", "gloo"]) == {
        "size B": "1048576",
        "count": "262144",
        "type": "float32",
        "redop": "sum",
        "time us": "100.00",
        "min..max us": "90.00..300.00",
        "algbw GB/s": "10.49",
        "busbw GB/s": "15.73",
        "of bound": "80%",
        "#wrong": "0",
        "mpi us": "250.00",
        "gloo us": "-",
        "ratio": "-",  # of the last peer, which has no figure
    }


REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce_scatter_v", "reduce", "scan", "exscan")


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_the_columns_that_apply(verb):
    titles = [column.title for column in table.columns(VERBS[verb], ["mpi"], bound=True)]
    assert ("redop" in titles) == (verb in REDUCTIONS)
    assert ("root" in titles) == (verb in ("broadcast", "reduce", "gather", "scatter"))
    assert ("size B" in titles) == ("busbw GB/s" in titles) == (verb != "barrier")
    assert titles[-2:] == ["mpi us", "ratio"]
    assert "of bound" not in [column.title for column in table.columns(VERBS[verb], [], bound=False)]


def test_cells_without_a_figure():
    assert cells(row(wrong=None))["#wrong"] == "-"
    assert cells(row(bound_seconds=[]))["of bound"] == "-"
    assert cells(row(root=2, verb="broadcast"))["root"] == "2"
    assert cells(row(seconds={"commlib": [0.5]}))["time us"] == "500000"


def test_wrong_elements_are_shown_for_commlib_and_peers():
    shown = cells(row(wrong={"commlib": 7, "mpi": 3}), ["mpi"])
    assert shown["#wrong"] == "7"
    assert shown["mpi us"] == "3 wrong"


CASE = cases.make("all_reduce", rank=0, size=2, allocate=np.empty, nbytes=4096)


def report(one, settings, **console):
    output = io.StringIO()
    facts = {"ranks": 4, "hosts": ["a", "b", "a", "b"], "mpi": "Some MPI 5", "cpu": "CPU", "cores": 2, "load": 0.25}
    with Report(settings, rounds=9, bound=True, console=Console(file=output, **console)) as printed:
        printed.facts(facts)
        printed.progress(CASE, 0)
        printed.row(one)
        printed.progress(CASE, 1)
        printed.row(one)
        printed.note("[bold]notes are not markup[/bold]")
    return output.getvalue()


def test_a_file_gets_plain_text_in_aligned_lines():
    text = report(row(), settings(peers=("mpi",), fresh=True, symmetric=False, algorithm="ring"))
    lines = text.splitlines()
    assert lines[0] == "# all_reduce, 4 ranks on a, b, Some MPI 5"
    assert lines[1] == "# CPU, 2 cores, load 0.2 at the start"
    assert lines[2].startswith("# in place, ordinary arrays, algorithm ring, rewritten before each call, median of 9")
    title, first, second = lines[3:6]
    assert title.split()[:4] == ["size", "B", "count", "type"] and first == second
    assert len(title) == len(first) > 100  # wider than a terminal's 80 columns, and not broken
    assert lines[6:] == ["# [bold]notes are not markup[/bold]"]
    assert "\x1b" not in text and "\r" not in text


def test_on_a_terminal_there_is_a_progress_bar():
    text = report(row(wrong={"commlib": 1}), settings(), force_terminal=True)
    assert "\x1b[" in text and "float32 sum 4096 B" in text and "1/9" in text


def test_other_ranks_print_nothing(capsys):
    with Report.on_rank(1, settings(), rounds=9, bound=True) as silent:
        silent.note("something")
        silent.row(row())
        silent.progress(CASE, 1)
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    "rank_sees_terminal, launcher, launcher_writes_to, expected",
    [
        (False, {}, "/dev/pts/1", False),
        (True, {}, "a file", True),
        (True, {"OMPI_COMM_WORLD_RANK": "0"}, "/dev/pts/1", True),
        (True, {"OMPI_COMM_WORLD_RANK": "0"}, "/home/me/log.txt", False),
        (True, {"OMPI_COMM_WORLD_RANK": "0"}, "pipe:[123]", False),
    ],
)
def test_open_mpis_pseudo_terminal_is_not_the_users(
    monkeypatch, rank_sees_terminal, launcher, launcher_writes_to, expected
):
    """Open MPI 5 runs ranks in a pseudo-terminal even when mpirun's output goes to a file."""
    monkeypatch.setattr("sys.stdout", Terminal() if rank_sees_terminal else io.StringIO())
    monkeypatch.setattr(os, "readlink", lambda path: launcher_writes_to)
    assert table.is_terminal(launcher) == expected
