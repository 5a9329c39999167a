"""Collectives over nodes of several ranks: shared memory within each, an algorithm between them."""

from __future__ import annotations

from commlib.cost.model import Machine, best, check
from commlib.errors import UsageError
from commlib.schedule import Link, find

HIERARCHICAL = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")
"""The verbs that have a hierarchical form."""

RAIL_BYTES = 64 << 10
"""With less than this for each rail, fewer rails carry the data (see `collectives.rails`)."""


def predict_hierarchical(
    verb: str, algorithm: str, nodes: int, ranks_per_node: int, nbytes: float, machine: Machine
) -> float:
    """Return the seconds of a collective that uses shared memory in each node and `algorithm` between the nodes.

    On each of N nodes, C of its L ranks are on a rail: the c-th of each form rail c, which carries 1/C of the
    data. (C = L, or fewer where a rail would have less than 64 KiB.) The rails run the algorithm side by side and
    share the nodes' cards: beta is C times as large for each. Before and after it the ranks of a node meet, at alpha
    of the node, and the busiest combines or copies this part of the n bytes, at gamma for each byte:

                         before     network    after
        all_reduce       (L-1)/C    1/C        1 - 1/L, or 1 if C < L
        reduce_scatter   (L-1)/C    1/C        1/(N L)
        all_gather       1/(N C)    1/C        1 - 1/L, or 1 if C < L
        broadcast        1/C        1/C        1 - 1/L, or 1 if C < L
        all_to_all       L/C        L/C        1
        barrier          0          0          0

        seconds = 2 alpha_node + (before + after) n gamma + predict(verb, algorithm, N, network n, (alpha, C beta))

    at the best number of segments. One rank per node has no node to meet in. Raises UsageError for the other verbs:
    they have a root whose port is the bound, and nodes do not relieve it.
    """
    check(f"hierarchical {verb}", nodes=nodes, ranks_per_node=ranks_per_node, nbytes=nbytes)
    regions = find(verb, algorithm).regions(nodes, 1)
    if verb not in HIERARCHICAL:
        raise UsageError(f"{verb} has no hierarchical form; those that have are {', '.join(HIERARCHICAL)}")
    total = nbytes if regions else 0.0
    rails = max(1, min(ranks_per_node, int(total) // RAIL_BYTES))
    before, network, after = _parts(verb, nodes, ranks_per_node, rails)
    link = Link(machine.network.alpha, machine.network.beta * rails)
    _, seconds = best(verb, algorithm, nodes, network * total, link, machine.gamma)
    if ranks_per_node == 1:
        return seconds
    return 2 * machine.node.alpha + (before + after) * total * machine.gamma + seconds


def _parts(verb: str, nodes: int, ranks: int, rails: int) -> tuple[float, float, float]:
    rest = 1.0 if rails < ranks else 1 - 1 / ranks
    return {
        "all_reduce": ((ranks - 1) / rails, 1 / rails, rest),
        "reduce_scatter": ((ranks - 1) / rails, 1 / rails, 1 / (nodes * ranks)),
        "all_gather": (1 / (nodes * rails), 1 / rails, rest),
        "broadcast": (1 / rails, 1 / rails, rest),
        "all_to_all": (ranks / rails, ranks / rails, 1.0),
        "barrier": (0.0, 0.0, 0.0),
    }[verb]
