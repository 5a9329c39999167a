"""Verbs on picklable objects. Unpickling runs code: ranks trust each other."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.collectives.host.gathering import gather_counts, gather_parts
from commlib.collectives.host.schedule_path import own_program
from commlib.dtypes import Array
from commlib.execution.streaming import Region
from commlib.group.arguments import check_root
from commlib.group.group import Group
from commlib.group.operation import Operation
from commlib.node.collective import NOTHING, Exchange, NodeCollective
from commlib.schedule.layout import even


def broadcast_object(group: Group, value: Any, root: int) -> Operation:
    root = check_root(group, "broadcast_object", root)
    text = f"broadcast_object, root={root}"
    data = pickle.dumps(value) if group.rank == root else b""  # fails for an unpicklable value before ranks communicate
    return Operation(text, lambda: broadcast_bytes(group, data, root, text), finish=pickle.loads)


def broadcast_bytes(group: Group, data: bytes, root: int, text: str) -> bytes:
    """Broadcast bytes within an operation. Only `root` knows their number."""
    length = np.array([len(data)], np.int64)
    _broadcast(group, length, root, text, 0)
    array = np.frombuffer(data, np.uint8) if group.rank == root else np.empty(int(length[0]), np.uint8)
    _broadcast(group, array, root, text, 1)
    return array.tobytes()


def _broadcast(group: Group, array: Array, root: int, text: str, part: int) -> None:
    if group.shares_memory:
        at_root = group.rank == root
        whole = (0, array.nbytes)
        takes = [whole if rank == root and not at_root else NOTHING for rank in range(group.size)]
        exchange = Exchange([whole if at_root else NOTHING], takes, array.nbytes)
        NodeCollective.exchange(group.open(), text, exchange).run_at(address_of(array), address_of(array))
    else:
        tree = own_program(group, "broadcast", "binomial_tree", root=root)
        group.programs.execute(tree, [[Region(array, even(len(array), 1))]], text, part=part)


def all_gather_object(group: Group, value: Any, text: str = "all_gather_object") -> Operation:
    """Return the operation. text: names the call; ranks that pass different texts make different calls."""
    data = np.frombuffer(pickle.dumps(value), np.uint8)

    def run() -> list[Array]:
        lengths = gather_counts(group, text, np.array([len(data)], np.int64))
        whole = np.empty(int(lengths.sum()), np.uint8)
        gather_parts(group, text, data, whole, [int(length) for length in lengths])
        return np.split(whole, np.cumsum(lengths)[:-1])

    def load(parts: list[Array]) -> list[Any]:
        return [pickle.loads(part.tobytes()) for part in parts]

    return Operation(text, run, finish=load)
