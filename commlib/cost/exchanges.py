"""Exchanges: predict the time to send tokens to experts, with a message to each rank or to each node."""

from __future__ import annotations

from commlib.cost.model import Machine, check


def direct_seconds(nodes: int, ranks_per_node: int, tokens: float, row_bytes: float, top_k: int, m: Machine) -> float:
    """Return the seconds that one rank needs to send its tokens to their `top_k` experts, with a message to each rank.

    Experts are chosen uniformly, so a token goes to P (1 - (1 - 1/P)^k) of the P ranks on average, once to each. The
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
    """Return the seconds with one message to each node, which forwards the tokens through its shared memory.

    A token crosses the network once for each other node with some of its experts. Each received token is written once
    more for each rank that needs it.
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
    """Return the mean number of distinct places that independent choices hit."""
    return places * (1 - (1 - 1 / places) ** choices)
