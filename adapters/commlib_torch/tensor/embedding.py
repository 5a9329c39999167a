"""Embeddings that are divided among the ranks of an axis, by words or by features."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import REDUCE
from commlib.tensor_parallel.styles import Column, Vocabulary
from commlib.tensor_parallel.vocabulary import words_of
from commlib_torch._shards import KeepsShards, shards_of
from commlib_torch.tensor._alike import given
from commlib_torch.tensor._dividing import divide
from commlib_torch.tensor.linear import gathered, other_part
from commlib_torch.tensor.moves import On, axis_of, moved


class VocabularyEmbedding(KeepsShards, nn.Embedding):
    """An embedding whose words are divided: each rank has some rows of the weight; outputs are added up.

    As `nn.Embedding(num_embeddings, embedding_dim)`, with the values that this has for the same seed. words: integers,
    the same on every rank. Returns (*words.shape, embedding_dim), whole on every rank or divided along `sequence`.
    Raises UsageError for a word that is not in the vocabulary, and for `sparse` and `scale_grad_by_freq`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        axis: On,
        padding_idx: int | None = None,
        *,
        style: Vocabulary | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, **kwargs)
        self.become("VocabularyEmbedding", axis_of(axis), style or Vocabulary())

    def shardings(self, what: str, style: Vocabulary) -> dict[str, Sharding]:
        """Return how its weights are divided; `self` may be an ordinary layer. Raises UsageError if they cannot be."""
        for option in ("sparse", "scale_grad_by_freq"):
            if getattr(self, option):
                raise UsageError(f"{what}: an embedding with {option}=True cannot be divided by words: turn it off")
        if style.gather:
            raise UsageError(f"{what}: an embedding's output is whole: Vocabulary(gather=True) is for logits")
        return {"weight": Sharding((self.num_embeddings, self.embedding_dim), 0)}

    def become(self, what: str, axis: Axis, style: Vocabulary) -> None:
        """Divide what is an ordinary embedding so far."""
        shardings = self.shardings(what, style)
        divide(what, self, axis, shardings)
        self.axis, self.style, self.sharding = axis, style, shardings["weight"]
        self.first, self.last = words_of(self.sharding, axis.rank, axis.size)

    def forward(self, words: Tensor) -> Tensor:
        """Return the features of words."""
        if self.weight.shape[0] != self.last - self.first:
            raise other_part(self.axis, self.weight.shape[0], self.last - self.first)
        self._check(words)
        if self.axis.size == 1:
            return super().forward(words)
        given(self, words)
        is_foreign = (words < self.first) | (words >= self.last)
        own = (words - self.first).masked_fill(is_foreign, 0)
        if self.max_norm is not None:  # of the words that are asked for, and of no others
            with torch.no_grad():
                F.embedding(own[~is_foreign], self.weight, None, self.max_norm, self.norm_type)
        padding = None if self.padding_idx is None else self.padding_idx - self.first
        has_padding = padding is not None and 0 <= padding < self.last - self.first
        found = F.embedding(own, self.weight, padding if has_padding else None)
        found = found.masked_fill(is_foreign.unsqueeze(-1), 0)
        sequence = self.style.sequence
        move = REDUCE if sequence is None else moves.reduce_scatter(sequence)
        return moved(found, self.axis, move, may_write=True, layer=self)

    def _fill_padding_idx_with_zero(self) -> None:
        """Let `reset_parameters` find the padding where it is."""
        if not shards_of(self):
            super()._fill_padding_idx_with_zero()
        elif self.padding_idx is not None and self.first <= self.padding_idx < self.last:
            with torch.no_grad():
                self.weight[self.padding_idx - self.first].fill_(0)

    def _check(self, words: Tensor) -> None:
        if words.is_floating_point() or not words.numel():
            return  # what PyTorch says of it is clear
        least, most = (int(word) for word in torch.aminmax(words))
        if least < 0 or most >= self.num_embeddings:
            raise UsageError(
                f"VocabularyEmbedding on {self.axis.comm.name}: word {least if least < 0 else most}, expected 0 to "
                f"{self.num_embeddings - 1}"
            )

    def extra_repr(self) -> str:
        """Say what is divided."""
        return f"{super().extra_repr()}, {self.style}, {self.axis!r}"


class ColumnEmbedding(KeepsShards, nn.Embedding):
    """An embedding whose features are divided: each rank has some columns of the weight.

    As `nn.Embedding(num_embeddings, embedding_dim)`, with the values that this has for the same seed. words: integers,
    the same on every rank, or divided along `sequence`. Returns (*words.shape, this rank's features), or all with
    `gather`. Raises UsageError for `max_norm`, which looks at all features.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        axis: On,
        padding_idx: int | None = None,
        *,
        style: Column | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, **kwargs)
        self.become("ColumnEmbedding", axis_of(axis), style or Column())

    def shardings(self, what: str, style: Column) -> dict[str, Sharding]:
        """Return how its weights are divided; `self` may be an ordinary layer. Raises UsageError if they cannot be."""
        if self.max_norm is not None:
            raise UsageError(f"{what}: max_norm looks at all features of a word: divide it by words (Vocabulary)")
        parts = parts_of(what, style.parts, self.embedding_dim)
        return {"weight": Sharding((self.num_embeddings, self.embedding_dim), 1, parts, style.units)}

    def become(self, what: str, axis: Axis, style: Column) -> None:
        """Divide what is an ordinary embedding so far."""
        shardings = self.shardings(what, style)
        divide(what, self, axis, shardings)
        self.axis, self.style, self.sharding = axis, style, shardings["weight"]

    def forward(self, words: Tensor) -> Tensor:
        """Return this rank's features of words, or all of them."""
        given(self, words, sequence=self.style.sequence)
        if self.style.sequence is not None:
            words = moved(words, self.axis, moves.gather(self.style.sequence))
        found = super().forward(words)
        return gathered(found, self.axis, self.sharding, layer=self) if self.style.gather else found

    def extra_repr(self) -> str:
        """Say what is divided."""
        return f"{super().extra_repr()}, {self.style}, {self.axis!r}"
