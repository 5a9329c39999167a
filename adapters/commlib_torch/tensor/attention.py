"""PyTorch's multi-head attention with heads sharded among the ranks of an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.schedule.layout import even
from commlib.sharding.axis import AxisRanks, ParallelAxis, axis_of
from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel import moves
from commlib.tensor_parallel.moves import REDUCE
from commlib.tensor_parallel.styles import Column, Row
from commlib_torch._shards import ShardedModule
from commlib_torch.tensor._comparison import note_input
from commlib_torch.tensor._entry import product
from commlib_torch.tensor._heads import attend, mask_of
from commlib_torch.tensor._sharding import shard_parameters
from commlib_torch.tensor.linear import RowLinear
from commlib_torch.tensor.moves import redistribute
from commlib_torch.tensor.streams import dropout


class ColumnAttention(ShardedModule, nn.MultiheadAttention):
    """An `nn.MultiheadAttention` with sharded heads: each rank has some of them; their outputs are summed.

    Arguments and results are those of `nn.MultiheadAttention`, with its values for the same seed. Inputs are unsharded
    on every rank, or sharded along `sequence`; the output has the same layout. Masks are of full sequences and
    all heads. Attention weights are returned for all heads, too: pass need_weights=False to save a reduction.

    Args:
        embed_dim: The features of inputs and outputs.
        num_heads: The number of heads.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        style: How the layer is sharded: see `commlib.tensor_parallel`.
        *args: Arguments of the layer that is sharded.
        **kwargs: Arguments of the layer that is sharded.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, ranks: AxisRanks, *args: Any, style: Column | None = None, **kwargs: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, *args, **kwargs)
        self.become("ColumnAttention", axis_of(ranks, "ColumnAttention"), style or Column())

    def shardings(self, what: str, style: Column) -> dict[str, Sharding]:
        """Return the shardings of its weights; `self` may be a plain layer. Raises UsageError if there are none."""
        width, heads = self.embed_dim, self.num_heads
        if style.gather or style.parts != 1 or style.units not in (0, heads):
            raise UsageError(
                f"{what}: {style}: attention is sharded by its {heads} heads: pass Column(sequence=...) only"
            )
        three = (width,) * 3
        every = {
            "in_proj_weight": Sharding((3 * width, width), 0, three, heads),
            "q_proj_weight": Sharding((width, width), 0, (), heads),
            "k_proj_weight": Sharding((width, self.kdim), 0, (), heads),
            "v_proj_weight": Sharding((width, self.vdim), 0, (), heads),
            "in_proj_bias": Sharding((3 * width,), 0, three, heads),
            "bias_k": Sharding((1, 1, width), 2, (), heads),
            "bias_v": Sharding((1, 1, width), 2, (), heads),
        }
        own = {name: sharding for name, sharding in every.items() if getattr(self, name) is not None}
        out: Any = self.out_proj
        of_out = RowLinear.shardings(out, f"{what}.out_proj", Row(units=heads))
        return own | {f"out_proj.{name}": sharding for name, sharding in of_out.items()}

    def become(self, what: str, axis: ParallelAxis, style: Column) -> None:
        """Shard a plain attention in place."""
        shard_parameters(what, self, axis, self.shardings(what, style))
        self.axis, self.style = axis, style
        out: Any = self.out_proj
        out.__class__ = RowLinear
        out.become(f"{what}.out_proj", axis, Row(units=self.num_heads, sequence=style.sequence))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, weights or None), as `nn.MultiheadAttention` does."""
        if query.is_nested:
            raise UsageError("ColumnAttention: nested tensors are not supported: pass padded ones and key_padding_mask")
        if is_causal and attn_mask is None:
            raise UsageError("ColumnAttention: is_causal means that attn_mask is causal: pass attn_mask, too")
        for mask in (attn_mask, key_padding_mask):
            if mask is not None:
                note_input(self, mask, "the mask")
        q, k, v = (self._as_heads(x) for x in self._project(query, key, value))
        keys = k.shape[2]
        k, v = self._append_rows(k, self.bias_k), self._append_rows(v, self.bias_v)
        # PyTorch's own layer also uses the hint instead of the mask only in this case.
        causal = is_causal and key_padding_mask is None and not need_weights
        attn_mask = None if causal else attn_mask
        mask = mask_of(attn_mask, key_padding_mask, q, keys, k.shape[2] - keys, self.axis, self.num_heads)
        if not need_weights:
            rate = self.dropout if self.training else 0.0
            return self._output(attend(q, k, v, mask, rate, causal, self.axis), query.dim()), None
        scores = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = dropout(weights, self.dropout, self.training, self.axis)
        output = self._output(weights @ v, query.dim())
        weights = self._gather_weights(weights, average_attn_weights)
        return output, weights if query.dim() == 3 else weights.squeeze(0)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Return this rank's features of Q, K and V; inputs that are one tensor are redistributed once."""
        axis, sequence, bias, inputs = self.axis, self.style.sequence, self.in_proj_bias, (query, key, value)
        if self.in_proj_weight is None:
            weights: Sequence[Tensor] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key is value:
            return product(query, self.in_proj_weight, bias, axis, sequence, self).chunk(3, -1)
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        # Equal inputs in sequence share one redistribution.
        order = sorted(range(3), key=lambda at: next(first for first in range(3) if inputs[first] is inputs[at]))
        projections = {at: product(inputs[at], weights[at], biases[at], axis, sequence, self) for at in order}
        return projections[0], projections[1], projections[2]

    def _as_heads(self, x: Tensor) -> Tensor:
        """Return features of heads as (batch, heads, tokens, features of a head)."""
        x = x.unflatten(-1, (-1, self.head_dim))
        if x.dim() == 3:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _output(self, x: Tensor, dims: int) -> Tensor:
        """Return the output of heads, in the order of dimensions of the inputs."""
        if dims == 2:
            x = x.squeeze(0).transpose(0, 1)
        else:
            x = x.transpose(1, 2) if self.batch_first else x.permute(2, 0, 1, 3)
        output: Tensor = self.out_proj(x.flatten(-2))
        return output

    def _append_rows(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return K or V with the rows that `add_bias_kv` and `add_zero_attn` append."""
        parts = [x]
        if bias is not None:
            own = bias.to(x.dtype).reshape(1, 1, -1, self.head_dim).transpose(1, 2)
            parts.append(own.expand(len(x), -1, -1, -1))
        if self.add_zero_attn:
            parts.append(torch.zeros_like(x[:, :, :1]))
        return x if len(parts) == 1 else torch.cat(parts, 2)

    def _gather_weights(self, weights: Tensor, average: bool) -> Tensor:
        """Return the attention weights of all ranks' heads: (batch, heads, queries, keys), or their mean."""
        if average:
            total = redistribute(weights.sum(1), self.axis, REDUCE, may_write=True)
            return total / float(self.num_heads)
        return redistribute(weights, self.axis, moves.gather(1, lengths=even(self.num_heads, self.axis.size).counts))
