"""Ring attention for PyTorch: the blocks of `commlib.context_parallel.ring`, and their autograd function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from commlib.context_parallel import Block, SequenceLayout
from commlib.context_parallel.attention import AttentionCall
from commlib.context_parallel.ring import pass_on
from commlib.errors import UsageError
from commlib_torch._bridge import read, to_tensor
from commlib_torch.devices import use_device_streams
from commlib_torch.tensor._block_masks import BlockMasks, narrow_mask
from commlib_torch.tensor._masked_attention import make_finite, masked_backward, masked_forward
from commlib_torch.tensor.attention_kernels import choose_kernel


@dataclass(frozen=True, slots=True)
class RingCall:
    """Parameters of a ring attention call: the rank of the queries, among ranks that share the sequence by a layout.

    seed: of dropout. first_head: the index of the first head of these queries among all.
    """

    layout: SequenceLayout
    rank: int
    seed: int = 0
    first_head: int = 0


def ring_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: AttentionCall, way: RingCall) -> Tensor:
    """Return attention by a ring, also on a single rank. mask: over the keys of ranks 0, 1, ...

    If heads of `v` have another length than those of `k`, zeros pad them.
    """
    width, values = q.shape[-1], v.shape[-1]
    q, k, v = (pad(x, (0, max(width, values) - x.shape[-1])) if width != values else x for x in (q, k, v))
    out: Tensor = _Ring.apply(q, k, v, mask, call, way)  # type: ignore[no-untyped-call]
    return out[..., :values]


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: AttentionCall, way: RingCall
    ) -> Tensor:
        q = q.contiguous()
        blocks, ring = _TorchBlocks(call, way, q, mask), call.ring(way.layout, way.rank)
        total, stats = ring.forward(blocks, q, torch.stack((k, v)))
        out = total.to(q.dtype)
        ctx.call, ctx.way, ctx.ring = call, way, ring
        ctx.save_for_backward(q, k, v, out, stats, mask)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UsageError(
                "ring attention, and attention with a window, masks or dropout, has no gradients of gradients "
                "(create_graph=True): use method='all_to_all' without these, within "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
            )
        q, k, v, out, stats, mask = ctx.saved_tensors
        if ctx.way.layout.size > 1:
            ctx.call.agree_backward(q.shape[2])
        blocks, kv = _TorchBlocks(ctx.call, ctx.way, q, mask, learns=ctx.needs_input_grad[3]), torch.stack((k, v))
        of_q, of_kv = ctx.ring.backward(blocks, gradient.contiguous(), q, kv, out, stats)
        of_mask = None if blocks.of_mask is None else blocks.of_mask.to(mask.dtype)
        return of_q.to(q.dtype), of_kv[0].to(q.dtype), of_kv[1].to(q.dtype), of_mask, None, None


class _TorchBlocks:
    def __init__(
        self, call: AttentionCall, way: RingCall, q: Tensor, mask: Tensor | None, learns: bool = False
    ) -> None:
        self._axis, self._scale = call.axis, call.scale
        self._sights = BlockMasks(call, way.layout, way.rank, mask, way.seed, q, way.first_head)
        self.of_mask = self.zeros(mask) if mask is not None and learns else None

    def rows(self, x: Tensor, span: tuple[int, int]) -> Tensor:
        return x[..., slice(*span), :]

    def attend(self, q: Tensor, kv: Tensor, block: Block, source: int) -> tuple[Tensor, Tensor]:
        sight = self._sights.of(block, source)
        if sight is not None:
            return masked_forward(q, kv[0], kv[1], sight, self._scale)
        out, lse = choose_kernel(q).forward(q, kv[0], kv[1], block.causal, self._scale)
        return out, torch.stack((lse, torch.ones_like(lse)), -1)

    def gradients(
        self, gradient: Tensor, q: Tensor, kv: Tensor, out: Tensor, stats: Tensor, block: Block, source: int
    ) -> tuple[Tensor, Tensor]:
        sight = self._sights.of(block, source)
        if sight is None:
            lse = stats[..., 0] + stats[..., 1].log()
            of_q, *of_kv = choose_kernel(q).backward(gradient, q, kv[0], kv[1], out, lse, block.causal, self._scale)
            return of_q, torch.stack(of_kv)
        of_mask = None
        if self.of_mask is not None:
            of_mask = narrow_mask(self.of_mask, block.queries)[..., self._sights.columns(block, source)]
        of_q, *of_kv = masked_backward(gradient, q, kv[0], kv[1], out, stats, sight, self._scale, of_mask)
        return of_q, torch.stack(of_kv)

    def nothing(self, q: Tensor) -> tuple[Tensor, Tensor]:
        out = self.zeros(q)
        stats = out.new_zeros((*q.shape[:-1], 2))
        stats[..., 0] = -torch.inf
        return out, stats

    def merge(
        self, found: tuple[Tensor, Tensor], span: tuple[int, int], more: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        out, stats = (self.rows(x, span) for x in found)
        largest = make_finite(torch.maximum(stats[..., :1], more[1][..., :1]))
        here, there = (x[..., 1:] * torch.exp(x[..., :1] - largest) for x in (stats, more[1]))
        total = here + there
        weight = total.clamp(min=1)  # 1 if only the largest score counts
        out.mul_(here / weight).addcmul_(more[0].to(out.dtype), there / weight)
        stats.copy_(torch.cat((largest, total), -1))
        return found

    def zeros(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)

    def add(self, total: Tensor, span: tuple[int, int], x: Tensor) -> Tensor:
        self.rows(total, span).add_(x)
        return total

    def plus(self, x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)

    def pass_on(self, x: Tensor, tokens: int, tag: int) -> Callable[[], Tensor]:
        with use_device_streams():
            wait = pass_on(self._axis, read(x), tokens, tag)

        def arrived() -> Tensor:
            with use_device_streams():
                return to_tensor(wait())

        return arrived
