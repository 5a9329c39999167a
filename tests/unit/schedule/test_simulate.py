"""The simulation against closed formulas."""

from __future__ import annotations

from math import log2

import pytest

from commlib.errors import CommlibError
from commlib.schedule import LinkCost, Recv, Round, Send, Span, estimate, nodes, simulate

ALPHA, BETA, GAMMA = 2e-6, 1e-10, 3e-11
N = 1_000_000.0
LINK = LinkCost(ALPHA, BETA)


def time(verb: str, name: str, size: int, **options: int) -> float:
    return estimate(verb, name, size, N, LINK, gamma=GAMMA, **options).time


@pytest.mark.parametrize("size", [2, 3, 5, 8, 32])
def test_a_ring_matches_its_formula(size: int) -> None:
    piece = N / size
    expected = (size - 1) * (2 * (ALPHA + piece * BETA) + piece * GAMMA)
    assert time("all_reduce", "ring", size) == pytest.approx(expected)


@pytest.mark.parametrize("size", [2, 4, 16, 64])
def test_power_of_two_algorithms_match_their_formulas(size: int) -> None:
    steps, share = log2(size), (size - 1) / size
    assert time("all_reduce", "recursive_doubling", size) == pytest.approx(steps * (ALPHA + N * (BETA + GAMMA)))
    both = 2 * steps * ALPHA + share * N * (2 * BETA + GAMMA)
    assert time("all_reduce", "halving_doubling", size) == pytest.approx(both)
    assert time("all_reduce", "bruck", size) == pytest.approx(both)
    assert time("broadcast", "binomial_tree", size) == pytest.approx(steps * (ALPHA + N * BETA))
    assert time("barrier", "dissemination", size) == pytest.approx(steps * ALPHA)


@pytest.mark.parametrize("size", [2, 3, 7, 20])
@pytest.mark.parametrize("segments", [1, 4, 50])
def test_a_chain_matches_its_formula(size: int, segments: int) -> None:
    one = ALPHA + N / segments * BETA
    assert time("broadcast", "chain", size, segments=segments) == pytest.approx((size - 2 + segments) * one)


@pytest.mark.parametrize("size", [2, 5, 16])
def test_the_root_has_one_port(size: int) -> None:
    expected = (size - 1) * (ALPHA + N / size * BETA)
    assert time("gather", "direct", size, root=1) == pytest.approx(expected)
    assert time("scatter", "direct", size, root=1) == pytest.approx(expected)


def test_copies_cost_gamma() -> None:
    """Pairwise copies its own chunk first."""
    expected = N / 4 * GAMMA + 3 * (ALPHA + N / 4 * BETA)
    assert time("all_to_all", "pairwise", 4) == pytest.approx(expected)


def test_links_distinguish_nodes() -> None:
    """Recursive doubling on 2 nodes of 2 ranks: the first exchange stays in the node."""
    local, network = LinkCost(1e-6, 1e-11), LinkCost(1e-5, 1e-9)
    got = estimate("all_reduce", "recursive_doubling", 4, N, nodes(2, local, network)).time
    assert got == pytest.approx(local.alpha + N * local.beta + network.alpha + N * network.beta)


def test_pieces_for_the_same_rank_pay_alpha_once() -> None:
    two = (Span(0, 1), Span(2, 3))
    sender = [Round(sends=tuple(Send(1, span) for span in two))]
    receiver = [Round(recvs=tuple(Recv(0, span) for span in two))]
    result = simulate([sender, receiver], 1000, LINK)
    assert result.time == pytest.approx(ALPHA + 2000 * BETA)
    assert result.sent == (2000, 0)
    assert result.messages == (2, 0)


def test_pipelined_double_tree_beats_the_unpipelined_and_nears_the_bandwidth_bound() -> None:
    free = LinkCost(0.0, BETA)
    once, often = (estimate("all_reduce", "double_tree", 64, N, free, segments=s).time for s in (1, 200))
    bound = 2 * N * BETA
    assert bound <= often < 1.35 * bound
    assert once > 3 * bound


def test_bytes_and_messages() -> None:
    result = estimate("all_reduce", "ring", 8, 800.0, LINK)
    assert result.sent == (1400.0,) * 8
    assert result.messages == (14,) * 8


def test_no_message_takes_no_time() -> None:
    assert estimate("all_reduce", "ring", 1, N, LINK).time == 0


def test_thousands_of_ranks_are_simulated() -> None:
    result = estimate("all_reduce", "recursive_doubling", 4096, N, LINK)
    assert result.time == pytest.approx(12 * (ALPHA + N * BETA))


def test_a_halt_is_an_error() -> None:
    with pytest.raises(CommlibError, match="1 of 2 ranks wait forever"):
        simulate([[Round(sends=(Send(1, Span(0, 1)),))], []], 1, LINK)
