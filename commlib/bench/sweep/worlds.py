"""Worlds: the first ranks of the first nodes measure, while the others sleep."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from commlib.topology import Topology

NAP = 0.01  # seconds between two polls of a sleeping rank, which must leave its core free


@dataclass(frozen=True, slots=True)
class SweepWorld:
    """The ranks that measure. comm: their communicator; world: an mpi4py communicator of the same ranks, for peers and
    figures; control: another one, on which they agree on the result of a case."""

    comm: Any
    world: Any
    control: Any


def members(topology: Topology, nodes: int, ranks_per_node: int) -> list[int]:
    """Return the ranks of a world, ordered by node."""
    return [rank for ranks in topology.nodes[:nodes] for rank in ranks[:ranks_per_node]]


@contextmanager
def enter_world(comm: Any, world: Any, nodes: int, ranks_per_node: int) -> Iterator[SweepWorld | None]:
    """Yield the world, or None on a rank outside it, which then sleeps until the world is done. Collective.

    comm: of all ranks; world: the mpi4py communicator of the same ranks.
    """
    chosen = members(comm.topology, nodes, ranks_per_node)
    is_in = comm.rank in chosen
    place = chosen.index(comm.rank) if is_in else 0
    part = comm.split(0 if is_in else -1, place, name=f"{nodes}x{ranks_per_node}")
    mine = world.Split(0 if is_in else MPI.UNDEFINED, place)
    if part is None:
        yield None
    else:
        control = mine.Dup()
        yield SweepWorld(part, mine, control)
        part.close()
        control.Free()
        mine.Free()
    wait_asleep(world.Ibarrier())


def wait_asleep(request: Any, seconds: float | None = None) -> bool:
    """Wait for an MPI request with little load; return whether it is done. seconds: the maximum time to wait."""
    until = None if seconds is None else time.monotonic() + seconds
    while not request.Test():
        if until is not None and time.monotonic() > until:
            return False
        time.sleep(NAP)
    return True
