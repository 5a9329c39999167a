"""Ring attention for TensorFlow: the blocks of `commlib.functional.ring`, and the custom gradient around it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from commlib.errors import UsageError
from commlib.functional.attention import Attention
from commlib.functional.ring import Ring, pass_on
from commlib_tensorflow._graph import Spec
from commlib_tensorflow._on_device import array_of, call_on_device, tensors_of
from commlib_tensorflow._placement import Place, place_of
from commlib_tensorflow.devices import working
from commlib_tensorflow.errors import as_tensorflows
from commlib_tensorflow.tensor._agreed import agreed_backward
from commlib_tensorflow.tensor._blocks import attend, gradients


def ring_attention(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, what: Attention, ring: Ring) -> tf.Tensor:
    """Return attention by a ring. Where heads of `v` have another length than those of `k`, zeros make them equal."""
    width, values = q.shape[-1], v.shape[-1]
    if width != values:
        q, k, v = (tf.pad(x, [[0, 0]] * 3 + [[0, max(width, values) - x.shape[-1]]]) for x in (q, k, v))
    blocks = _Blocks(what)

    def forward(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor) -> tuple[tf.Tensor, Any]:
        total, lse = ring.forward(blocks, q, tf.stack([k, v]))
        out = tf.cast(total, q.dtype)

        def backward(gradient: tf.Tensor) -> tuple[tf.Tensor, ...]:
            q_now = agreed_backward(what, q)
            of_q, of_kv = ring.backward(blocks, gradient, q_now, tf.stack([k, v]), out, lse)
            return tuple(tf.cast(x, q.dtype) for x in (of_q, of_kv[0], of_kv[1]))

        # What travels in it has no gradient that TensorFlow would know of, and it would leave it out without a word.
        once = tf.custom_gradient(lambda gradient, *inputs: (backward(gradient), _refuse))
        return out, lambda gradient: once(gradient, q, k, v)

    return tf.custom_gradient(forward)(q, k, v)[..., :values]


def _refuse(*gradients: Any) -> Any:
    raise as_tensorflows(
        UsageError("attention by a ring has no gradients of gradients: use method='all_to_all', which has")
    )


class _Blocks:
    def __init__(self, what: Attention) -> None:
        self._axis, self._scale = what.axis, what.scale

    def rows(self, x: tf.Tensor, span: tuple[int, int]) -> tf.Tensor:
        return x[..., span[0] : span[1], :]

    def attend(self, q: tf.Tensor, kv: tf.Tensor, causal: bool) -> tuple[tf.Tensor, tf.Tensor]:
        return attend(q, kv[0], kv[1], self._scale, causal)

    def gradients(
        self, gradient: tf.Tensor, q: tf.Tensor, kv: tf.Tensor, out: tf.Tensor, lse: tf.Tensor, causal: bool
    ) -> tuple[tf.Tensor, tf.Tensor]:
        of_q, *of_kv = gradients(gradient, q, kv[0], kv[1], out, lse, self._scale, causal)
        return of_q, tf.stack(of_kv)

    def nothing(self, q: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        out = self.zeros(q)
        return out, out[..., :1] - float("inf")

    def merge(
        self, found: tuple[tf.Tensor, tf.Tensor], span: tuple[int, int], more: tuple[tf.Tensor, tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        out, lse = (self.rows(x, span) for x in found)
        largest = tf.maximum(lse, more[1])
        together = largest + tf.math.log(tf.exp(lse - largest) + tf.exp(more[1] - largest))
        merged = out * tf.exp(lse - together) + more[0] * tf.exp(more[1] - together)
        return _replaced(found[0], span, merged), _replaced(found[1], span, together)

    def zeros(self, x: tf.Tensor) -> tf.Tensor:
        return tf.zeros_like(x, tf.float64 if x.dtype == tf.float64 else tf.float32)

    def add(self, total: tf.Tensor, span: tuple[int, int], x: tf.Tensor) -> tf.Tensor:
        return _replaced(total, span, self.rows(total, span) + x)

    def plus(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return x + y

    def pass_on(self, x: tf.Tensor, tokens: int, tag: int) -> Callable[[], tf.Tensor]:
        if tf.executing_eagerly():
            return self._passed_on(x, place_of([x]), tokens, tag)
        spec = Spec(x.dtype, [*x.shape[:-2], tokens, x.shape[-1]])
        # In the order of the graph: messages of two calls have the same tags, and meet in the order in which they go.
        (arrived,) = call_on_device(
            lambda array: [pass_on(self._axis, array, tokens, tag)()], [x], [spec], what="attention by a ring"
        )
        return lambda: arrived

    def _passed_on(self, x: tf.Tensor, place: Place | None, tokens: int, tag: int) -> Callable[[], tf.Tensor]:
        def here() -> AbstractContextManager[None]:
            return nullcontext() if place is None else working(place.device)

        with here():
            wait = pass_on(self._axis, array_of(x), tokens, tag)

        def arrived() -> tf.Tensor:
            with here():
                return tensors_of([wait()])[0]

        return arrived


def _replaced(x: tf.Tensor, span: tuple[int, int], rows: tf.Tensor) -> tf.Tensor:
    """Return x with other rows in a span. Its tokens are a known number."""
    if span == (0, x.shape[-2]):
        return rows
    return tf.concat([x[..., : span[0], :], rows, x[..., span[1] :, :]], -2)
