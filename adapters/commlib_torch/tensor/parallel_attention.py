"""ParallelAttention: self-attention sharded by heads from the start."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.sharding.axis import AxisRanks, axis_of
from commlib.tensor_parallel.heads import check_attention
from commlib.tensor_parallel.styles import Column, Row
from commlib_torch.tensor._comparison import note_input
from commlib_torch.tensor._heads import attend
from commlib_torch.tensor._sharding import compare_at_first_use
from commlib_torch.tensor.linear import ColumnLinear, RowLinear
from commlib_torch.tensor.moves import copy


class ParallelAttention(nn.Module):
    """Self-attention of `heads` heads, sharded among the ranks of an axis.

    x: (batch, tokens, width), unsharded on every rank, or sharded along the dimension `sequence`; the output has the
    same layout.

    Q, K and V are one weight.

    On an axis of one rank it is the unsharded layer, and for the same seed it has the same values on any number of
    ranks.

    Args:
        width: The features of inputs and outputs.
        heads: The number of heads of queries.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        kv_heads: The number of heads of K and V, by default the same; each serves several adjacent heads of Q.
        causal: Whether a token sees only itself and earlier ones.
        bias: Whether the layer has a bias.
        dropout: The share of attention weights that is dropped in training.
        sequence: The dimension along which inputs and outputs are sharded; None: unsharded.
        **kwargs: `device` and `dtype` of the layers.

    Raises:
        UsageError: For numbers that do not divide each other.

    Examples:
        >>> layer = ct.ParallelAttention(8, 2, comm)  # a head on each of 2 ranks
        >>> layer(torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        ranks: AxisRanks,
        *,
        kv_heads: int | None = None,
        causal: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        sequence: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.axis, self.heads, self.kv_heads = (
            axis_of(ranks, "ParallelAttention"),
            heads,
            heads if kv_heads is None else kv_heads,
        )
        check_attention("ParallelAttention", width, heads, self.kv_heads, dropout)
        self.causal, self.dropout, self.head_width = causal, dropout, width // heads
        parts = (width, *(self.kv_heads * self.head_width,) * 2)
        columns = Column(parts=parts, units=self.kv_heads, sequence=sequence)
        rows = Row(units=self.kv_heads, sequence=sequence)
        self.qkv = ColumnLinear(width, sum(parts), self.axis, bias, style=columns, **kwargs)
        self.out = RowLinear(width, width, self.axis, bias, style=rows, **kwargs)
        options = {"heads": heads, "kv_heads": self.kv_heads, "causal": causal, "dropout": dropout}
        compare_at_first_use(self, "ParallelAttention", self.axis, options)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the output. mask: as in F.scaled_dot_product_attention, for full sequences and all heads."""
        kv = self.qkv.sharding.spans(self.axis.rank, self.axis.size)[1]
        groups, first = (kv[1] - kv[0]) // self.head_width, (kv[0] - self.heads * self.head_width) // self.head_width
        each = self.heads // self.kv_heads
        own = groups * each
        heads = self.qkv(x).unflatten(-1, (-1, self.head_width)).transpose(-3, -2)
        q, k, v = heads.split((own, groups, groups), -3)
        if mask is not None:
            note_input(self, mask, "the mask")
            mask = self._own(mask, first * each, own)
        rate = self.dropout if self.training else 0.0
        out = attend(q, k, v, mask, rate, self.causal, self.axis)
        result: Tensor = self.out(out.transpose(-3, -2).flatten(-2))
        return result

    def _own(self, mask: Tensor, first: int, heads: int) -> Tensor:
        """Return the mask of this rank's heads."""
        if mask.requires_grad:  # it serves the heads of all ranks
            mask = copy(mask, self.axis)
        if mask.dim() < 3 or mask.shape[-3] == 1:
            return mask
        if mask.shape[-3] != self.heads:
            raise UsageError(
                f"ParallelAttention: a mask of shape {list(mask.shape)}, expected {self.heads} heads or 1 before the "
                "last two dimensions"
            )
        return mask.narrow(-3, first, heads)

    def extra_repr(self) -> str:
        """Describe the layer."""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal}, {self.axis!r}"
