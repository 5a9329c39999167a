"""Progress of a long run shows on a terminal and through a launcher."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest

from commlib.console import progress


def test_a_launcher_gets_occasional_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`mpirun commlib tune` showed nothing while it measured: ranks have no terminal, so there was no bar."""
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with progress.show_progress("commlib tune", 10) as report:
        for step in range(11):
            report(step / 10, f"step {step}")
            now[0] += 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[-1] for line in lines] == ["0", "2", "4", "6", "8", "10"]
    assert lines[1] == "commlib tune:  20%    2.0 of 10 s  step 2"


def test_the_last_line_is_printed_exactly_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Past the expected time, each of a hundred steps had a line."""
    with progress.show_progress("commlib tune", 10) as report:
        for step in range(5):
            report(1.0, f"step {step}")
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == ["0", "4"]


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress.show_progress("commlib tune", 10) as report:
        report(0.5, "all_reduce")
    assert re.search(r"all_reduce.*50%", terminal.getvalue())


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.show_progress("commlib tune", 10, silent=True) as report:
        report(0.5, "all_reduce")
    assert capsys.readouterr() == ("", "")
