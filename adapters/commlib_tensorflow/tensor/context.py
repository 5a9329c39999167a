"""Context parallelism: attention over sequences that are sharded over the ranks of an axis.

from commlib_tensorflow.tensor import context as cp

for batch in cp.SequenceLoader(batches, mesh["cp"]):            # this rank's tokens, positions and next tokens
    with tf.GradientTape() as tape:
        logits = model((batch["input_ids"], batch["position_ids"]))  # with cp.attention(q, k, v, mesh["cp"], ...)
        counted = batch["labels"] != -100
        losses = keras.losses.sparse_categorical_crossentropy(batch["labels"] * counted, logits, True) * counted
        loss = cp.loss_mean(tf.reduce_sum(losses), tf.math.count_nonzero(counted), mesh["cp"])
    gradients = tape.gradient(loss, variables)                   # average these over the axis
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from commlib.comparison.agreement import make_or_refuse
from commlib.context_parallel import SequenceLayout
from commlib.context_parallel.attention import WHAT, AttentionCall, AttentionOptions, TensorInfo
from commlib.errors import UsageError
from commlib.literals import AttentionMethod, SequenceOrder
from commlib.sharding.axis import AxisRanks, ParallelAxis
from commlib.tensor_parallel.moves import gather
from commlib_tensorflow._bridge import as_tensor, dtype_name
from commlib_tensorflow._host_calls import no_autograph, refuse_vectorized, result_empty
from commlib_tensorflow._placement import place_of
from commlib_tensorflow.tensor._agreement import agree_on_sequence
from commlib_tensorflow.tensor._head_exchange import attention_by_heads
from commlib_tensorflow.tensor._ring import RingCall, ring_attention
from commlib_tensorflow.tensor.moves import axis_of, redistribute
from commlib_tensorflow.tensor.sequences import (
    SequenceLoader,
    loss_mean,
    position_ids,
    shard_sequence,
    take_ranges,
    unshard_sequence,
)

__all__ = ["SequenceLoader", "attention", "loss_mean", "position_ids", "shard_sequence", "unshard_sequence"]


@no_autograph
def attention(
    q: Any,
    k: Any,
    v: Any,
    ranks: AxisRanks,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: SequenceOrder = "balanced",
    length: int | None = None,
    documents: Iterable[int] | None = None,
    window: tuple[int, int] | None = None,
    mask: Any = None,
    key_mask: Any = None,
    method: AttentionMethod = "ring",
    dropout_p: float = 0.0,
    seed: Any = None,
) -> tf.Tensor:
    """Return attention, softmax(q k^T scale) v, over sequences that are sharded over ranks.

    Collective over the axis, and so is its backward, which each rank must run, even without tokens.

    Returns (batch, heads, this rank's tokens, head_dim of v).

    Args:
        q: (batch, heads, this rank's tokens, head_dim); k and v likewise, or with fewer heads, each shared by equally
            many heads of q.
        k: Keys, like `q`, or with fewer heads; each serves several heads of `q`.
        v: Values, like `k`; head_dim may be another.
        ranks: The ranks of the axis, such as `mesh["cp"]`.
        causal: A token sees itself and earlier tokens of the whole sequence.
        scale: By default 1 / sqrt(head_dim); it may be negative.
        layout: "balanced" or "contiguous", as in `shard_sequence`.
        length: The length of the whole sequence; required in a graph, otherwise the sum of the ranks' tokens.
        documents: The boundaries of packed documents, from the first start to the last end, (0, 5, 11), the same for
            the whole batch; tokens see only their document.
        window: (left, right), the number of positions before and after its own that a token sees, -1 for all; with
            `causal` none after. A sliding window of n tokens, as Mistral's, is (n - 1, 0).
        mask: A mask of this rank's queries over all keys in the sequence's order, (batch or 1, heads or 1, this rank's
            tokens or 1, tokens of the whole sequence), or without the first one or two dimensions: bool, True for
            visible keys, or floats that are added to scores, and get a gradient for this rank's queries. With
            several masks a token sees only the keys that all of them allow; a token without visible keys gets zeros,
            and contributes no gradient.
        key_mask: Bool (batch, this rank's tokens), False for keys that are hidden from all queries, such as padding.
        method: "ring": keys and values travel round the ranks while blocks are computed; a rank never has the whole
            sequence. "all_to_all" (Ulysses): a rank gets the whole sequence of some heads, in two exchanges; if there
            are fewer heads of q than ranks, some ranks idle. Only "all_to_all" uses an axis' codec.
        dropout_p: The share of weights that is dropped, 0 in evaluation.
        seed: The seed of dropout: a `keras.random.SeedGenerator`, the result of its `next()`, or a number; each rank
            passes one, and the axis' first rank's is used. The same weights are dropped on any number of ranks,
            by either method. Draw the seed outside of a function that `tf.recompute_grad` calls twice. Heads that are
            sharded over other ranks with the same stream, as along "tp", would drop the same weights: pass
            `streams.own(generator.next(), mesh["tp"])`.

    Raises:
        UsageError: For invalid arguments.
        MismatchError: On all ranks if arguments differ among ranks.
    """
    refuse_vectorized()
    over = axis_of(ranks, "attention")
    q, k, v = (as_tensor(x, WHAT) for x in (q, k, v))
    mask, key_mask = (x if x is None else as_tensor(x, WHAT) for x in (mask, key_mask))
    options = AttentionOptions(causal, scale, layout, length, documents, window, method, dropout_p)
    place = place_of((q, k, v))

    def build() -> AttentionCall:
        given = [_describe(x) for x in (q, k, v, mask, key_mask)]
        if mask is not None and None in [*mask.shape][max(0, len(mask.shape) - 3) :]:
            raise UsageError(f"attention: mask has shape {mask.shape}: all but its batch must be known in a graph")
        call = AttentionCall.of(over, given, options, "" if place is None else place.name)
        if dropout_p and seed is None:
            raise UsageError("attention: dropout_p needs a seed: give seed=keras.random.SeedGenerator(...)")
        if not tf.executing_eagerly() and length is not None and call.mask is not None:
            call.mask.check_keys(WHAT, length)
        return call

    what = make_or_refuse(over.comm, WHAT, build, 2) if tf.executing_eagerly() else build()
    divided, q, seed_value = agree_on_sequence(over, what.terms, q, 2, _number(seed) if dropout_p else 0)
    if what.mask is not None:
        what.mask.check_keys(WHAT, divided.length)
    k, v = (tf.ensure_shape(x, [*x.shape[:2], q.shape[2], x.shape[3]]) for x in (k, v))
    if what.sign < 1:
        q = q * tf.cast(what.sign, q.dtype)
    seen = whole_mask(mask, key_mask, over, divided)
    if method == "all_to_all":
        return attention_by_heads(q, k, v, seen, what, divided, seed_value)
    return ring_attention(q, k, v, seen, what, RingCall(divided, over.rank, seed_value))


def _describe(x: Any) -> TensorInfo:
    if x is None:
        return TensorInfo()
    if x.shape.rank is None:
        raise UsageError("attention: a tensor without a known number of dimensions")
    return TensorInfo(dtype_name(x.dtype), x.shape.as_list(), x.dtype.is_floating)


def _number(seed: Any) -> Any:
    """Return a seed as one int64 number."""
    if isinstance(seed, int):
        return seed & _SEED
    value = seed.next() if isinstance(seed, keras.random.SeedGenerator) else seed
    low, high = tf.unstack(tf.cast(value, tf.int64), 2)
    return (high & (_SEED >> 32)) * (1 << 32) + (low & 0xFFFFFFFF)


_SEED = (1 << 62) - 1


def whole_mask(
    mask: tf.Tensor | None, key_mask: tf.Tensor | None, axis: ParallelAxis, layout: SequenceLayout
) -> tf.Tensor | None:
    """Return the mask of this rank's queries, with four dimensions, or None. Collective if there is a mask of keys."""
    whole = None
    if mask is not None:
        whole = take_ranges(mask[(tf.newaxis,) * (4 - mask.shape.rank)], layout.by_rank, 3)
    if key_mask is None:
        return whole
    plain = ParallelAxis(axis.comm, empty=result_empty)
    keys = tf.cast(redistribute(tf.cast(key_mask, tf.uint8), plain, gather(1, lengths=layout.counts)), tf.bool)
    keys = keys[:, tf.newaxis, tf.newaxis]
    if whole is None:
        return keys
    return whole & keys if whole.dtype == tf.bool else tf.where(keys, whole, tf.constant(-float("inf"), whole.dtype))
