"""Hierarchical: predict collectives over nodes of several ranks: shared memory in each, messages between them."""

from __future__ import annotations

from commlib.cost.model import Machine, best, check
from commlib.errors import UsageError
from commlib.schedule import LinkCost, find
from commlib.schedule.hierarchy import HIERARCHICAL

RAIL_BYTES = 64 << 10
"""The least data for each rail; less data uses fewer rails (see `collectives.rails`)."""


def predict_hierarchical(
    verb: str, algorithm: str, nodes: int, ranks_per_node: int, nbytes: float, machine: Machine
) -> float:
    """Return the seconds of a collective that uses shared memory in each node and `algorithm` between the nodes.

    On each of N nodes, C of its L ranks are on a rail: the c-th ranks of all nodes form rail c, which carries 1/C of
    the data. (C = L, or less if a rail would have less than 64 KiB.) The rails run the algorithm concurrently and
    share the nodes' cards: beta is C times as large for each. Before and after it a node's ranks synchronize, at the
    node's alpha, and the busiest rank combines or copies this part of the n bytes, at gamma for each byte:

                         before                  network    after
        all_reduce       (L-1)/C                 1/C        1 - 1/L, or 1 if C < L
        reduce_scatter   (L-1)/C                 1/C        1/(N L)
        all_gather       1/N + 1/(N C)           1/C        1 - 1/N
        broadcast        1/C                     1/C        1 - 1/L, or 1 if C < L
        all_to_all       1/N + (1 - 1/N) L/C     L/C        1 - 1/N
        barrier          0                       0          0

    (A test compares these with the steps in `schedule.hierarchy`.)

        seconds = 2 alpha_node + (before + after) n gamma + predict(verb, algorithm, N, network n, (alpha, C beta))

    at the best number of segments. With one rank per node there is nothing to synchronize. Raises UsageError for the
    other verbs: the port of their root is the bottleneck, and a hierarchy does not relieve it.
    """
    check(f"hierarchical {verb}", nodes=nodes, ranks_per_node=ranks_per_node, nbytes=nbytes)
    regions = find(verb, algorithm).regions(nodes, 1)
    if verb not in HIERARCHICAL:
        raise UsageError(f"{verb} has no hierarchical form; expected one of {', '.join(HIERARCHICAL)}")
    total = nbytes if regions else 0.0
    rails = max(1, min(ranks_per_node, int(total) // RAIL_BYTES))
    before, network, after = _shares(verb, nodes, ranks_per_node, rails)
    link = LinkCost(machine.network.alpha, machine.network.beta * rails)
    _, seconds = best(verb, algorithm, nodes, network * total, link, machine.gamma)
    if ranks_per_node == 1:
        return seconds
    return 2 * machine.node.alpha + (before + after) * total * machine.gamma + seconds


def _shares(verb: str, nodes: int, ranks: int, rails: int) -> tuple[float, float, float]:
    rest, elsewhere = 1.0 if rails < ranks else 1 - 1 / ranks, 1 - 1 / nodes
    return {
        "all_reduce": ((ranks - 1) / rails, 1 / rails, rest),
        "reduce_scatter": ((ranks - 1) / rails, 1 / rails, 1 / (nodes * ranks)),
        "all_gather": (1 / nodes + 1 / (nodes * rails), 1 / rails, elsewhere),
        "broadcast": (1 / rails, 1 / rails, rest),
        "all_to_all": (1 / nodes + elsewhere * ranks / rails, ranks / rails, elsewhere),
        "barrier": (0.0, 0.0, 0.0),
    }[verb]
