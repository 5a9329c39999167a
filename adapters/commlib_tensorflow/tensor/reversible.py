"""Reversible embedding, which also computes logits when called in reverse: sharded by vocabulary both ways."""

from __future__ import annotations

from typing import Any

import keras

from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel.styles import Vocabulary
from commlib_tensorflow._shards import whole_shape
from commlib_tensorflow.tensor._gathering import gather_outputs
from commlib_tensorflow.tensor._input_cache import enter
from commlib_tensorflow.tensor._lora import sharded_factors
from commlib_tensorflow.tensor._sharded_layer import check_plain
from commlib_tensorflow.tensor._sharding import Shardings
from commlib_tensorflow.tensor.embedding import VocabularyEmbedding


class VocabularyReversibleEmbedding(VocabularyEmbedding, keras.layers.ReversibleEmbedding):  # type: ignore[misc]
    """Like `VocabularyEmbedding`; in reverse it returns logits, (..., this rank's tokens), or all with `gather`."""

    def shardings(self, what: str, style: Vocabulary) -> Shardings:
        """Return the sharding of its variables; `self` may be a plain layer. Raises UsageError if impossible."""
        check_plain(what, self, style)
        table = Sharding((self.input_dim, self.output_dim), 0)
        shardings = [(self._embeddings, table), *sharded_factors(self, table)]
        if not self.tie_weights:
            shardings.append((self.reverse_embeddings, Sharding(whole_shape(self.reverse_embeddings), 1)))
        return shardings

    def call(self, inputs: Any, reverse: bool = False) -> Any:
        """Return the features of token ids, or logits of features."""
        if not reverse:
            return VocabularyEmbedding.call(self, inputs)
        sequence = self.style.sequence
        output = keras.layers.ReversibleEmbedding.call(self, enter(self, inputs, self.axis, sequence), reverse=True)
        return gather_outputs(output, self.axis, self.sharding_of_logits, layer=self) if self.style.gather else output

    @property
    def sharding_of_logits(self) -> Sharding:
        """The sharding of the vocabulary along the last dimension."""
        return Sharding((self.input_dim,), 0)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return no mask, as Keras does: the result carries it."""
        return None
