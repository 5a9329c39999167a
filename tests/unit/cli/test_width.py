"""`commlib show` on a terminal: as wide as the terminal, and with a legend."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commlib.cli.app import app
from commlib.console.legend import legend
from commlib.console.text import columns
from commlib.console.width import fold, reader_width, wrap
from commlib.schedule import algorithms, program, render, verbs

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"
GOLDEN_CALLS = {
    "show_all_reduce_ring_80_columns": ("all_reduce", "--algorithm", "ring", "--ranks", "8"),
    "show_all_reduce_predict_80_columns": ("all_reduce", "--predict", "--nodes", "2048", "--ranks-per-node", "8"),
    "show_all_reduce_list_60_columns": ("all_reduce",),
}


def show(*arguments: str, columns: int | None = 80) -> str:
    env = {"COLUMNS": None if columns is None else str(columns)}
    result = CliRunner().invoke(app, ["show", *arguments], env=env, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", GOLDEN_CALLS)
def test_output_matches_the_golden_file(name: str) -> None:
    """To accept new texts: COMMLIB_GOLDEN=write python -m pytest tests/unit/cli/test_width.py, then read the diff."""
    file = GOLDEN / f"{name}.txt"
    got = show(*GOLDEN_CALLS[name], columns=int(name.split("_")[-2]))
    if os.environ.get("COMMLIB_GOLDEN") == "write":
        file.write_text(got, encoding="utf-8")
    assert got == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("verb", verbs())
@pytest.mark.parametrize("wide", [40, 80, 132])
def test_predictions_fit_without_loss(verb: str, wide: int) -> None:
    """They were 224 columns wide on every terminal."""
    arguments = (verb, "--predict", "--nodes", "2048", "--ranks-per-node", "8")
    text, whole = show(*arguments, columns=wide), show(*arguments, columns=None)
    assert max(map(len, text.splitlines())) <= wide
    assert sorted(set(text.split())) == sorted(set(whole.split()))
    assert text.count(" *") == whole.count(" *")


@pytest.mark.parametrize("verb", verbs())
def test_pictures_fit_and_have_a_legend(verb: str) -> None:
    for algorithm in algorithms(verb):
        text = show(verb, "--algorithm", algorithm, "--ranks", "8", columns=100)
        picture = text.split("step │", 1)[1]
        assert all(f"rank {rank}" in picture for rank in range(8))
        last = picture.split("\n\n")[-1]
        for sign, word in (("→", "sends"), ("←", "receives"), ("⇒", "copies"), ("+", "combines")):
            assert (sign in picture) == (word in last), (algorithm, sign)


def test_a_legend_can_be_switched_on_and_off() -> None:
    call = ("all_gather", "--algorithm", "ring", "--ranks", "2")
    with_it = show(*call, "--legend", columns=None)
    assert "←2:5" in with_it and "combines" not in with_it
    assert "sends chunks" not in show(*call, columns=None)  # a file gets the picture alone
    assert "sends chunks" not in show(*call, "--no-legend")


def test_every_sign_is_explained_once() -> None:
    programs = [program("all_to_all", "bruck", rank, 3) for rank in range(3)]
    lines = legend(render(programs)).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["chunk", "0-2 | 3-5", "step", "→1:0-3", "←2:5", "4⇒8"]


def test_folding_loses_no_column() -> None:
    picture = render([program("all_reduce", "ring", rank, 5) for rank in range(5)])
    assert fold(picture, None) == fold(picture, 500) == picture.rstrip("\n")
    text = fold(picture, 50)
    assert max(map(len, text.splitlines())) <= 50
    assert sorted(set(text.split())) == sorted(set(picture.split()))


def test_a_wide_column_is_not_folded() -> None:
    assert columns([["a", "long", "longer"], ["b", "1", "2"]], width=3) == "a  long\nb     1\n\na  longer\nb       2"
    assert wrap("one two", None) == "one two"
    assert wrap("name  a few words", 12, indent=6) == "name  a few\n      words"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1


def test_the_width_comes_from_columns_or_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert reader_width() is None
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setattr(os, "get_terminal_size", lambda fileno: os.terminal_size((97, 30)))
    assert reader_width() == 97
    monkeypatch.setattr(os, "get_terminal_size", lambda fileno: os.terminal_size((0, 0)))
    assert reader_width() is None  # a rank of Open MPI
    monkeypatch.setattr(os, "get_terminal_size", lambda fileno: os.terminal_size((97, 30)))
    monkeypatch.setenv("COLUMNS", "120")
    assert reader_width() == 120
    monkeypatch.setenv("COLUMNS", "wide")
    assert reader_width() == 97
