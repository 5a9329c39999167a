"""Rail map: which rail carries the data of which ranks, and the chunks in each rank's buffers in a hierarchical verb.

The data is numbered in chunks: one for each rail if every rank has all of the data (all_reduce, broadcast), else one
for each rank. A rank has four buffers of such chunks: `source` and `target` (of the caller; a broadcast has only
`target`), `outgoing` (what the rail's verb reads) and `incoming` (what it writes).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Literal, get_args

Buffer = Literal["source", "target", "outgoing", "incoming"]
BUFFERS: tuple[Buffer, ...] = get_args(Buffer)


@dataclass(frozen=True, slots=True)
class RailMap:
    """The ranks of each node, and the number of rails in use. It is at most the size of the smallest node."""

    nodes: tuple[tuple[int, ...], ...]
    rails: int

    @property
    def size(self) -> int:
        return sum(map(len, self.nodes))

    def members(self, node: int, rail: int) -> tuple[int, ...]:
        """Return the ranks of a node whose data goes over a rail. The first of them is on the rail."""
        return self.nodes[node][rail :: self.rails]

    def order(self, rail: int) -> tuple[int, ...]:
        """Return all ranks whose data goes over a rail, by node."""
        return tuple(chain.from_iterable(self.members(node, rail) for node in range(len(self.nodes))))

    @property
    def most_members(self) -> int:
        """The largest number of a node's ranks whose data one rail carries."""
        return max(len(self.members(node, 0)) for node in range(len(self.nodes)))

    def node(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return next(number for number, ranks in enumerate(self.nodes) if rank in ranks)

    def chunks(self, verb: str, rank: int, buffer: Buffer) -> tuple[int, ...]:
        """Return the numbers of the data's chunks in a buffer of a rank, in order.

        In an all_to_all of P ranks the chunk for rank r from rank s is s P + r.
        """
        node = self.node(rank)
        ranks, size = self.nodes[node], self.size
        place, everyone = ranks.index(rank), tuple(range(size))
        others = [number for number in range(len(self.nodes)) if number != node]
        match verb, buffer:
            case "barrier", _:
                return ()
            case "all_reduce" | "broadcast", "source" | "target":
                return tuple(range(self.rails))
            case ("reduce_scatter", "source") | ("all_gather", "target"):
                return everyone
            case ("reduce_scatter", "target") | ("all_gather", "source"):
                return (rank,)
            case "all_to_all", "source":
                return tuple(rank * size + receiver for receiver in everyone)
            case "all_to_all", "target":
                return tuple(sender * size + rank for sender in everyone)
            case _ if place >= self.rails:
                return ()
            case "all_reduce" | "broadcast", _:
                return (place,)
            case ("reduce_scatter", "outgoing") | ("all_gather", "incoming"):
                return self.order(place)
            case ("reduce_scatter", "incoming") | ("all_gather", "outgoing"):
                return self.members(node, place)
            case "all_to_all", "outgoing":
                return tuple(s * size + r for other in others for s in ranks for r in self.members(other, place))
            case _:
                receivers = self.members(node, place)
                return tuple(s * size + r for other in others for s in self.nodes[other] for r in receivers)
