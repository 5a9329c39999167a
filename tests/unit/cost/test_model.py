"""The model against the simulation of every message."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.cost import rounds as lockstep
from commlib.cost.model import (
    APPROXIMATE,
    DEFAULT,
    ETHERNET,
    FEW_MESSAGES,
    LARGEST_SEGMENT,
    LEAST_SEGMENT,
    best,
    best_segments,
    largest_segment,
    predict,
    segments_for,
    simulated_messages,
)
from commlib.errors import UsageError
from commlib.schedule import LinkCost, algorithms, estimate, find, verbs

ALL = [(verb, name) for verb in verbs() for name in algorithms(verb)]
every_algorithm = pytest.mark.parametrize(("verb", "name"), ALL, ids=[f"{verb}-{name}" for verb, name in ALL])

N = 1e6
# Messages all latency, all bandwidth, and mixed; combining free, cheap, and dear.
MACHINES = [
    (LinkCost(1.0, 0.0), 0.0),
    (LinkCost(0.0, 1e-10), 1.5e-10),
    (LinkCost(1e-5, 1e-10), 3e-11),
    (LinkCost(1e-6, 1e-9), 1e-9),
    (LinkCost(1e-6, 1e-10), 1e-8),
]


def check(verb: str, name: str, size: int, segments: int, link: LinkCost, gamma: float) -> None:
    simulated = estimate(verb, name, size, N, link, gamma=gamma, segments=segments).time
    predicted = predict(verb, name, size, N, link, gamma, segments=segments)
    bound = (
        APPROXIMATE.get((verb, name), 0.0)
        if simulated_messages(find(verb, name), size, segments) > FEW_MESSAGES
        else 0.0
    )
    assert predicted == pytest.approx(simulated, rel=max(bound, 1e-12)), (size, segments, link, gamma)


@every_algorithm
def test_the_model_equals_the_simulation(verb: str, name: str) -> None:
    """Exactly, up to rounding; or within the stated bound, and then exactly for few messages."""
    for size in (*range(1, 18), 24, 31, 33):
        for segments in (1, 2, 3, 5, 8) if find(verb, name).segmented else (1,):
            for link, gamma in MACHINES:
                check(verb, name, size, segments, link, gamma)


@every_algorithm
def test_the_model_equals_the_simulation_of_more_ranks(verb: str, name: str) -> None:
    for size, segments in ((48, 2), (64, 1), (64, 20), (65, 4)):
        if segments == 1 or find(verb, name).segmented:
            check(verb, name, size, segments, *MACHINES[2])
            check(verb, name, size, segments, *MACHINES[0])


@pytest.mark.parametrize(("verb", "name"), [key for key in lockstep.FORMULAS if key not in APPROXIMATE])
def test_formulas_equal_their_rounds(verb: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (1, 2, 3, 8, 13, 100):
        lockstep.rank_steps.cache_clear()
        written = lockstep.rank_steps(verb, name, size, 1)[0]
        with monkeypatch.context() as context:
            context.delitem(lockstep.FORMULAS, (verb, name))
            lockstep.rank_steps.cache_clear()
            walked = lockstep.rank_steps(verb, name, size, 1)[0]
        lockstep.rank_steps.cache_clear()
        for field in ("messages", "chunks", "combined", "copied"):
            one, other = (sum(step.times * getattr(step, field) for step in steps) for steps in (written, walked))
            assert one == other, (size, field)
        if "direct" not in name:  # the root speaks to many
            spread = [[step.shift for step in steps for _ in range(step.times) if step.messages]
                      for steps in (written, walked)]  # fmt: skip
            assert spread[0] == spread[1]


@every_algorithm
def test_the_model_predicts_sixteen_thousand_ranks(verb: str, name: str) -> None:
    """Too much for the simulation: a ring would send 268 million messages."""
    few, many = (predict(verb, name, size, N, DEFAULT.network, DEFAULT.gamma) for size in (16, 16384))
    assert 0 < few < many < math.inf


@pytest.mark.parametrize("segments", [1, 2, 7])
def test_a_segmented_ring_hides_combining_behind_transfers(segments: int) -> None:
    """Each round: B alpha + beta c + gamma c / B, as `segments_for` has it; the second half combines nothing."""
    link, gamma, c = LinkCost(1e-5, 1e-9), 5e-10, N / 8
    expected = 14 * (segments * link.alpha + c * link.beta) + 7 * c * gamma / segments
    assert predict("all_reduce", "ring", 8, N, link, gamma, segments=segments) == pytest.approx(expected)


def test_copies_within_a_rank_hide_behind_nothing() -> None:
    once, thrice = (
        predict("all_to_all", "bruck", 8, N, LinkCost(0.0, 1e-10), 1e-10, segments=segments) for segments in (1, 3)
    )
    assert once == thrice


def round_time(segments: int, chunk: float, alpha: float, gamma: float) -> float:
    return segments * alpha + gamma * chunk / segments


@given(st.floats(1, 1e9), st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-8))
def test_segments_are_optimal_within_their_bounds(chunk: float, alpha: float, gamma: float) -> None:
    chosen = segments_for(chunk, 3, LinkCost(alpha, 1e-10), gamma)
    if chunk <= LEAST_SEGMENT:
        assert chosen == 1
        return
    assert LEAST_SEGMENT <= chunk / chosen <= LARGEST_SEGMENT
    for other in (chosen - 1, chosen + 1):
        if other >= 1 and LEAST_SEGMENT <= chunk / other <= LARGEST_SEGMENT:
            # They differ by at most one: the minimum is between two integers.
            assert round_time(chosen, chunk, alpha, gamma) <= round_time(other, chunk, alpha, gamma) * 1.07


@pytest.mark.parametrize(
    ("rounds", "gamma", "expected"), [(0, 1e-9, 1), (3, 0.0, 1), (3, 1e-9, 32)], ids=["no rounds", "nothing", "32"]
)
def test_without_combining_nothing_is_segmented(rounds: int, gamma: float, expected: int) -> None:
    assert segments_for(1 << 20, rounds, LinkCost(1e-6, 1e-10), gamma) in (expected, 16)  # 16: pieces of 64 KiB


def test_free_messages_are_cut_as_small_as_is_allowed() -> None:
    assert segments_for(1 << 20, 1, LinkCost(0.0, 1e-10), 1e-10) == 16


@every_algorithm
def test_best_segments_are_no_worse_than_one(verb: str, name: str) -> None:
    for nbytes in (1000, 1 << 20, 3_000_000):
        segments, seconds = best(verb, name, 12, nbytes, DEFAULT.network, DEFAULT.gamma)
        assert segments == best_segments(verb, name, 12, nbytes, DEFAULT.network, DEFAULT.gamma)
        assert seconds <= predict(verb, name, 12, nbytes, DEFAULT.network, DEFAULT.gamma) * 1.01


def test_pipelines_are_cut_by_their_size() -> None:
    def segments(name: str, nbytes: int) -> int:
        return best_segments("broadcast", name, 16, nbytes, LinkCost(1e-5, 1e-10), 1e-10)

    assert segments("chain", 1000) == 1
    assert segments("chain", 1 << 20) > 4
    assert segments("binomial_tree", 1 << 20) == 1  # its root sends everything to each child, in pieces or not


def test_data_is_cut_only_where_pieces_are_contiguous() -> None:
    """Recursive halving sends several chunks in a message; in an all-reduce they are one part of a block."""
    link, gamma = LinkCost(1e-6, 1e-10), 1e-9
    assert best_segments("reduce_scatter", "recursive_halving", 8, 1 << 28, link, gamma) == 1
    assert best_segments("reduce_scatter", "ring", 8, 1 << 28, link, gamma) > 1
    assert best_segments("all_reduce", "halving_doubling", 8, 1 << 28, link, gamma) > 1


def test_segments_for_a_slow_link_are_smaller() -> None:
    """Open MPI's TCP reached 80 to 90 % of 1 Gbit/s with 1 MiB, 95 % below 64 KiB; a fast fabric needs 1 MiB."""
    assert largest_segment(DEFAULT.network) == LARGEST_SEGMENT
    assert largest_segment(ETHERNET.network) == largest_segment(LinkCost(1e-5, 1e-6)) == 60 << 10
    link, gamma = ETHERNET.network, ETHERNET.gamma
    nbytes = 1 << 26
    for name, size in (
        ("ring", 2),
        ("ring", 5),
        ("halving_doubling", 8),
        ("double_tree", 8),
        ("recursive_doubling", 2),
    ):
        segments = best_segments("all_reduce", name, size, nbytes, link, gamma)
        chunk = nbytes / find("all_reduce", name).regions(size, 1)[0] / segments
        assert chunk <= 60 << 10 or name == "halving_doubling"  # its messages have several chunks


def test_large_messages_are_cut_for_the_memory_of_their_staging() -> None:
    """Although a message costs more than all combining, no piece is above the largest."""
    nbytes = 1 << 28
    assert best_segments("all_reduce", "ring", 2, nbytes, LinkCost(1.0, 1e-10), 1e-10) == nbytes / 2 / LARGEST_SEGMENT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduce", "star", 2, 1), "no algorithm 'star'"),
        (("all_shrink", "ring", 2, 1), "no collective is called"),
        (("all_reduce", "ring", 0, 1), "size must be at least 1, and finite, got 0"),
        (("all_reduce", "ring", 2, -1), "nbytes must be at least 0, and finite, got -1"),
        (("all_reduce", "ring", 2, math.nan), "nbytes must be at least 0, and finite, got nan"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, str, int, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        predict(*arguments, DEFAULT.network, DEFAULT.gamma)
    with pytest.raises(UsageError, match=message):
        best_segments(*arguments, DEFAULT.network, DEFAULT.gamma)
