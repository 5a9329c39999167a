"""Ways between the ranks of an expert axis: layers of one axis share them, and the memory that they need."""

from __future__ import annotations

from dataclasses import dataclass, field

from commlib.communicator import Communicator
from commlib.compress.codec import Codec
from commlib.expert.alone import Alone
from commlib.expert.chosen import Chosen
from commlib.expert.exchange import Exchange
from commlib.expert.on_node import OnNode
from commlib.expert.placement import Placement
from commlib.expert.regions import Regions
from commlib.functional.axis import Axis


@dataclass(slots=True)
class _Ways:
    comm: Communicator
    regions: Regions | None
    made: dict[tuple[Placement, str], Exchange] = field(default_factory=dict)


def exchange_over(axis: Axis, placement: Placement, codec: Codec | None = None) -> Exchange:
    """Return how rows travel over an axis. Collective when it is first asked for.

    codec: how floats travel between ranks that share no memory, of a fixed length.
    """
    if axis.size == 1:
        return Alone(placement, axis.empty)
    ways = axis.exchanges
    if ways is None:
        comm = axis.comm.split(0, name=f"{axis.comm.name}.experts")
        assert comm is not None
        ways = axis.exchanges = _Ways(comm, Regions(comm) if comm.group.shares_memory else None)
    key = placement, "" if codec is None else codec.name
    if key not in ways.made:
        if ways.regions is not None:
            ways.made[key] = OnNode(ways.comm, placement, axis.empty, regions=ways.regions)
        else:
            ways.made[key] = Chosen(ways.comm, placement, axis.empty, codec=codec)
    found: Exchange = ways.made[key]
    return found
