"""The command line: the options it passes on, and its exit codes. No rank is started: `run` is replaced."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from commlib.bench import run as measuring
from commlib.bench.options import BenchOptions, BenchOptionsError
from commlib.cli import main


@pytest.fixture
def command(monkeypatch):
    """Run the command line and return (exit code, the options passed on)."""
    for name in ("PMIX_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments, result=True):
        seen = []

        def run(options):
            seen.append(options)
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(measuring, "run", run)
        monkeypatch.setattr(sys, "argv", ["commlib", "bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, seen

    return call


def test_the_verb_sets_the_defaults(command):
    assert command("all_reduce") == (0, [BenchOptions("all_reduce")])


def test_every_option_is_passed_on(command):
    line = """
        reduce --peer mpi --peer gloo --dtype int8 --dtype float16 --op max --op min --begin 1K --end 64K --factor 8
        --out-of-place --ordinary --async --plan --algorithm chain --root 1 --rounds 3 --no-check --fresh --out there
    """
    code, seen = command(*line.split())
    assert code == 0
    assert seen == [
        BenchOptions(
            "reduce",
            sizes=(1024, 8192, 65536),
            dtypes=("int8", "float16"),
            ops=("max", "min"),
            peers=("mpi", "gloo"),
            in_place=False,
            symmetric=False,
            asynchronous=True,
            plan=True,
            algorithm="chain",
            root=1,
            rounds=3,
            check=False,
            fresh=True,
            out=Path("there"),
        )
    ]


def test_the_command_parses_sizes(command):
    assert command("all_reduce", "--size", "4K", "--size", "3M")[1][0].sizes == (4096, 3 << 20)
    assert command("all_reduce", "--end", "64")[1][0].sizes == (4, 16, 64)


def test_a_wrong_element_gives_exit_code_1(command):
    assert command("all_reduce", result=False)[0] == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["all_reduce", "--end", "64Q"], "size '64Q': expected a positive whole number"),
        (["all_reduce", "--size", "4", "--end", "8"], "give either --size, or --begin"),
        (["all_reduce", "--factor", "two"], "Invalid value for '--factor'"),
        (["all_reduce", "--nothing"], "No such option: --nothing"),
    ],
)
def test_wrong_usage_exits_with_2_before_anything_starts(command, capsys, arguments, message):
    assert command(*arguments) == (2, [])
    assert message in capsys.readouterr().err


def test_an_error_of_all_ranks_gives_exit_code_2(command, capsys):
    assert command("all_reduce", result=BenchOptionsError("the reason"))[0] == 2
    assert "the reason" in capsys.readouterr().err


def test_help_names_every_verb(command, capsys):
    from commlib.bench.verbs import VERBS

    assert command("--help") == (0, [])
    help_text = capsys.readouterr().out
    assert all(verb in help_text for verb in VERBS)
