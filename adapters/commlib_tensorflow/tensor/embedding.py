"""Embeddings that are sharded over the ranks of an axis, by vocabulary or by features."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from commlib.errors import UsageError
from commlib.sharding.axis import AxisRanks, ParallelAxis
from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import REDUCE
from commlib.tensor_parallel.styles import Column, Vocabulary
from commlib.tensor_parallel.vocabulary import words_of
from commlib_tensorflow.tensor._comparison import note_input
from commlib_tensorflow.tensor._gathering import gather_outputs
from commlib_tensorflow.tensor._lora import sharded_factors
from commlib_tensorflow.tensor._masks import gather_mask, scatter_mask
from commlib_tensorflow.tensor._sharded_layer import ShardedLayer, check_plain
from commlib_tensorflow.tensor._sharding import Shardings
from commlib_tensorflow.tensor._values import broadcast_rank_0_values
from commlib_tensorflow.tensor.moves import axis_of, redistribute


@keras.saving.register_keras_serializable("commlib")
class VocabularyEmbedding(ShardedLayer, keras.layers.Embedding):  # type: ignore[misc]  # Keras has no types
    """An embedding with a sharded vocabulary: each rank has some rows of the table, and outputs are summed.

    Like `keras.layers.Embedding(input_dim, output_dim)`, with rank 0's initial values. inputs: integers, the same on
    every rank. Returns (*inputs.shape, output_dim), unsharded on every rank or sharded along `sequence`.

    Args:
        input_dim: The number of token ids.
        output_dim: The features of the embedding.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        style: How the layer is sharded: see `commlib.tensor_parallel`.
        **kwargs: Arguments of the layer that is sharded.

    Raises:
        UsageError: For a token that is not in the vocabulary; in a graph InvalidArgumentError, on all ranks.
    """

    def __init__(
        self, input_dim: int, output_dim: int, ranks: AxisRanks, *, style: Vocabulary | None = None, **kwargs: Any
    ) -> None:
        super().__init__(input_dim, output_dim, **kwargs)
        self._given = axis_of(ranks, "VocabularyEmbedding"), style or Vocabulary()

    def build(self, input_shape: Any = None) -> None:
        """Create the table as a plain layer does, and keep this rank's shard. Collective."""
        if self.built:
            return
        super().build(input_shape)
        broadcast_rank_0_values(self.name, self.variables, self._given[0].comm)
        self.become(self.path or self.name, *self._given)
        self.compare("built")

    def shardings(self, what: str, style: Vocabulary) -> Shardings:
        """Return the sharding of its variables; `self` may be a plain layer. Raises UsageError if impossible."""
        check_plain(what, self, style)
        if style.gather:
            raise UsageError(f"plan: {what}: an embedding's output is full: Vocabulary(gather=True) is for logits")
        sharding = Sharding((self.input_dim, self.output_dim), 0)
        return [(self._embeddings, sharding), *sharded_factors(self, sharding)]

    def become(self, what: str, axis: ParallelAxis, style: Vocabulary) -> None:
        """Shard a plain embedding in place."""
        super().become(what, axis, style)
        self.find_words()

    def find_words(self) -> None:
        """Record the range of token ids of this rank."""
        self.first, self.last = words_of(self.sharding, self.axis.rank, self.axis.size)

    def call(self, inputs: Any) -> Any:
        """Return the features of token ids."""
        note_input(self.axis, self, inputs)
        words = tf.cast(inputs, tf.int64)
        self._check(words)
        is_own = (words >= self.first) & (words < self.last)
        rows = tf.gather(self.embeddings, tf.where(is_own, words - self.first, 0))
        rows = tf.cast(tf.where(is_own[..., tf.newaxis], rows, 0), self.compute_dtype)
        sequence = self.style.sequence
        if sequence is None:
            return redistribute(rows, self.axis, REDUCE, layer=self)
        return redistribute(rows, self.axis, moves.reduce_scatter(sequence))

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return the mask of the output."""
        return scatter_mask(super().compute_mask(inputs, mask), self.axis, self.style.sequence, len(inputs.shape) + 1)

    def _check(self, words: Any) -> None:
        text = f"{self.name} on {self.axis.comm.name}: a token id is out of range, expected 0 to {self.input_dim - 1}"
        if not tf.executing_eagerly():
            tf.debugging.Assert(tf.reduce_all((words >= 0) & (words < self.input_dim)), [text])
        elif not bool(tf.reduce_all((words >= 0) & (words < self.input_dim))):
            raise UsageError(text)


@keras.saving.register_keras_serializable("commlib")
class ColumnEmbedding(ShardedLayer, keras.layers.Embedding):  # type: ignore[misc]  # Keras has no types
    """An embedding with sharded features: each rank has some columns of the table.

    inputs: integers, the same on every rank, or sharded along `sequence`. Returns (*inputs.shape, this rank's
    features), or all with `gather`.
    Arguments are those of `keras.layers.Embedding`.
    """

    def shardings(self, what: str, style: Column) -> Shardings:
        """Return the sharding of its variables; `self` may be a plain layer. Raises UsageError if impossible."""
        check_plain(what, self, style)
        parts = parts_of(what, style.parts, self.output_dim)
        sharding = Sharding((self.input_dim, self.output_dim), 1, parts, style.units)
        return [(self._embeddings, sharding), *sharded_factors(self, sharding)]

    def call(self, inputs: Any) -> Any:
        """Return this rank's features of token ids, or all of them."""
        note_input(self.axis, self, inputs, sequence=self.style.sequence)
        if self.style.sequence is not None:
            inputs = redistribute(inputs, self.axis, moves.gather(self.style.sequence))
        output = super().call(inputs)
        return gather_outputs(output, self.axis, self.sharding, layer=self) if self.style.gather else output

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return the mask of the output."""
        return gather_mask(super().compute_mask(inputs, mask), self.axis, self.style.sequence, len(inputs.shape) + 1)
