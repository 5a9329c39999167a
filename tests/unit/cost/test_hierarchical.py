"""Hierarchical predictions, written out once for each verb."""

from __future__ import annotations

import pytest

from commlib.cost.hierarchical import RAIL_BYTES, predict_hierarchical
from commlib.cost.model import Machine, best
from commlib.errors import UsageError
from commlib.schedule import LinkCost, algorithms, verbs
from commlib.schedule.hierarchy import HIERARCHICAL

MACHINE = Machine(LinkCost(2e-6, 1e-10), LinkCost(1e-5, 2e-10), 3e-11)
N = 8 * RAIL_BYTES  # enough for 8 rails


@pytest.mark.parametrize(
    ("verb", "name", "across", "in_node"),
    [
        ("all_reduce", "ring", 1 / 8, 7 / 8 + 7 / 8),
        ("reduce_scatter", "ring", 1 / 8, 7 / 8 + 1 / 32),
        ("all_gather", "bruck", 1 / 8, 1 / 4 + 1 / 32 + 3 / 4),
        ("broadcast", "chain", 1 / 8, 1 / 8 + 7 / 8),
        ("all_to_all", "pairwise", 1, 1 / 4 + 3 / 4 + 3 / 4),
    ],
)
def test_four_nodes_of_eight_ranks_have_the_expected_cost(verb: str, name: str, across: float, in_node: float) -> None:
    """Eight rails share each card; in the node the ranks synchronise twice."""
    _, network = best(verb, name, 4, across * N, LinkCost(1e-5, 8 * 2e-10), 3e-11)
    expected = 2 * 2e-6 + in_node * N * 3e-11 + network
    assert predict_hierarchical(verb, name, 4, 8, N, MACHINE) == pytest.approx(expected)


def test_small_data_goes_through_one_rail() -> None:
    """Then that rank combines all, nobody shares the card, and the others copy everything."""
    _, network = best("all_reduce", "recursive_doubling", 4, 4096, MACHINE.network, 3e-11)
    expected = 2 * 2e-6 + (7 + 1) * 4096 * 3e-11 + network
    assert predict_hierarchical("all_reduce", "recursive_doubling", 4, 8, 4096, MACHINE) == pytest.approx(expected)


def test_a_barrier_has_no_data() -> None:
    _, network = best("barrier", "dissemination", 4, 0, MACHINE.network, 0)
    for nbytes in (0, 1 << 30):
        predicted = predict_hierarchical("barrier", "dissemination", 4, 8, nbytes, MACHINE)
        assert predicted == pytest.approx(network + 2 * 2e-6)


@pytest.mark.parametrize("verb", HIERARCHICAL)
def test_one_rank_per_node_has_no_hierarchy(verb: str) -> None:
    for name in algorithms(verb):
        _, flat = best(verb, name, 6, N, MACHINE.network, MACHINE.gamma)
        assert predict_hierarchical(verb, name, 6, 1, N, MACHINE) == pytest.approx(flat)


def test_verbs_without_a_hierarchy_are_refused() -> None:
    for verb in set(verbs()) - set(HIERARCHICAL):
        with pytest.raises(UsageError, match=f"{verb} has no hierarchical form; expected one of all_reduce"):
            predict_hierarchical(verb, algorithms(verb)[0], 2, 2, 1, MACHINE)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="ranks_per_node must be at least 1"):
        predict_hierarchical("all_reduce", "ring", 2, 0, 1, MACHINE)
    with pytest.raises(UsageError, match="no algorithm 'star'"):
        predict_hierarchical("all_reduce", "star", 2, 2, 1, MACHINE)
