"""Scans are proved correct like every other program."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commlib.schedule import verify
from commlib.schedule.scan import scan_program
from commlib.schedule.verify import ScheduleError


@pytest.mark.parametrize("verb", ["scan", "exscan"])
def test_scans_are_correct(verb: str) -> None:
    for size in (*range(1, 34), 64, 100):
        verify([scan_program(verb, rank, size) for rank in range(size)])


@pytest.mark.parametrize("verb", ["scan", "exscan"])
def test_a_missing_round_is_found(verb: str) -> None:
    good = [scan_program(verb, rank, 4) for rank in range(4)]
    with pytest.raises(ScheduleError, match=r"must hold the sum of chunk 0 over the first \d ranks"):
        verify([replace(program, rounds=program.rounds[1:]) for program in good])
