"""Flat algorithms over nodes: the link that a round waits for, and the ranks that share a card."""

from __future__ import annotations

import pytest

from commlib.cost.flat import predict_flat
from commlib.cost.model import Machine, best, predict
from commlib.schedule import LinkCost, algorithms, estimate, find, nodes, verbs

MACHINE = Machine(LinkCost(2e-6, 1e-10), LinkCost(2e-5, 2e-10), 1e-10)
N = 1 << 14
IN_STEP = [
    (verb, name)
    for verb in verbs()
    for name in algorithms(verb)
    if not find(verb, name).segmented and verb not in ("gather", "scatter")
]


@pytest.mark.parametrize(("verb", "name"), IN_STEP)
@pytest.mark.parametrize(("count", "per_node"), [(2, 2), (4, 2), (2, 4), (4, 4)])
def test_costs_equal_the_simulation_where_cards_do_not_limit(verb: str, name: str, count: int, per_node: int) -> None:
    """The simulation has no cards, so here network bytes cost nothing, and messages cost more than within a node."""
    machine = Machine(LinkCost(2e-6, 0.0), LinkCost(2e-5, 0.0), 1e-10)
    links = nodes(per_node, machine.node, machine.network)
    simulated = estimate(verb, name, count * per_node, N, links, gamma=machine.gamma).time
    bound = 0.35 if name == "direct" else 1e-9  # a port that waits for a slow message may have a fast one to carry
    assert predict_flat(verb, name, count, per_node, N, machine) == pytest.approx(simulated, rel=bound)


@pytest.mark.parametrize("verb", ["gather", "scatter"])
def test_a_root_s_messages_each_pay_their_link(verb: str) -> None:
    links = nodes(4, MACHINE.node, MACHINE.network)
    simulated = estimate(verb, "direct", 12, N, links, gamma=MACHINE.gamma).time
    assert predict_flat(verb, "direct", 3, 4, N, MACHINE) == pytest.approx(simulated)


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter", "all_gather"])
def test_in_a_ring_one_rank_of_a_node_sends_out(verb: str) -> None:
    """So the simulation applies without changes."""
    links = nodes(4, MACHINE.node, MACHINE.network)
    simulated = estimate(verb, "ring", 12, N, links, gamma=MACHINE.gamma).time
    assert predict_flat(verb, "ring", 3, 4, N, MACHINE) == pytest.approx(simulated)


def test_at_large_distances_all_ranks_of_a_node_share_its_card() -> None:
    """Recursive doubling on 4 nodes of 4: two exchanges within the node, two with 4 ranks on each card."""
    within, across = MACHINE.node, MACHINE.network
    expected = 2 * (within.alpha + N * within.beta) + 2 * (across.alpha + 4 * N * across.beta) + 4 * N * MACHINE.gamma
    assert predict_flat("all_reduce", "recursive_doubling", 4, 4, N, MACHINE) == pytest.approx(expected)


def test_the_card_carries_all_that_leaves_a_node() -> None:
    """On 3 nodes of 4 each of 4 ranks sends a chunk to each of 8 ranks elsewhere."""
    machine = Machine(LinkCost(0.0, 0.0), LinkCost(0.0, 1e-9), 0.0)
    expected = 4 * 8 * (N / 12) * 1e-9
    assert predict_flat("all_to_all", "pairwise", 3, 4, N, machine) == pytest.approx(expected)
    idle = (11 + 11 // 3) / 11
    assert predict_flat("all_gather", "direct", 3, 4, N, machine) == pytest.approx(expected * idle)


@pytest.mark.parametrize(("verb", "name"), IN_STEP)
def test_one_node_and_one_rank_per_node_have_known_costs(verb: str, name: str) -> None:
    for shape, link in (((1, 6), MACHINE.node), ((6, 1), MACHINE.network)):
        assert predict_flat(verb, name, *shape, N, MACHINE) == best(verb, name, 6, N, link, MACHINE.gamma)[1]


def test_trees_pay_the_worse_link() -> None:
    machine = Machine(LinkCost(2e-6, 4e-10), LinkCost(2e-5, 2e-10), 1e-10)
    expected = predict("broadcast", "binomial_tree", 8, N, LinkCost(2e-5, 4e-10), 1e-10)
    assert predict_flat("broadcast", "binomial_tree", 2, 4, N, machine) == pytest.approx(expected)
