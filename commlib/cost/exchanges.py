"""The cost of sending tokens to experts: to each rank by itself, or to each node once."""

from __future__ import annotations

from commlib.cost.model import Machine, check


def direct_seconds(nodes: int, ranks_per_node: int, tokens: float, row_bytes: float, top_k: int, m: Machine) -> float:
    """Return the seconds that one rank needs to send its tokens, each to its `top_k` experts, a message to each rank.

    Experts are chosen evenly, so that of P ranks a token needs P (1 - (1 - 1/P)^k): it goes once to each of them. The
    ranks of a node share its card.
    """
    check("an exchange", nodes=nodes, ranks_per_node=ranks_per_node, top_k=top_k)
    ranks = nodes * ranks_per_node
    copies = tokens * _distinct(ranks, top_k)
    far, near = (ranks - ranks_per_node) / ranks, (ranks_per_node - 1) / ranks
    return (
        (ranks - ranks_per_node) * m.network.alpha
        + copies * far * row_bytes * m.network.beta * ranks_per_node
        + (ranks_per_node - 1) * m.node.alpha
        + copies * near * row_bytes * m.node.beta
    )


def hierarchical_seconds(
    nodes: int, ranks_per_node: int, tokens: float, row_bytes: float, top_k: int, m: Machine
) -> float:
    """Return the seconds of the same with one message to each node, and its memory from there on.

    A token crosses the network once for each other node that has some of its experts. What came is written once more,
    to each rank that needs it.
    """
    check("an exchange", nodes=nodes, ranks_per_node=ranks_per_node, top_k=top_k)
    copies = tokens * _distinct(nodes, top_k)
    return (
        (nodes - 1) * m.network.alpha
        + copies * (nodes - 1) / nodes * row_bytes * m.network.beta * ranks_per_node
        + 2 * m.node.alpha
        + tokens * top_k * row_bytes * m.gamma
    )


def _distinct(places: int, choices: int) -> float:
    """Return how many of so many places are hit by independent choices, on average."""
    return places * (1 - (1 - 1 / places) ** choices)
