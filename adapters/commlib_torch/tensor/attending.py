"""Attending: attention over a block of keys with its log-sum-exp, and its gradients, by what each device has for it.

Nothing public of PyTorch returns the log-sum-exp, or takes that of all keys in the backward. So these are the operators
that `scaled_dot_product_attention` itself runs; where there is none, or it does not what is expected, products do.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

log = logging.getLogger("commlib")

_MOST_SCORES = 1 << 26
"""Elements of the scores that are there at a time where products attend."""


class Attending(Protocol):
    """One way. q: (batch, heads, queries, width); k and v: (batch, heads or fewer, keys, width), none of them empty.

    causal: query i sees the keys up to i. A log-sum-exp is (batch, heads, queries), of float32 at least.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Return the softmax over these keys' scores times their values, and the scores' log-sum-exp."""
        ...

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v for the part of these keys in `out`; that and `lse` are over all keys."""
        ...


class Fused:
    """The CPU's operators: in each dtype, and for grouped queries."""

    _forward = staticmethod(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
    _backward = staticmethod(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = self._forward(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        of_q, of_k, of_v = self._backward(gradient, q, k, v, out, lse, 0.0, causal, scale=scale)
        return of_q, of_k, of_v


class Efficient:
    """CUDA's operators of memory-efficient attention: of float32, float16 and bfloat16.

    They want as many heads of keys as of queries, widths whose rows are aligned, and rows of the log-sum-exp padded as
    the forward pads them. In half precision the backward takes the output's strides from its shape: its memory must lie
    as the forward leaves it, a token's heads one after another.
    """

    _forward = staticmethod(torch.ops.aten._scaled_dot_product_efficient_attention)
    _backward = staticmethod(torch.ops.aten._scaled_dot_product_efficient_attention_backward)
    _ALIGNED, _ROWS = 8, 32

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        width, (q, k, v) = q.shape[-1], self._taken(q, k, v)
        out, lse, *_ = self._forward(q, k, v, None, True, 0.0, causal, scale=scale)
        return out[..., :width], lse[..., : q.shape[2]]

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, served, width = k.shape[1], q.shape[1] // k.shape[1], q.shape[-1]
        q, k, v = self._taken(q, k, v)
        gradient, out = self._aligned(gradient), self._aligned(out).transpose(1, 2).contiguous().transpose(1, 2)
        lse = pad(lse, (0, -lse.shape[-1] % self._ROWS), value=torch.inf).contiguous()
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of what is dropped: nothing is
        parts = self._backward(
            gradient, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
        )
        of_q, of_k, of_v = (x[..., :width] for x in parts[:3])
        if served > 1:
            of_k, of_v = (x.unflatten(1, (heads, served)).sum(2) for x in (of_k, of_v))
        return of_q, of_k, of_v

    def _taken(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        served = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(served, 1) if served > 1 else x for x in (k, v))
        return self._aligned(q), self._aligned(k), self._aligned(v)

    def _aligned(self, x: Tensor) -> Tensor:
        missing = -x.shape[-1] % self._ALIGNED
        return pad(x, (0, missing)) if missing else x


class ByProducts:
    """Attention by its definition, on any device, some queries at a time; half precision is computed in float32."""

    def __init__(self, most_scores: int = _MOST_SCORES) -> None:
        self._most_scores = most_scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        kind = torch.promote_types(q.dtype, torch.float32)
        of_keys, values = (x.to(kind).unsqueeze(2) for x in (k, v))
        out, lse = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=kind, device=q.device)
        for rows in self._pieces(q, k):
            scores = self._scores(q[:, :, rows].to(kind), of_keys, rows, causal, scale)
            total = scores.logsumexp(-1, keepdim=True)
            out[:, :, rows] = (torch.exp(scores - total) @ values).flatten(1, 2).to(q.dtype)
            lse[:, :, rows] = total.squeeze(-1).flatten(1, 2)
        return out, lse

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, kind = (k.shape[1], q.shape[1] // k.shape[1]), torch.promote_types(q.dtype, torch.float32)
        of_keys, values = (x.to(kind).unsqueeze(2) for x in (k, v))
        of_q, of_k, of_v = torch.empty_like(q), torch.zeros_like(k, dtype=kind), torch.zeros_like(v, dtype=kind)
        for rows in self._pieces(q, k):
            mine, result, given = (x[:, :, rows].to(kind) for x in (q, out, gradient))
            scores = self._scores(mine, of_keys, rows, causal, scale)
            weights = torch.exp(scores - lse[:, :, rows].to(kind).unflatten(1, heads).unsqueeze(-1))
            of_result = given.unflatten(1, heads)
            drawn = (given * result).sum(-1, keepdim=True).unflatten(1, heads)
            of_scores = weights * (of_result @ values.mT - drawn) * scale
            of_q[:, :, rows] = (of_scores @ of_keys).flatten(1, 2).to(q.dtype)
            of_k += (of_scores.mT @ mine.unflatten(1, heads)).sum(2)
            of_v += (weights.mT @ of_result).sum(2)
        return of_q, of_k.to(k.dtype), of_v.to(v.dtype)

    def _pieces(self, q: Tensor, k: Tensor) -> list[slice]:
        batch, heads, queries = q.shape[:3]
        length = max(1, self._most_scores // max(1, batch * heads * k.shape[2]))
        return [slice(start, min(start + length, queries)) for start in range(0, queries, length)]

    def _scores(self, q: Tensor, k: Tensor, rows: slice, causal: bool, scale: float) -> Tensor:
        """Return (batch, heads of keys, queries for each, rows, keys)."""
        scores: Tensor = q.unflatten(1, (k.shape[1], -1)) @ k.mT * scale
        if causal:
            keys = torch.arange(k.shape[-2], device=q.device)
            scores.masked_fill_(keys > torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(1), -torch.inf)
        return scores


_CPU, _PRODUCTS = Fused(), ByProducts()


def attending(q: Tensor) -> Attending:
    """Return what attends with queries such as these."""
    if q.is_cpu:
        return _CPU
    if q.is_cuda and q.dtype is not torch.float64:
        return _on_cuda(q.device, q.dtype)
    return _PRODUCTS


@lru_cache
def _on_cuda(device: torch.device, dtype: torch.dtype) -> Attending:
    """Return CUDA's operators, if they do here what is expected: they are PyTorch's own, and may change."""
    found = Efficient()
    why = trial(found, device, dtype)
    if not why:
        return found
    log.warning("attention by a ring computes products on %s in %s, which is slower: %s", device, dtype, why)
    return _PRODUCTS


def trial(found: Attending, device: torch.device, dtype: torch.dtype) -> str:
    """Return how what `found` does on a device differs from products, or why it does nothing there; "" if it is right.

    Not collective: ranks may compute by different means.
    """
    generator, near = torch.Generator("cpu").manual_seed(0), 32 * torch.finfo(dtype).eps

    def drawn(heads: int, tokens: int) -> Tensor:
        return torch.randn(2, heads, tokens, 20, generator=generator, device="cpu").to(device, dtype)

    for causal, keys in ((True, 37), (False, 70)):
        q, k, v, gradient = drawn(4, 37), drawn(2, keys), drawn(2, keys), drawn(4, 37)
        try:
            out, lse = found.forward(q, k, v, causal, 0.3)
            wanted, of_all = _PRODUCTS.forward(q, k, v, causal, 0.3)
            further = of_all + 0.5  # as if there were other keys
            got = (out, lse, *found.backward(gradient, q, k, v, wanted, further, causal, 0.3))
            right = (wanted, of_all, *_PRODUCTS.backward(gradient, q, k, v, wanted, further, causal, 0.3))
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            return str(error)
        for what, one, other in zip(("results", "log-sum-exp", "of q", "of k", "of v"), got, right, strict=True):
            if one.shape != other.shape:
                return f"{what}: shape {tuple(one.shape)}, expected {tuple(other.shape)}"
            apart = float((one.double() - other.double()).abs().max())
            if not apart <= near * max(1.0, float(other.double().abs().max())):
                return f"{what} differ by {apart:.2g}"
    return ""
