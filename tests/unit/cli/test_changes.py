"""A long wait shows its state: a line for each change, or a line that is redrawn on a terminal."""

from __future__ import annotations

import io

import pytest

from commlib.console import progress


def test_each_change_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.show_changes("job 1") as report:
        for text in ("PENDING", "PENDING", "RUNNING", "RUNNING", "PENDING"):
            report(text, "1 s")
    assert capsys.readouterr().err.splitlines() == ["job 1: PENDING", "job 1: RUNNING", "job 1: PENDING"]


def test_a_terminal_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress.show_changes("job 1") as report:
        report("RUNNING on h[0-1]", "00:00:03")  # no markup of rich
    shown = terminal.getvalue()
    assert "job 1: RUNNING on h[0-1] 00:00:03" in shown
    assert "\x1b[?25l" in shown  # no cursor meanwhile
