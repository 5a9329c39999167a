"""`commlib show VERB --algorithm hierarchical`: the steps of a verb in nodes and between them."""

from __future__ import annotations

from commlib.schedule import Program
from commlib.schedule.expansion import expand, rail_algorithms
from commlib.schedule.hierarchy import hierarchical_program

HIERARCHY = "hierarchical"


def expand_all(
    verb: str, nodes: int, ranks_per_node: int, rails: int | None, root: int, between: str | None
) -> list[Program]:
    """Return the programs of all ranks, numbered node by node, as rounds. Raises UsageError.

    rails: None for one of each rank of a node. between: the algorithm of the rails, None for the first.
    """
    size = nodes * ranks_per_node
    cluster = tuple(tuple(range(first, first + ranks_per_node)) for first in range(0, size, ranks_per_node))
    count = ranks_per_node if rails is None else rails
    programs = [hierarchical_program(verb, cluster, count, rank, root) for rank in range(size)]
    return [expand(each, between or rail_algorithms(verb)[0]) for each in programs]
