"""Ring attention for PyTorch: the blocks of `commlib.functional.ring`, and the autograd function around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from commlib.errors import UsageError
from commlib.functional.attention import Attention
from commlib.functional.ring import Ring, pass_on
from commlib_torch._bridge import read, to_tensor
from commlib_torch.devices import in_order
from commlib_torch.tensor.attending import attending


def ring_attention(q: Tensor, k: Tensor, v: Tensor, call: Attention, ring: Ring) -> Tensor:
    """Return attention by a ring. Where heads of `v` have another length than those of `k`, zeros make them equal."""
    width, values = q.shape[-1], v.shape[-1]
    q, k, v = (pad(x, (0, max(width, values) - x.shape[-1])) if width != values else x for x in (q, k, v))
    out: Tensor = _Ring.apply(q, k, v, call, ring)  # type: ignore[no-untyped-call]
    return out[..., :values]


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Attention, ring: Ring) -> Tensor:
        q = q.contiguous()
        total, lse = ring.forward(_Blocks(call), q, torch.stack((k, v)))
        out = total.to(q.dtype)
        ctx.call, ctx.ring = call, ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        if torch.is_grad_enabled():
            raise UsageError(
                "attention by a ring has no gradients of gradients (create_graph=True): use method='all_to_all' within "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
            )
        q, k, v, out, lse = ctx.saved_tensors
        ctx.call.agree_backward(q.shape[2])
        blocks, kv = _Blocks(ctx.call), torch.stack((k, v))
        of_q, of_kv = ctx.ring.backward(blocks, gradient.contiguous(), q, kv, out, lse)
        return of_q.to(q.dtype), of_kv[0].to(q.dtype), of_kv[1].to(q.dtype), None, None


class _Blocks:
    def __init__(self, call: Attention) -> None:
        self._axis, self._scale = call.axis, call.scale

    def rows(self, x: Tensor, span: tuple[int, int]) -> Tensor:
        return x[..., slice(*span), :]

    def attend(self, q: Tensor, kv: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse = attending(q).forward(q, kv[0], kv[1], causal, self._scale)
        return out, lse.unsqueeze(-1)

    def gradients(
        self, gradient: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        of_q, *of_kv = attending(q).backward(gradient, q, kv[0], kv[1], out, lse.squeeze(-1), causal, self._scale)
        return of_q, torch.stack(of_kv)

    def nothing(self, q: Tensor) -> tuple[Tensor, Tensor]:
        out = self.zeros(q)
        return out, out.new_full((*q.shape[:-1], 1), -torch.inf)

    def merge(
        self, found: tuple[Tensor, Tensor], span: tuple[int, int], more: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        out, lse = (self.rows(x, span) for x in found)
        together = torch.logaddexp(lse, more[1])
        out.mul_(torch.exp(lse - together)).addcmul_(more[0].to(out.dtype), torch.exp(more[1] - together))
        lse.copy_(together)
        return found

    def zeros(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)

    def add(self, total: Tensor, span: tuple[int, int], x: Tensor) -> Tensor:
        self.rows(total, span).add_(x)
        return total

    def plus(self, x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)

    def pass_on(self, x: Tensor, tokens: int, tag: int) -> Callable[[], Tensor]:
        with in_order():
            wait = pass_on(self._axis, read(x), tokens, tag)

        def arrived() -> Tensor:
            with in_order():
                return to_tensor(wait())

        return arrived
