"""Topology: ranks share nodes, and rails run between nodes."""

from __future__ import annotations

import pytest

from commlib.errors import UsageError
from commlib.topology import Topology


def test_ranks_are_grouped_by_node_in_the_order_of_their_first_ranks():
    topology = Topology.of([7, 3, 7, 3, 3, 9, 9])
    assert topology.nodes == ((0, 2), (1, 3, 4), (5, 6))
    assert [topology.node(rank) for rank in range(7)] == [0, 1, 0, 1, 1, 2, 2]


def test_the_smallest_node_sets_the_number_of_columns():
    topology = Topology.of([0, 0, 0, 1, 1])
    assert topology.rails == 2
    assert [topology.rail(number) for number in range(2)] == [(0, 3), (1, 4)]
    assert not topology.is_flat
    assert Topology.of([0, 1, 2]).is_flat and Topology.of([0, 1, 2]).rails == 1


def test_no_ranks_have_no_topology():
    with pytest.raises(UsageError):
        Topology.of([])
