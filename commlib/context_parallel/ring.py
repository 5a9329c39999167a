"""Ring attention, once for all frameworks: keys and values travel round the ranks, queries stay.

Each rank computes its queries with the keys and values that are there while the next ones arrive, and merges what it
gets by the stats of the scores. In the backward keys and values travel again; their gradients travel behind them,
each rank adds its part, and after `size` steps they come home. So a rank holds two ranks' keys and values at a time,
and the scores of one block. Source: Liu et al., Ring Attention with Blockwise Transformers (2023), arXiv:2310.01889.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from commlib.communicator import Communicator
from commlib.context_parallel import Block, Step
from commlib.devices.array import DeviceArray
from commlib.p2p.channels.device_channel import DeviceChannel
from commlib.sharding.axis import Axis

T = TypeVar("T")

KEYS, GRADIENTS = 32_766, 32_767  # tags of messages


class Blocks(Protocol[T]):
    """What a framework computes. Tensors are (batch, heads, tokens, head_dim); keys and values are one, stacked first.

    Sums are of float32 at least. The stats of scores are (batch, heads, tokens, 2): the largest one, or what takes its
    place, and the sum of exp(score - largest); kept apart, for one number cannot hold a largest score such as the
    least number there is, with which models hide keys, and how often there is one.
    """

    def rows(self, x: T, span: tuple[int, int]) -> T:
        """Return some of the tokens."""
        ...

    def attend(self, q: T, kv: T, block: Block, source: int) -> tuple[T, T]:
        """Return the softmax over these keys' scores times their values, and the scores' stats.

        q, kv: the rows of a block, whose keys are those of the rank `source`.
        """
        ...

    def gradients(self, gradient: T, q: T, kv: T, out: T, stats: T, block: Block, source: int) -> tuple[T, T]:
        """Return the gradients of q and kv for the part of these keys in `out`, the result over all keys."""
        ...

    def nothing(self, q: T) -> tuple[T, T]:
        """Return the result over no keys: zeros, and a largest score of minus infinity. It may be written to."""
        ...

    def merge(self, found: tuple[T, T], span: tuple[int, int], more: tuple[T, T]) -> tuple[T, T]:
        """Return `found`, to whose rows in `span` further keys are added."""
        ...

    def zeros(self, x: T) -> T:
        """Return zeros in the dtype of sums. They may be written to."""
        ...

    def add(self, total: T, span: tuple[int, int], x: T) -> T:
        """Return `total`, to whose rows in `span` x is added."""
        ...

    def plus(self, x: T, y: T) -> T:
        """Return the sum."""
        ...

    def pass_on(self, x: T, tokens: int, tag: int) -> Callable[[], T]:
        """Give x to the next rank; return what waits for that of the rank before, which has some tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Ring:
    """A rank's steps. counts: how many tokens each rank has."""

    steps: Sequence[Step]
    counts: Sequence[int]

    def forward(self, blocks: Blocks[T], q: T, kv: T) -> tuple[T, T]:
        """Return this rank's results and their stats. Collective. Queries that see no key get zeros."""
        found = blocks.nothing(q)
        for number, step in enumerate(self.steps):
            following = self._keys_of_next(blocks, number, kv)
            for block in step.blocks:
                more = blocks.attend(blocks.rows(q, block.queries), blocks.rows(kv, block.keys), block, step.source)
                found = blocks.merge(found, block.queries, more)
            if following is not None:
                kv = following()
        return found

    def backward(self, blocks: Blocks[T], gradient: T, q: T, kv: T, out: T, stats: T) -> tuple[T, T]:
        """Return the gradients of q, and of this rank's kv over all ranks' queries. Collective."""
        of_q = blocks.zeros(q)
        arriving: Callable[[], T] | None = None
        home = self.steps[0].source
        for number, step in enumerate(self.steps):
            following = self._keys_of_next(blocks, number, kv)
            of_kv = blocks.zeros(kv)
            for block in step.blocks:
                mine = [blocks.rows(x, block.queries) for x in (gradient, q, out, stats)]
                theirs = blocks.rows(kv, block.keys)
                parts = blocks.gradients(mine[0], mine[1], theirs, mine[2], mine[3], block, step.source)
                of_q = blocks.add(of_q, block.queries, parts[0])
                of_kv = blocks.add(of_kv, block.keys, parts[1])
            if arriving is not None:
                of_kv = blocks.plus(arriving(), of_kv)
            if len(self.steps) == 1:
                return of_q, of_kv
            source = home if following is None else self.steps[number + 1].source
            arriving = blocks.pass_on(of_kv, self.counts[source], GRADIENTS)
            if following is not None:
                kv = following()
        assert arriving is not None
        return of_q, arriving()

    def _keys_of_next(self, blocks: Blocks[T], number: int, kv: T) -> Callable[[], T] | None:
        if number + 1 == len(self.steps):
            return None
        return blocks.pass_on(kv, self.counts[self.steps[number + 1].source], KEYS)


def pass_on(axis: Axis, x: Any, tokens: int, tag: int) -> Callable[[], Any]:
    """Give an array to the next rank of an axis; return what waits for that of the rank before.

    x: (..., tokens, head_dim), contiguous; it must not change until then. Where nothing overlaps, all is done then.
    Arrays of devices go from device to device, on the current stream.
    """
    comm, after, before = axis.comm, (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    shape = *x.shape[:-2], tokens, x.shape[-1]
    if type(x) is DeviceArray:
        leaving, arriving = (_channel(comm, peer, x, tag) for peer in (after, before))
        leaving.send(x.reshape(-1).view(np.uint8))
        return lambda: _received(arriving, shape, x.dtype)
    out = axis.empty(shape, x.dtype)
    if axis.overlaps:
        return comm.send_recv_async(x, after, out, before, tag).wait
    return lambda: comm.send_recv(x, after, out, before, tag)


def _channel(comm: Communicator, peer: int, x: DeviceArray, tag: int) -> DeviceChannel:
    """Return the channel to a rank for arrays of a device, which stays open, and grows."""
    key = "ring", peer, tag, x.device.name
    channel: DeviceChannel | None = comm.kept.get(key)
    if channel is None:
        channel = comm.kept[key] = comm.channel(peer, f"ring {tag}", 1, "uint8", device=x.device)
    return channel


def _received(channel: DeviceChannel, shape: tuple[int, ...], dtype: Any) -> Any:
    made = channel.recv()
    channel.release(made)  # the array stays
    return channel.device.wrap(made, "ring").view(dtype).reshape(shape)
