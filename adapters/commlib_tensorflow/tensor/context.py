"""Context parallelism: attention over sequences that are divided among the ranks of an axis.

from commlib_tensorflow.tensor import context as cp

for batch in cp.SequenceLoader(batches, mesh["cp"]):            # this rank's tokens, positions and next tokens
    with tf.GradientTape() as tape:
        logits = model((batch["input_ids"], batch["position_ids"]))  # with cp.attention(q, k, v, mesh["cp"], ...)
        counted = batch["labels"] != -100
        losses = keras.losses.sparse_categorical_crossentropy(batch["labels"] * counted, logits, True) * counted
        loss = cp.loss_mean(tf.reduce_sum(losses), tf.math.count_nonzero(counted), mesh["cp"])
    gradients = tape.gradient(loss, variables)                   # to be averaged over the axis
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from commlib.functional.attention import Attention
from commlib_tensorflow._bridge import as_tensor, dtype_name
from commlib_tensorflow._graph import no_autograph
from commlib_tensorflow._placement import place_of
from commlib_tensorflow.tensor._agreed import agreed
from commlib_tensorflow.tensor._by_heads import attention_by_heads
from commlib_tensorflow.tensor._ring import ring_attention
from commlib_tensorflow.tensor.moves import On, axis_of
from commlib_tensorflow.tensor.sequences import (
    SequenceLoader,
    loss_mean,
    position_ids,
    shard_sequence,
    unshard_sequence,
)

__all__ = ["SequenceLoader", "attention", "loss_mean", "position_ids", "shard_sequence", "unshard_sequence"]


@no_autograph
def attention(
    q: Any,
    k: Any,
    v: Any,
    axis: On,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "balanced",
    length: int | None = None,
    documents: Iterable[int] | None = None,
    method: str = "ring",
    dropout_p: float = 0.0,
) -> tf.Tensor:
    """Return attention, softmax(q k^T scale) v, over sequences that are divided among ranks.

    q: (batch, heads, this rank's tokens, head_dim); k and v alike, or with fewer heads, each of which serves as many of
    q's. Returns (batch, heads, this rank's tokens, head_dim of v). causal: a token sees itself and those before it in
    the whole sequence. scale: by default 1 / sqrt(head_dim). layout: "balanced" or "contiguous", as `shard_sequence`
    has divided it. length: of the whole sequence; in a graph it has to be given, else it is what the ranks' tokens add
    up to. documents: where packed documents begin and the last one ends, (0, 5, 11), the same for the whole batch;
    tokens see their document alone.

    method: "ring", keys and values travel round the ranks while blocks are computed; a rank never has the whole
    sequence. "all_to_all" (Ulysses): a rank gets the whole sequence of some heads, in two exchanges; if there are
    fewer heads of q than ranks, some ranks idle. An axis' codec is used by "all_to_all" alone.

    Collective over the axis, and so is its backward, which each rank must run, one without tokens too. Raises
    UsageError for arguments that do not fit, MismatchError on all ranks where these differ among ranks.
    """
    over = axis_of(axis)
    q, k, v = (as_tensor(x) for x in (q, k, v))
    place = place_of((q, k, v))
    what = Attention.of(
        over,
        q.shape.as_list(),
        k.shape.as_list(),
        v.shape.as_list(),
        [dtype_name(x.dtype) for x in (q, k, v)],
        causal=causal,
        scale=scale,
        layout=layout,
        length=length,
        documents=documents,
        method=method,
        dropout_p=dropout_p,
        device="" if place is None else place.name,
    )
    divided, q = agreed(over, what.terms, q, 2)
    k, v = (tf.ensure_shape(x, [*x.shape[:2], q.shape[2], x.shape[3]]) for x in (k, v))
    if method == "all_to_all":
        return attention_by_heads(q, k, v, what, divided)
    return ring_attention(q, k, v, what, what.ring(divided))
