"""Flat: predict algorithms that ignore nodes, on a cluster with several ranks on each node."""

from __future__ import annotations

from commlib.cost.model import Machine, best
from commlib.cost.rounds import Step, rank_steps
from commlib.schedule import LinkCost, find


def predict_flat(verb: str, algorithm: str, nodes: int, ranks_per_node: int, nbytes: float, machine: Machine) -> float:
    """Return the seconds of an algorithm among all ranks, numbered node by node.

    Where ranks run in lock step, a round takes as long as its slowest link. That is the link of the node, or the
    network's with beta times the number of ranks of a node that send out of it at once, because they share its card.
    (So a ring pays for one, recursive doubling at large distances for all.) In a tree few ranks of a node have a
    partner on another node, so they do not share the card; the prediction uses the worse of both links everywhere.
    """
    size = nodes * ranks_per_node
    if nodes == 1 or ranks_per_node == 1:
        link = machine.node if nodes == 1 else machine.network
        return best(verb, algorithm, size, nbytes, link, machine.gamma)[1]
    chosen = find(verb, algorithm)
    worse = LinkCost(max(machine.node.alpha, machine.network.alpha), max(machine.node.beta, machine.network.beta))
    segments, seconds = best(verb, algorithm, size, nbytes, worse, machine.gamma)
    if chosen.segmented:
        return seconds
    regions = chosen.regions(size, 1)
    chunk = nbytes / regions[0] if regions else 0.0
    return max(
        sum(step.times * _seconds(step, rank, size, ranks_per_node, chunk, machine, segments) for step in steps)
        for rank, steps in enumerate(rank_steps(verb, algorithm, size, 1))
    )


def _seconds(step: Step, rank: int, size: int, per_node: int, chunk: float, machine: Machine, segments: int) -> float:
    local, network = machine.node, machine.network

    def over(alpha: float, beta: float) -> float:
        return segments * step.messages * alpha + step.chunks * chunk * beta

    within = over(local.alpha, local.beta)
    if step.messages and not step.shift:  # to several peers in turn: all ranks to all others, or the root alone
        outside = (size - per_node) / (size - 1)
        sharing = per_node if step.mutual else 1
        transfer = outside * over(network.alpha, network.beta * sharing) + (1 - outside) * within
    elif crossing := _count_crossing(step, rank, size, per_node):
        transfer = max(within, over(network.alpha, network.beta * crossing))
    else:
        transfer = within
    return transfer + (step.combined / segments + step.copied) * chunk * machine.gamma


def _count_crossing(step: Step, rank: int, size: int, per_node: int) -> int:
    """Return how many ranks of a node send out of it in a round in which each sends to one peer."""
    if not step.messages:
        return 0
    if step.mutual:  # pairs: all ranks of a node have partners at the same distance
        peer = (rank + step.shift) % size
        return per_node * (peer // per_node != rank // per_node)
    return min(step.shift, size - step.shift, per_node)  # all ranks to the rank this far above
