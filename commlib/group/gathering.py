"""Gathering: all-gather objects of the ranks, and find the topology, with a transport only."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from commlib.dtypes import Array
from commlib.execution.streaming import Region, execute
from commlib.node.signature import signature
from commlib.schedule import program
from commlib.schedule.ir import Program
from commlib.schedule.layout import even, uneven
from commlib.topology import Topology
from commlib.transport.base import Transport


class ProgramRunner(Protocol):
    """A function that runs a program over blocks of the data, by messages of a transport: see `Programs.execute`."""

    def __call__(
        self, program: Program, blocks: Sequence[Sequence[Region]], text: str, *, transport: Transport
    ) -> None: ...


def execute_unwatched(program: Program, blocks: Sequence[Sequence[Region]], text: str, *, transport: Transport) -> None:
    """Run a program without a group that watches its waits."""
    execute(program, blocks, transport, tag=signature(text), on_wait=lambda: None)


def gather_objects(value: Any, transport: Transport, execute: ProgramRunner = execute_unwatched) -> list[Any]:
    """Return the picklable objects of all ranks. Collective."""
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    gather = partial(_gather, transport=transport, execute=execute)
    lengths = gather(np.array([len(data)], np.int64), [1] * transport.size, "lengths")
    whole = gather(data, [int(length) for length in lengths], "objects")
    return [pickle.loads(part.tobytes()) for part in np.split(whole, np.cumsum(lengths)[:-1])]


def find_topology(transport: Transport) -> Topology:
    """Return the ranks by node. Collective."""
    node = transport.split_node()
    leader = min(_gather_integers(node, transport.rank))
    node.close()
    return Topology.of(_gather_integers(transport, leader))


def _gather(own: Array, counts: Sequence[int], text: str, *, transport: Transport, execute: ProgramRunner) -> Array:
    layout = uneven(counts)
    whole = np.empty(layout.count, own.dtype)
    start, stop = layout.slice_of(transport.rank)
    whole[start:stop] = own
    ring = program("all_gather", "ring", transport.rank, transport.size)
    execute(ring, [[Region(whole, layout)]], text, transport=transport)
    return whole


def _gather_integers(transport: Transport, value: int) -> list[int]:
    gathered = np.zeros(transport.size, np.int64)
    gathered[transport.rank] = value
    bruck = program("all_gather", "bruck", transport.rank, transport.size)
    region = Region(gathered, even(transport.size, transport.size))
    execute_unwatched(bruck, [[region]], "topology", transport=transport)
    return [int(number) for number in gathered]
