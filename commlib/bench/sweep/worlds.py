"""Worlds: the first ranks of the first nodes measure, while the others sleep until they are done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from commlib.topology import Topology

NAP = 0.01  # seconds between two looks of a rank that sleeps: it must leave its core alone


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that measure. comm: theirs; world: the mpi4py communicator of the same ranks, for peers and figures;
    control: another one, on which they agree how a case has ended."""

    comm: Any
    world: Any
    control: Any


def members(topology: Topology, nodes: int, ranks_per_node: int) -> list[int]:
    """Return the ranks of a world, in the order of nodes."""
    return [rank for ranks in topology.nodes[:nodes] for rank in ranks[:ranks_per_node]]


@contextmanager
def entered(comm: Any, world: Any, nodes: int, ranks_per_node: int) -> Iterator[World | None]:
    """Yield the world, or None to a rank that is not in it and sleeps at the end until it is done. Collective.

    comm: of all ranks; world: the mpi4py communicator of the same.
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
        yield World(part, mine, control)
        part.close()
        control.Free()
        mine.Free()
    asleep(world.Ibarrier())


def asleep(request: Any, seconds: float | None = None) -> bool:
    """Wait for an MPI request with hardly any load; return whether it is done. seconds: wait no longer."""
    until = None if seconds is None else time.monotonic() + seconds
    while not request.Test():
        if until is not None and time.monotonic() > until:
            return False
        time.sleep(NAP)
    return True
