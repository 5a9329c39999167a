"""One clock for all: as measured, as collectives say, and what becomes of clocks that drift."""

from __future__ import annotations

import random

import pytest

from commlib.errors import UsageError
from commlib.trace.align import COLLECTIVES, MEASURED, SAME, align
from commlib.trace.files import read_all
from commlib.trace.operations import read_activity
from tests.inputs.timelines import MadeUp

RUN = 100_000.0  # ms


def meet(ranks, times, *, seed=0):
    """Let ranks meet in collectives at about these times, each some ms early or late; all end within 0.05 ms."""
    chance = random.Random(seed)
    for number, time in enumerate(times, 1):
        came = [time + chance.random() * 2 for _ in ranks]
        for rank, began in zip(ranks, came, strict=True):
            rank.blocking("all_reduce", number, began, max(came) + 0.1 + chance.random() * 0.05)


def aligned(tmp_path, ranks, **options):
    names = [rank.write(tmp_path / f"t{rank.rank}.json", **options) for rank in ranks]
    traces, _ = read_all(names)
    found = align(traces, [read_activity(trace) for trace in traces])
    return found


def worst(found, rank, reference):
    """Return by how many ms times of a rank are wrong, at worst."""
    clock = found.clocks[rank.rank]
    times = [RUN * part / 50 for part in range(51)]
    return max(abs(clock.move(rank.own(time)) - reference.own(time)) for time in times) / 1e6


def test_ranks_of_one_machine_have_one_clock(tmp_path):
    ranks = [MadeUp(0), MadeUp(1)]
    meet(ranks, range(100, 1000, 100))
    found = aligned(tmp_path, ranks)
    assert {clock.how for clock in found.clocks.values()} == {SAME} and not found.notes
    assert worst(found, ranks[1], ranks[0]) == 0


def test_clocks_that_were_compared_by_messages(tmp_path):
    """Offset and drift, over ranks that share a clock with one that was compared; an arbitrary file's order."""
    drifting = lambda time: 12_345.6 + 30e-6 * time  # noqa: E731  30 us a second
    ranks = [MadeUp(0), MadeUp(1, clock="b", ahead=drifting), MadeUp(2, clock="b", ahead=drifting), MadeUp(3)]
    for time in (0, RUN):
        ranks[1].clock(time)
    meet(ranks, range(100, int(RUN), 1000))
    found = aligned(tmp_path, ranks)
    assert [found.clocks[rank].how for rank in range(4)] == [SAME, MEASURED, MEASURED, SAME] and not found.notes
    assert max(worst(found, ranks[rank], ranks[0]) for rank in (1, 2)) < 0.001


def test_a_clock_that_drifts_after_it_was_compared_is_corrected_and_that_is_said(tmp_path):
    ranks = [MadeUp(0), MadeUp(1, clock="b", ahead=lambda time: 700 + 100e-6 * time)]  # 10 ms in all
    ranks[1].clock(0)
    meet(ranks, range(100, int(RUN), 200))
    found = aligned(tmp_path, ranks)
    assert worst(found, ranks[1], ranks[0]) < 0.6  # within a sixteenth of the run it drifts by that
    (note,) = found.notes
    assert "rank 1: the clock drifted by" in note and COLLECTIVES in note


@pytest.mark.parametrize("wrong", [0.9, -0.9])
def test_two_inexact_comparisons_say_nothing_of_a_drift(tmp_path, wrong):
    """On a busy machine two of them soon after each other made a line that ran away, and the clock was said to."""
    ranks = [MadeUp(0), MadeUp(1, clock="b", ahead=40.0)]
    ranks[1].clock(50, error=1.0, wrong=-wrong)
    ranks[1].clock(52, error=1.0, wrong=wrong)
    meet(ranks, range(100, 2000, 10))
    found = aligned(tmp_path, ranks)
    assert found.clocks[1].how == MEASURED and not found.notes
    assert worst(found, ranks[1], ranks[0]) < 1


def test_a_drift_that_exceeds_the_errors_is_continued(tmp_path):
    ranks = [MadeUp(0), MadeUp(1, clock="b", ahead=lambda time: 40 + 100e-6 * time)]
    ranks[1].clock(0, error=0.02, wrong=0.02)
    ranks[1].clock(RUN / 2, error=0.02, wrong=-0.02)
    meet(ranks, range(100, 1000, 10))
    assert worst(aligned(tmp_path, ranks), ranks[1], ranks[0]) < 0.1  # of 10 ms


@pytest.mark.parametrize("ahead", [0.0, -80_000.0, lambda time: 5e6 + 20e-6 * time])
def test_without_a_comparison_collectives_say_it(tmp_path, ahead):
    ranks = [MadeUp(0), MadeUp(1, clock="b", ahead=ahead), MadeUp(2, clock="c", ahead=33)]
    meet(ranks, range(100, int(RUN), 200))
    found = aligned(tmp_path, ranks)
    assert [found.clocks[rank].how for rank in range(3)] == [SAME, COLLECTIVES, COLLECTIVES]
    assert max(worst(found, rank, ranks[0]) for rank in ranks[1:]) < 0.2
    assert len(found.notes) == 2 and all("clocks were not compared" in note for note in found.notes)


def test_a_file_without_a_head_is_aligned_too(tmp_path):
    ranks = [MadeUp(0), MadeUp(1, ahead=500)]
    meet(ranks, range(100, 5000, 100))
    found = aligned(tmp_path, ranks, head=False)
    assert found.clocks[1].how == COLLECTIVES
    headless = lambda rank, time: rank.own(time) - rank.start  # noqa: E731  what the head would have said
    moved = found.clocks[1].move(headless(ranks[1], 2500))
    assert abs(moved - headless(ranks[0], 2500)) < 200_000


def test_nothing_in_common_is_refused(tmp_path):
    ranks = [MadeUp(0), MadeUp(4, clock="b")]
    ranks[0].blocking("all_reduce", 1, 1, 2)
    ranks[1].blocking("all_reduce", 2, 1, 2)
    with pytest.raises(UsageError, match="cannot relate the clock of rank 4"):
        aligned(tmp_path, ranks)


def test_the_rank_that_all_compared_with_need_not_be_there(tmp_path):
    ranks = [MadeUp(1, clock="b", ahead=40), MadeUp(2, clock="c", ahead=-7)]
    for rank in ranks:
        rank.clock(10)
    meet(ranks, range(100, 1000, 100))
    found = aligned(tmp_path, ranks)
    assert worst(found, ranks[1], ranks[0]) < 0.001 and found.clocks[2].how == MEASURED
