"""Embeddings that are divided among the ranks of an axis, by words or by features."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import REDUCE
from commlib.tensor_parallel.styles import Column, Vocabulary
from commlib.tensor_parallel.vocabulary import words_of
from commlib_tensorflow.tensor._alike import given
from commlib_tensorflow.tensor._divided import OwnVariables, check_plain
from commlib_tensorflow.tensor._dividing import Shardings, divide
from commlib_tensorflow.tensor._gathering import gathered
from commlib_tensorflow.tensor._lora import divided_factors
from commlib_tensorflow.tensor._masks import gathered_mask, scattered_mask
from commlib_tensorflow.tensor._values import take_values_of_rank_0
from commlib_tensorflow.tensor.moves import On, axis_of, moved


@keras.saving.register_keras_serializable("commlib")
class VocabularyEmbedding(OwnVariables, keras.layers.Embedding):  # type: ignore[misc]  # Keras has no types
    """An embedding whose words are divided: each rank has some rows of the table; outputs are added up.

    As `keras.layers.Embedding(input_dim, output_dim)`, with the values that this has on rank 0. inputs: integers, the
    same on every rank. Returns (*inputs.shape, output_dim), whole on every rank or divided along `sequence`. Raises
    UsageError, in a graph InvalidArgumentError, on all ranks for a word that is not in the vocabulary.
    """

    def __init__(
        self, input_dim: int, output_dim: int, axis: On, *, style: Vocabulary | None = None, **kwargs: Any
    ) -> None:
        super().__init__(input_dim, output_dim, **kwargs)
        self._given = axis_of(axis), style or Vocabulary()

    def build(self, input_shape: Any = None) -> None:
        """Make the table as an ordinary layer does, and keep this rank's part. Collective."""
        if self.built:
            return
        super().build(input_shape)
        take_values_of_rank_0(self.name, self.variables, self._given[0].comm)
        self.become(self.path or self.name, *self._given)
        self.compare("built")

    def shardings(self, what: str, style: Vocabulary) -> Shardings:
        """Return how its variables are divided; `self` may be an ordinary layer. Raises UsageError if it cannot be."""
        check_plain(what, self, style)
        if style.gather:
            raise UsageError(f"plan: {what}: an embedding's output is whole: Vocabulary(gather=True) is for logits")
        found = Sharding((self.input_dim, self.output_dim), 0)
        return [(self._embeddings, found), *divided_factors(self, found)]

    def become(self, what: str, axis: Axis, style: Vocabulary) -> None:
        """Divide what is an ordinary embedding so far."""
        shardings = self.shardings(what, style)
        divide(what, axis, shardings)
        self.supports_jit = False
        self.keep(what, axis, style, shardings[0][1])
        self.find_words()

    def find_words(self) -> None:
        """Keep which words this rank has."""
        self.first, self.last = words_of(self.sharding, self.axis.rank, self.axis.size)

    def call(self, inputs: Any) -> Any:
        """Return the features of words."""
        given(self.axis, self, inputs)
        words = tf.cast(inputs, tf.int64)
        self._check(words)
        is_own = (words >= self.first) & (words < self.last)
        found = tf.gather(self.embeddings, tf.where(is_own, words - self.first, 0))
        found = tf.cast(tf.where(is_own[..., tf.newaxis], found, 0), self.compute_dtype)
        sequence = self.style.sequence
        if sequence is None:
            return moved(found, self.axis, REDUCE, layer=self)
        return moved(found, self.axis, moves.reduce_scatter(sequence))

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return the mask of the output."""
        return scattered_mask(super().compute_mask(inputs, mask), self.axis, self.style.sequence, len(inputs.shape) + 1)

    def _check(self, words: Any) -> None:
        text = f"{self.name} on {self.axis.comm.name}: a word is not one of 0 to {self.input_dim - 1}"
        if not tf.executing_eagerly():
            tf.debugging.Assert(tf.reduce_all((words >= 0) & (words < self.input_dim)), [text])
        elif not bool(tf.reduce_all((words >= 0) & (words < self.input_dim))):
            raise UsageError(text)


@keras.saving.register_keras_serializable("commlib")
class ColumnEmbedding(OwnVariables, keras.layers.Embedding):  # type: ignore[misc]  # Keras has no types
    """An embedding whose features are divided: each rank has some columns of the table.

    inputs: integers, the same on every rank, or divided along `sequence`. Returns (*inputs.shape, this rank's
    features), or all with `gather`.
    """

    def shardings(self, what: str, style: Column) -> Shardings:
        """Return how its variables are divided; `self` may be an ordinary layer. Raises UsageError if it cannot be."""
        check_plain(what, self, style)
        parts = parts_of(what, style.parts, self.output_dim)
        found = Sharding((self.input_dim, self.output_dim), 1, parts, style.units)
        return [(self._embeddings, found), *divided_factors(self, found)]

    def become(self, what: str, axis: Axis, style: Column) -> None:
        """Divide what is an ordinary embedding so far."""
        shardings = self.shardings(what, style)
        divide(what, axis, shardings)
        self.supports_jit = False
        self.keep(what, axis, style, shardings[0][1])

    def call(self, inputs: Any) -> Any:
        """Return this rank's features of words, or all of them."""
        given(self.axis, self, inputs, sequence=self.style.sequence)
        if self.style.sequence is not None:
            inputs = moved(inputs, self.axis, moves.gather(self.style.sequence))
        found = super().call(inputs)
        return gathered(found, self.axis, self.sharding, layer=self) if self.style.gather else found

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return the mask of the output."""
        return gathered_mask(super().compute_mask(inputs, mask), self.axis, self.style.sequence, len(inputs.shape) + 1)
