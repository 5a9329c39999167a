"""Ring attention for all frameworks: keys and values travel around the ring of ranks, queries stay.

Each rank attends to the keys and values that it has while the next ones arrive, and merges the results by the stats of
the scores. In the backward, keys and values travel again, followed by their gradients: each rank adds its part, and
after `size` steps they return to their rank. A rank holds the keys and values of two ranks at a time, and the scores of
one block. Source: Liu et al., Ring Attention with Blockwise Transformers (2023), arXiv:2310.01889.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from commlib.communicator import Communicator
from commlib.context_parallel import Block, RingStep
from commlib.devices.array import DeviceArray
from commlib.p2p.channels.device_channel import DeviceChannel
from commlib.sharding.axis import ParallelAxis

T = TypeVar("T")

KEYS, GRADIENTS = 32_766, 32_767  # tags of messages


class AttentionBlocks(Protocol[T]):
    """The operations of a framework. Tensors are (batch, heads, tokens, head_dim); keys and values are stacked in one.

    Sums are float32 at least. The stats of scores are (batch, heads, tokens, 2): the largest score, or its substitute,
    and the sum of exp(score - largest). Two numbers are needed: models hide keys with the least representable score,
    and one number cannot hold that and the count of such keys.
    """

    def rows(self, x: T, span: tuple[int, int]) -> T:
        """Return the tokens of a span."""
        ...

    def attend(self, q: T, kv: T, block: Block, source: int) -> tuple[T, T]:
        """Return the softmax over these keys' scores times their values, and the scores' stats.

        q, kv: the rows of a block; the keys belong to the rank `source`.
        """
        ...

    def gradients(self, gradient: T, q: T, kv: T, out: T, stats: T, block: Block, source: int) -> tuple[T, T]:
        """Return the gradients of q and kv from these keys' contribution to `out`, the result over all keys."""
        ...

    def nothing(self, q: T) -> tuple[T, T]:
        """Return the result over no keys: zeros, and a largest score of minus infinity. It may be written to."""
        ...

    def merge(self, result: tuple[T, T], span: tuple[int, int], more: tuple[T, T]) -> tuple[T, T]:
        """Add further keys to the rows of `result` in `span`, and return it."""
        ...

    def zeros(self, x: T) -> T:
        """Return zeros in the dtype of sums. They may be written to."""
        ...

    def add(self, total: T, span: tuple[int, int], x: T) -> T:
        """Add x to the rows of `total` in `span`, and return it."""
        ...

    def plus(self, x: T, y: T) -> T:
        """Return the sum."""
        ...

    def pass_on(self, x: T, tokens: int, tag: int) -> Callable[[], T]:
        """Send x to the next rank; return a function that waits for the previous rank's tensor, of `tokens` tokens."""
        ...


@dataclass(frozen=True, slots=True)
class ContextRing:
    """The steps of a rank. counts: number of tokens of each rank."""

    steps: Sequence[RingStep]
    counts: Sequence[int]

    def forward(self, blocks: AttentionBlocks[T], q: T, kv: T) -> tuple[T, T]:
        """Return this rank's results and their stats. Collective. Queries that see no key get zeros."""
        result = blocks.nothing(q)
        for number, step in enumerate(self.steps):
            following = self._keys_of_next(blocks, number, kv)
            for block in step.blocks:
                more = blocks.attend(blocks.rows(q, block.queries), blocks.rows(kv, block.keys), block, step.source)
                result = blocks.merge(result, block.queries, more)
            if following is not None:
                kv = following()
        return result

    def backward(self, blocks: AttentionBlocks[T], gradient: T, q: T, kv: T, out: T, stats: T) -> tuple[T, T]:
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

    def _keys_of_next(self, blocks: AttentionBlocks[T], number: int, kv: T) -> Callable[[], T] | None:
        if number + 1 == len(self.steps):
            return None
        return blocks.pass_on(kv, self.counts[self.steps[number + 1].source], KEYS)


def pass_on(axis: ParallelAxis, x: Any, tokens: int, tag: int) -> Callable[[], Any]:
    """Send an array to the next rank of an axis; return a function that waits for the previous rank's array.

    x: (..., tokens, head_dim), contiguous; do not change it until then. Without overlap, that function does all the
    work. Device arrays go from device to device, on the current stream.
    """
    comm, after, before = axis.comm, (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    shape = *x.shape[:-2], tokens, x.shape[-1]
    if type(x) is DeviceArray:
        leaving, arriving = (_channel(comm, peer, x, tag) for peer in (after, before))
        leaving.send(x.reshape(-1).view(np.uint8))
        return lambda: _receive(arriving, shape, x.dtype)
    out = axis.empty(shape, x.dtype)
    if axis.overlaps:
        return comm.send_recv_async(x, after, out, before, tag).wait
    return lambda: comm.send_recv(x, after, out, before, tag)


def _channel(comm: Communicator, peer: int, x: DeviceArray, tag: int) -> DeviceChannel:
    """Return the channel to a rank for arrays of a device. It stays open, and grows as needed."""
    key = "ring", peer, tag, x.device.name
    channel: DeviceChannel | None = comm.cached.get(key)
    if channel is None:
        channel = comm.cached[key] = comm.channel(peer, f"ring {tag}", 1, "uint8", device=x.device)
    return channel


def _receive(channel: DeviceChannel, shape: tuple[int, ...], dtype: Any) -> Any:
    array = channel.recv()
    channel.release(array)  # the array stays valid
    return channel.device.wrap(array, "ring").view(dtype).reshape(shape)
