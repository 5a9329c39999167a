"""The table of algorithms and its messages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from commlib.errors import UsageError
from commlib.schedule import (
    Program,
    Round,
    ScheduleError,
    algorithm,
    algorithms,
    find,
    program,
    registry,
    verbs,
    verify,
)


def test_the_designed_algorithms_are_registered() -> None:
    expected = {
        "all_reduce": {
            "ring",
            "recursive_doubling",
            "halving_doubling",
            "bruck",
            "binomial_tree",
            "double_tree",
            "direct",
        },
        "reduce_scatter": {"ring", "recursive_halving", "bruck", "direct"},
        "all_gather": {"ring", "recursive_doubling", "bruck", "direct"},
        "all_to_all": {"pairwise", "bruck"},
        "broadcast": {"binomial_tree", "chain"},
        "reduce": {"binomial_tree", "chain"},
        "gather": {"direct", "binomial_tree"},
        "scatter": {"direct", "binomial_tree"},
        "barrier": {"dissemination"},
    }
    assert {verb: set(algorithms(verb)) for verb in verbs()} == expected


def test_programs_are_cached() -> None:
    assert program("all_reduce", "ring", 1, 4) is program("all_reduce", "ring", 1, 4)


def test_a_program_has_its_parameters() -> None:
    chain = program("broadcast", "chain", 1, 4, root=2, segments=3)
    assert (chain.verb, chain.algorithm, chain.rank, chain.size, chain.root) == ("broadcast", "chain", 1, 4, 2)
    assert chain.regions == (3,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: program("all_reduce", "star", 0, 2), "no algorithm 'star'; known are ring, recursive_doubling"),
        (lambda: program("all_shrink", "ring", 0, 2), "no collective is called 'all_shrink'; known are .*all_reduce"),
        (lambda: program("all_reduce", "ring", 0, 0), "size must be at least 1, got 0"),
        (lambda: program("all_reduce", "ring", 2, 2), r"rank must be in 0\.\.1, got 2"),
        (lambda: program("all_reduce", "ring", -1, 2), r"rank must be in 0\.\.1, got -1"),
        (lambda: program("broadcast", "chain", 0, 2, root=2), r"root must be in 0\.\.1, got 2"),
        (lambda: program("all_reduce", "ring", 0, 2, root=1), "all_reduce has no root, got root=1"),
        (lambda: program("broadcast", "chain", 0, 2, segments=0), "segments must be at least 1, got 0"),
        (lambda: program("all_reduce", "ring", 0, 2, segments=2), "not pipelined.* are: binomial_tree, double_tree"),
        (lambda: program("barrier", "dissemination", 0, 2, segments=2), "barrier that are: none"),
    ],
)
def test_wrong_calls_give_a_reason(call: Callable[[], Program], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


def test_adding_an_algorithm_takes_one_decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "table", dict(registry.table))

    @algorithm("barrier", "lazy", regions=lambda size, segments: (), rounds=lambda p, s: 0, sent=lambda p, s: 0)
    def lazy(rank: int, size: int) -> Iterator[Round]:
        """Do nothing."""
        return iter(())

    assert "lazy" in algorithms("barrier")
    assert find("barrier", "lazy").description == "Do nothing."
    with pytest.raises(ScheduleError, match="it has no signal from rank 1"):
        verify([program("barrier", "lazy", rank, 2) for rank in range(2)])


def test_an_unknown_verb_cannot_be_verified() -> None:
    with pytest.raises(UsageError, match="does not define the verb 'all_shrink'"):
        verify([Program("all_shrink", "ring", 0, 1, 0, (1,), ())])


def test_importing_loads_no_heavy_module() -> None:
    code = "import sys, commlib.schedule; print(*(m for m in ('numpy', 'mpi4py', 'threading') if m in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""
