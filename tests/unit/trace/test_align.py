"""One clock for all ranks: from comparisons, from collectives, and with drift."""

from __future__ import annotations

import random

import pytest

from commlib.errors import UsageError
from commlib.trace.align import COLLECTIVES, MEASURED, SAME, align
from commlib.trace.files import read_all
from commlib.trace.operations import read_activity
from tests.inputs.timelines import RankTimeline

RUN = 100_000.0  # ms


def collect(ranks, times, *, seed=0):
    """Run collectives at about these times, with each rank some ms early or late; all end within 0.05 ms."""
    chance = random.Random(seed)
    for number, time in enumerate(times, 1):
        arrivals = [time + chance.random() * 2 for _ in ranks]
        for rank, began in zip(ranks, arrivals, strict=True):
            rank.blocking("all_reduce", number, began, max(arrivals) + 0.1 + chance.random() * 0.05)


def aligned(tmp_path, ranks, **options):
    names = [rank.write(tmp_path / f"t{rank.rank}.json", **options) for rank in ranks]
    traces, _ = read_all(names)
    alignment = align(traces, [read_activity(trace) for trace in traces])
    return alignment


def worst(alignment, rank, reference):
    """Return the largest error of a rank's times, in ms."""
    clock = alignment.clocks[rank.rank]
    times = [RUN * part / 50 for part in range(51)]
    return max(abs(clock.move(rank.own(time)) - reference.own(time)) for time in times) / 1e6


def test_ranks_of_one_machine_have_one_clock(tmp_path):
    ranks = [RankTimeline(0), RankTimeline(1)]
    collect(ranks, range(100, 1000, 100))
    alignment = aligned(tmp_path, ranks)
    assert {clock.how for clock in alignment.clocks.values()} == {SAME} and not alignment.notes
    assert worst(alignment, ranks[1], ranks[0]) == 0


def test_clocks_are_aligned_by_messages(tmp_path):
    """Offset and drift, over ranks that share a clock with one that was compared; an arbitrary file's order."""
    drifting = lambda time: 12_345.6 + 30e-6 * time  # noqa: E731  30 us a second
    ranks = [
        RankTimeline(0),
        RankTimeline(1, clock="b", ahead=drifting),
        RankTimeline(2, clock="b", ahead=drifting),
        RankTimeline(3),
    ]
    for time in (0, RUN):
        ranks[1].clock(time)
    collect(ranks, range(100, int(RUN), 1000))
    alignment = aligned(tmp_path, ranks)
    assert [alignment.clocks[rank].how for rank in range(4)] == [SAME, MEASURED, MEASURED, SAME] and not alignment.notes
    assert max(worst(alignment, ranks[rank], ranks[0]) for rank in (1, 2)) < 0.001


def test_a_drift_after_the_comparison_is_corrected_and_reported(tmp_path):
    ranks = [RankTimeline(0), RankTimeline(1, clock="b", ahead=lambda time: 700 + 100e-6 * time)]  # 10 ms in all
    ranks[1].clock(0)
    collect(ranks, range(100, int(RUN), 200))
    alignment = aligned(tmp_path, ranks)
    assert worst(alignment, ranks[1], ranks[0]) < 0.6  # within a sixteenth of the run it drifts by that
    (note,) = alignment.notes
    assert "rank 1: the clock drifted by" in note and COLLECTIVES in note


@pytest.mark.parametrize("wrong", [0.9, -0.9])
def test_two_inexact_comparisons_show_no_drift(tmp_path, wrong):
    """On a busy machine two of them in quick succession gave a line that ran away, reported as a drift."""
    ranks = [RankTimeline(0), RankTimeline(1, clock="b", ahead=40.0)]
    ranks[1].clock(50, error=1.0, wrong=-wrong)
    ranks[1].clock(52, error=1.0, wrong=wrong)
    collect(ranks, range(100, 2000, 10))
    alignment = aligned(tmp_path, ranks)
    assert alignment.clocks[1].how == MEASURED and not alignment.notes
    assert worst(alignment, ranks[1], ranks[0]) < 1


def test_a_drift_that_exceeds_the_errors_is_continued(tmp_path):
    ranks = [RankTimeline(0), RankTimeline(1, clock="b", ahead=lambda time: 40 + 100e-6 * time)]
    ranks[1].clock(0, error=0.02, wrong=0.02)
    ranks[1].clock(RUN / 2, error=0.02, wrong=-0.02)
    collect(ranks, range(100, 1000, 10))
    assert worst(aligned(tmp_path, ranks), ranks[1], ranks[0]) < 0.1  # of 10 ms


@pytest.mark.parametrize("ahead", [0.0, -80_000.0, lambda time: 5e6 + 20e-6 * time])
def test_without_a_comparison_collectives_align_clocks(tmp_path, ahead):
    ranks = [RankTimeline(0), RankTimeline(1, clock="b", ahead=ahead), RankTimeline(2, clock="c", ahead=33)]
    collect(ranks, range(100, int(RUN), 200))
    alignment = aligned(tmp_path, ranks)
    assert [alignment.clocks[rank].how for rank in range(3)] == [SAME, COLLECTIVES, COLLECTIVES]
    assert max(worst(alignment, rank, ranks[0]) for rank in ranks[1:]) < 0.2
    assert len(alignment.notes) == 2 and all("clocks were not compared" in note for note in alignment.notes)


def test_files_without_a_head_are_aligned(tmp_path):
    ranks = [RankTimeline(0), RankTimeline(1, ahead=500)]
    collect(ranks, range(100, 5000, 100))
    alignment = aligned(tmp_path, ranks, head=False)
    assert alignment.clocks[1].how == COLLECTIVES
    headless = lambda rank, time: rank.own(time) - rank.start  # noqa: E731  the missing information of the head
    moved = alignment.clocks[1].move(headless(ranks[1], 2500))
    assert abs(moved - headless(ranks[0], 2500)) < 200_000


def test_ranks_without_common_collectives_are_refused(tmp_path):
    ranks = [RankTimeline(0), RankTimeline(4, clock="b")]
    ranks[0].blocking("all_reduce", 1, 1, 2)
    ranks[1].blocking("all_reduce", 2, 1, 2)
    with pytest.raises(UsageError, match="cannot relate the clock of rank 4"):
        aligned(tmp_path, ranks)


def test_the_reference_rank_may_be_missing(tmp_path):
    ranks = [RankTimeline(1, clock="b", ahead=40), RankTimeline(2, clock="c", ahead=-7)]
    for rank in ranks:
        rank.clock(10)
    collect(ranks, range(100, 1000, 100))
    alignment = aligned(tmp_path, ranks)
    assert worst(alignment, ranks[1], ranks[0]) < 0.001 and alignment.clocks[2].how == MEASURED
