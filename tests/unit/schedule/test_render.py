"""Pictures of schedules, compared letter by letter with tests/golden/.

To accept new pictures: COMMLIB_GOLDEN=write python -m pytest tests/unit/schedule/test_render.py, then read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commlib.schedule import Program, Recv, Round, Send, Span, program, render

GOLDEN = Path(__file__).parents[2] / "golden"

PICTURES: list[tuple[str, str, int, dict[str, int]]] = [
    ("all_reduce", "ring", 4, {}),
    ("all_reduce", "recursive_doubling", 3, {}),
    ("all_reduce", "recursive_doubling", 4, {}),
    ("all_reduce", "halving_doubling", 5, {}),
    ("all_reduce", "bruck", 5, {}),
    ("all_reduce", "binomial_tree", 4, {"segments": 2}),
    ("all_reduce", "double_tree", 4, {}),
    ("all_reduce", "double_tree", 5, {"segments": 2}),
    ("reduce_scatter", "ring", 3, {}),
    ("reduce_scatter", "recursive_halving", 6, {}),
    ("reduce_scatter", "bruck", 5, {}),
    ("all_gather", "ring", 3, {}),
    ("all_gather", "recursive_doubling", 6, {}),
    ("all_gather", "bruck", 5, {}),
    ("all_to_all", "pairwise", 4, {}),
    ("all_to_all", "bruck", 4, {}),
    ("broadcast", "binomial_tree", 6, {"root": 2}),
    ("broadcast", "chain", 3, {"segments": 2}),
    ("reduce", "binomial_tree", 6, {"root": 2}),
    ("reduce", "chain", 3, {"segments": 2}),
    ("gather", "direct", 3, {}),
    ("gather", "binomial_tree", 6, {"root": 4}),
    ("scatter", "direct", 3, {}),
    ("scatter", "binomial_tree", 6, {"root": 4}),
    ("barrier", "dissemination", 5, {}),
]


def title(verb: str, name: str, size: int, options: dict[str, int]) -> str:
    return "_".join([verb, name, str(size), *(f"{key}{value}" for key, value in options.items())])


@pytest.mark.parametrize(("verb", "name", "size", "options"), PICTURES, ids=[title(*picture) for picture in PICTURES])
def test_pictures_match_the_golden_files(verb: str, name: str, size: int, options: dict[str, int]) -> None:
    file = GOLDEN / f"{title(verb, name, size, options)}.txt"
    got = render([program(verb, name, rank, size, **options) for rank in range(size)])
    if os.environ.get("COMMLIB_GOLDEN") == "write":
        file.write_text(got, encoding="utf-8")
    assert got == file.read_text(encoding="utf-8"), f"see the top of {__file__} for how to accept a new picture"


def test_no_golden_file_is_left_over() -> None:
    assert {file.stem for file in GOLDEN.glob("*.txt")} == {title(*picture) for picture in PICTURES}


def test_stuck_programs_are_drawn() -> None:
    one = Span(0, 1)
    sender = Program("broadcast", "broken", 0, 2, 0, (1,), (Round(sends=(Send(1, one),)), Round(sends=(Send(1, one),))))
    receiver = Program("broadcast", "broken", 1, 2, 0, (1,), (Round(recvs=(Recv(0, one),)),))
    assert render([sender, receiver]).splitlines() == [
        "broadcast broken, 2 ranks, root 0, chunks 0",
        "step  │ rank 0 │ rank 1",
        "0     │ →1:0   │ ←0:0",
        "stuck │ →1:0   │",
    ]
