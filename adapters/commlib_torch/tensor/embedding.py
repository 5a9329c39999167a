"""Embeddings sharded among the ranks of an axis, by vocabulary or by features."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.sharding.axis import AxisRanks, ParallelAxis, axis_of
from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import REDUCE
from commlib.tensor_parallel.styles import Column, Vocabulary
from commlib.tensor_parallel.vocabulary import words_of
from commlib_torch._shards import shards_of
from commlib_torch.tensor._comparison import note_input
from commlib_torch.tensor._sharded_layer import ShardedLayer
from commlib_torch.tensor.linear import gather_outputs, shape_error
from commlib_torch.tensor.moves import redistribute


class VocabularyEmbedding(ShardedLayer, nn.Embedding):
    """An embedding sharded by vocabulary: each rank has some rows of the weight; outputs are summed.

    Like `nn.Embedding(num_embeddings, embedding_dim)`, with its values for the same seed. words: token ids, the same on
    every rank. Returns (*words.shape, embedding_dim), unsharded on every rank or sharded along `sequence`.

    Args:
        num_embeddings: The number of token ids.
        embedding_dim: The features of the embedding.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        padding_idx: A token id whose row gets no gradient; None: none.
        style: How the layer is sharded: see `commlib.tensor_parallel`.
        **kwargs: Arguments of the layer that is sharded.

    Raises:
        UsageError: For a token id outside of the vocabulary, and for `sparse` and `scale_grad_by_freq`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        ranks: AxisRanks,
        padding_idx: int | None = None,
        *,
        style: Vocabulary | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, **kwargs)
        self.become("VocabularyEmbedding", axis_of(ranks, "VocabularyEmbedding"), style or Vocabulary())

    def shardings(self, what: str, style: Vocabulary) -> dict[str, Sharding]:
        """Return the shardings of its weights; `self` may be a plain layer. Raises UsageError if there are none."""
        for option in ("sparse", "scale_grad_by_freq"):
            if getattr(self, option):
                raise UsageError(
                    f"{what}: an embedding with {option}=True cannot be sharded by vocabulary: turn it off"
                )
        if style.gather:
            raise UsageError(f"{what}: an embedding's output is unsharded: Vocabulary(gather=True) is for logits")
        return {"weight": Sharding((self.num_embeddings, self.embedding_dim), 0)}

    def become(self, what: str, axis: ParallelAxis, style: Vocabulary) -> None:
        """Shard a plain embedding in place."""
        super().become(what, axis, style)
        self.first, self.last = words_of(self.sharding, axis.rank, axis.size)

    def forward(self, words: Tensor) -> Tensor:
        """Return the features of token ids."""
        if self.weight.shape[0] != self.last - self.first:
            raise shape_error(self.axis, self.weight.shape[0], self.last - self.first)
        self._check(words)
        if self.axis.size == 1:
            return super().forward(words)
        note_input(self, words)
        is_foreign = (words < self.first) | (words >= self.last)
        own = (words - self.first).masked_fill(is_foreign, 0)
        if self.max_norm is not None:  # of the requested rows only
            with torch.no_grad():
                F.embedding(own[~is_foreign], self.weight, None, self.max_norm, self.norm_type)
        padding = None if self.padding_idx is None else self.padding_idx - self.first
        has_padding = padding is not None and 0 <= padding < self.last - self.first
        rows = F.embedding(own, self.weight, padding if has_padding else None)
        rows = rows.masked_fill(is_foreign.unsqueeze(-1), 0)
        sequence = self.style.sequence
        move = REDUCE if sequence is None else moves.reduce_scatter(sequence)
        return redistribute(rows, self.axis, move, may_write=True, layer=self)

    def _fill_padding_idx_with_zero(self) -> None:
        """Zero the row of the padding, on the rank that has it; `reset_parameters` calls this."""
        if not shards_of(self):
            super()._fill_padding_idx_with_zero()
        elif self.padding_idx is not None and self.first <= self.padding_idx < self.last:
            with torch.no_grad():
                self.weight[self.padding_idx - self.first].fill_(0)

    def _check(self, words: Tensor) -> None:
        if words.is_floating_point() or not words.numel():
            return  # PyTorch's own error is clear
        least, most = (int(word) for word in torch.aminmax(words))
        if least < 0 or most >= self.num_embeddings:
            raise UsageError(
                f"VocabularyEmbedding on {self.axis.comm.name}: token {least if least < 0 else most}, expected 0 to "
                f"{self.num_embeddings - 1}"
            )


class ColumnEmbedding(ShardedLayer, nn.Embedding):
    """An embedding with sharded features: each rank has some columns of the weight.

    Like `nn.Embedding(num_embeddings, embedding_dim)`, with its values for the same seed. words: token ids, the same on
    every rank, or sharded along `sequence`. Returns (*words.shape, this rank's features), or all with `gather`.

    Args:
        num_embeddings: The number of token ids.
        embedding_dim: The features of the embedding.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        padding_idx: A token id whose row gets no gradient; None: none.
        style: How the layer is sharded: see `commlib.tensor_parallel`.
        **kwargs: Arguments of the layer that is sharded.

    Raises:
        UsageError: For `max_norm`, which needs all features.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        ranks: AxisRanks,
        padding_idx: int | None = None,
        *,
        style: Column | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, **kwargs)
        self.become("ColumnEmbedding", axis_of(ranks, "ColumnEmbedding"), style or Column())

    def shardings(self, what: str, style: Column) -> dict[str, Sharding]:
        """Return the shardings of its weights; `self` may be a plain layer. Raises UsageError if there are none."""
        if self.max_norm is not None:
            raise UsageError(f"{what}: max_norm needs all features of a token: shard it by vocabulary (Vocabulary)")
        parts = parts_of(what, style.parts, self.embedding_dim)
        return {"weight": Sharding((self.num_embeddings, self.embedding_dim), 1, parts, style.units)}

    def forward(self, words: Tensor) -> Tensor:
        """Return this rank's features of token ids, or all of them."""
        note_input(self, words, sequence=self.style.sequence)
        if self.style.sequence is not None:
            words = redistribute(words, self.axis, moves.gather(self.style.sequence))
        output = super().forward(words)
        return gather_outputs(output, self.axis, self.sharding, layer=self) if self.style.gather else output
