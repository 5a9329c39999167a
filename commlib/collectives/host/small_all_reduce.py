"""Small all-reduce: the hierarchical all-reduce of little data, whose messages are set up once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from commlib.buffers.views import address_of
from commlib.collectives.call import Call
from commlib.collectives.host.node_exchanges import group_transfers, make_exchanges
from commlib.collectives.host.schedule_path import choose
from commlib.execution.persistent_programs import PersistentAllReduce
from commlib.execution.reduce_function import ReduceFunction
from commlib.group.group import Group
from commlib.node.collective import NodeCollective
from commlib.node.signature import signature
from commlib.schedule import program
from commlib.schedule.hierarchy import NodeStep, hierarchical_program
from commlib.schedule.rail_map import BUFFERS, Buffer


def small_all_reduce(group: Group, call: Call) -> PersistentAllReduce:
    """Prepare a small all-reduce on one rail, whose steps work on one buffer of each rank."""
    hierarchy, text = group.hierarchy, call.text
    small = PersistentAllReduce(ReduceFunction.of(call.dtype, call.op, group.size), call.count)
    steps = hierarchical_program("all_reduce", group.topology.nodes, 1, group.rank)
    nbytes = small.buffer.nbytes
    _add_exchanges(small, group, text, steps.before, small.combine)
    if steps.rail is not None:
        rail = hierarchy.rail
        assert rail is not None
        choice = choose(group, "all_reduce", "auto", rail.size, nbytes)
        rounds = program("all_reduce", choice.algorithm, rail.rank, rail.size)
        small.add_messages(rounds, rail, signature(text), group.waits.watch_each(text))
    _add_exchanges(small, group, text, steps.after, None)
    return small


def _add_exchanges(
    small: PersistentAllReduce, group: Group, text: str, steps: Sequence[NodeStep], op: ReduceFunction | None
) -> None:
    ranks, at = group.hierarchy.ranks, address_of(small.buffer)
    buffer: dict[Buffer, Buffer] = dict.fromkeys(BUFFERS, "target")
    for step in steps:
        if step.is_local:
            continue
        runs = [(0, 0, small.buffer.nbytes)] * len(step.transfers)
        for pairs in group_transfers(step, runs, ranks, buffer).values():
            for exchange in make_exchanges(pairs, group.hierarchy.place, len(ranks), reduce=step.reduce, nbytes=None):
                collective = NodeCollective.exchange(group.open(), text, exchange, op)
                small.then(partial(collective.run_at, at, at))
