"""An embedding that makes logits, too, when it is called in reverse: divided by words both ways."""

from __future__ import annotations

from typing import Any

import keras

from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel.styles import Vocabulary
from commlib_tensorflow._shards import whole_shape
from commlib_tensorflow.tensor._divided import check_plain
from commlib_tensorflow.tensor._dividing import Shardings
from commlib_tensorflow.tensor._entering import entered
from commlib_tensorflow.tensor._gathering import gathered
from commlib_tensorflow.tensor._lora import divided_factors
from commlib_tensorflow.tensor.embedding import VocabularyEmbedding


class VocabularyReversibleEmbedding(VocabularyEmbedding, keras.layers.ReversibleEmbedding):  # type: ignore[misc]
    """As `VocabularyEmbedding`; in reverse it gives logits, (..., this rank's words), or all of them with `gather`."""

    def shardings(self, what: str, style: Vocabulary) -> Shardings:
        """Return how its variables are divided; `self` may be an ordinary layer. Raises UsageError if it cannot be."""
        check_plain(what, self, style)
        table = Sharding((self.input_dim, self.output_dim), 0)
        found = [(self._embeddings, table), *divided_factors(self, table)]
        if not self.tie_weights:
            found.append((self.reverse_embeddings, Sharding(whole_shape(self.reverse_embeddings), 1)))
        return found

    def call(self, inputs: Any, reverse: bool = False) -> Any:
        """Return the features of words, or logits of features."""
        if not reverse:
            return VocabularyEmbedding.call(self, inputs)
        sequence = self.style.sequence
        found = keras.layers.ReversibleEmbedding.call(self, entered(self, inputs, self.axis, sequence), reverse=True)
        return gathered(found, self.axis, self.sharding_of_logits, layer=self) if self.style.gather else found

    @property
    def sharding_of_logits(self) -> Sharding:
        """How words are divided along the last dimension."""
        return Sharding((self.input_dim,), 0)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return no mask, as Keras does: it goes with the result."""
        return None
