"""Ring attention for TensorFlow: the blocks of `commlib.context_parallel.ring`, and the custom gradient around it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from commlib.context_parallel import Block, SequenceLayout
from commlib.context_parallel.attention import AttentionCall
from commlib.context_parallel.ring import pass_on
from commlib.errors import UsageError
from commlib_tensorflow._device_calls import array_of, call_on_device, tensors_of
from commlib_tensorflow._host_calls import Spec
from commlib_tensorflow._placement import DevicePlace, place_of
from commlib_tensorflow.devices import use_device_stream
from commlib_tensorflow.errors import as_tensorflows
from commlib_tensorflow.tensor._agreement import agree_on_backward
from commlib_tensorflow.tensor._block_masks import BlockMasks
from commlib_tensorflow.tensor._blocks import attend, finite, gradients


@dataclass(frozen=True, slots=True)
class RingCall:
    """Position of a call in the ring: the rank of the queries, and the layout of the sequence.

    seed: of dropout. first_head: the index of the first head of these queries among all heads.
    """

    layout: SequenceLayout
    rank: int
    seed: Any = 0
    first_head: int = 0


def ring_attention(
    q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, mask: Any, what: AttentionCall, way: RingCall
) -> tf.Tensor:
    """Return attention by a ring, which may have a single rank. mask: over the keys of ranks 0, 1, ...

    If the head sizes of `v` and `k` differ, zeros make them equal.
    """
    width, values = q.shape[-1], v.shape[-1]
    if width != values:
        q, k, v = (tf.pad(x, [[0, 0]] * 3 + [[0, max(width, values) - x.shape[-1]]]) for x in (q, k, v))
    ring, learns = what.ring(way.layout, way.rank), mask is not None and mask.dtype.is_floating

    def forward(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, *masks: tf.Tensor) -> tuple[tf.Tensor, Any]:
        given = masks[0] if learns else mask
        total, stats = ring.forward(_TensorflowBlocks(what, way, q, given), q, tf.stack([k, v]))
        out = tf.cast(total, q.dtype)

        def backward(gradient: tf.Tensor) -> tuple[tf.Tensor, ...]:
            q_now = agree_on_backward(what, q) if way.layout.size > 1 else q
            blocks = _TensorflowBlocks(what, way, q_now, given, learns)
            of_q, of_kv = ring.backward(blocks, gradient, q_now, tf.stack([k, v]), out, stats)
            gradients = (tf.cast(x, q.dtype) for x in (of_q, of_kv[0], of_kv[1]))
            return (*gradients, tf.cast(blocks.of_mask, given.dtype)) if learns else tuple(gradients)

        # TensorFlow sees no gradient of messages, and would silently drop the second derivative.
        once = tf.custom_gradient(lambda gradient, *inputs: (backward(gradient), _refuse))
        return out, lambda gradient: once(gradient, q, k, v, *masks)

    return tf.custom_gradient(forward)(q, k, v, *([mask] if learns else []))[..., :values]


def _refuse(*gradients: Any) -> Any:
    raise as_tensorflows(
        UsageError(
            "attention by a ring, or with a window, masks or dropout, has no gradients of gradients: use "
            "method='all_to_all' without these"
        )
    )


class _TensorflowBlocks:
    def __init__(self, what: AttentionCall, way: RingCall, q: tf.Tensor, mask: Any, learns: bool = False) -> None:
        self._axis, self._scale = what.axis, what.scale
        self._sights = BlockMasks(what, way.layout, way.rank, mask, way.seed, q, way.first_head)
        self.of_mask: Any = self.zeros(mask) if learns else None

    def rows(self, x: tf.Tensor, span: tuple[int, int]) -> tf.Tensor:
        return x[..., span[0] : span[1], :]

    def attend(self, q: tf.Tensor, kv: tf.Tensor, block: Block, source: int) -> tuple[tf.Tensor, tf.Tensor]:
        return attend(q, kv[0], kv[1], self._scale, self._sights.of(block, source))

    def gradients(
        self, gradient: tf.Tensor, q: tf.Tensor, kv: tf.Tensor, out: tf.Tensor, stats: tf.Tensor, block: Block,
        source: int,
    ) -> tuple[tf.Tensor, tf.Tensor]:  # fmt: skip
        sight = self._sights.of(block, source)
        of_q, of_k, of_v, of_scores = gradients(gradient, q, kv[0], kv[1], out, stats, self._scale, sight)
        if self.of_mask is not None:
            self.of_mask += self._pad(of_scores, block, source)
        return of_q, tf.stack([of_k, of_v])

    def _pad(self, of_scores: tf.Tensor, block: Block, source: int) -> tf.Tensor:
        """Return a block's part of the gradient of the mask, padded with zeros."""
        mask = self.of_mask
        for dim, (size, of) in enumerate(zip(mask.shape[:3], of_scores.shape[:3], strict=True)):
            if size == 1 and of != 1:
                of_scores = tf.reduce_sum(of_scores, dim, keepdims=True)
        start, stop = self._sights.columns(block, source)
        first, last = (0, 1) if mask.shape[2] == 1 else block.queries
        around = [[0, 0], [0, 0], [first, mask.shape[2] - last], [start, mask.shape[3] - stop]]
        return tf.pad(of_scores, around)

    def nothing(self, q: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        out = self.zeros(q)
        return out, tf.concat([out[..., :1] - float("inf"), out[..., :1]], -1)

    def merge(
        self, found: tuple[tf.Tensor, tf.Tensor], span: tuple[int, int], more: tuple[tf.Tensor, tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        out, stats = (self.rows(x, span) for x in found)
        largest = finite(tf.maximum(stats[..., :1], more[1][..., :1]))
        here, there = (x[..., 1:] * tf.exp(x[..., :1] - largest) for x in (stats, more[1]))
        total = here + there
        merged = (out * here + more[0] * there) / tf.maximum(total, 1)  # for the largest score alone the total is 1
        return _replace_rows(found[0], span, merged), _replace_rows(found[1], span, tf.concat([largest, total], -1))

    def zeros(self, x: tf.Tensor) -> tf.Tensor:
        return tf.zeros_like(x, tf.float64 if x.dtype == tf.float64 else tf.float32)

    def add(self, total: tf.Tensor, span: tuple[int, int], x: tf.Tensor) -> tf.Tensor:
        return _replace_rows(total, span, self.rows(total, span) + x)

    def plus(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return x + y

    def pass_on(self, x: tf.Tensor, tokens: int, tag: int) -> Callable[[], tf.Tensor]:
        if tf.executing_eagerly():
            return self._passed_on(x, place_of([x]), tokens, tag)
        spec = Spec(x.dtype, [*x.shape[:-2], tokens, x.shape[-1]])
        # In graph order: messages of two calls have the same tags, and match in the order of sending.
        (arrived,) = call_on_device(
            lambda array: [pass_on(self._axis, array, tokens, tag)()], [x], [spec], what="attention by a ring"
        )
        return lambda: arrived

    def _passed_on(self, x: tf.Tensor, place: DevicePlace | None, tokens: int, tag: int) -> Callable[[], tf.Tensor]:
        def here() -> AbstractContextManager[None]:
            return nullcontext() if place is None else use_device_stream(place.device)

        with here():
            wait = pass_on(self._axis, array_of(x), tokens, tag)

        def arrived() -> tf.Tensor:
            with here():
                return tensors_of([wait()])[0]

        return arrived


def _replace_rows(x: tf.Tensor, span: tuple[int, int], rows: tf.Tensor) -> tf.Tensor:
    """Return x with the rows of a span replaced. Its number of tokens is known."""
    if span == (0, x.shape[-2]):
        return rows
    return tf.concat([x[..., : span[0], :], rows, x[..., span[1] :, :]], -2)
