"""Attention kernels: attention over a block of keys with its log-sum-exp, and its gradients, per device.

PyTorch has no public function that returns the log-sum-exp, or accepts the log-sum-exp of all keys in the backward.
So these call the operators that `scaled_dot_product_attention` itself runs. If there is none, or if it fails a
test, matrix products are used.
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
"""Maximum number of score elements in memory with matrix products."""


class AttentionKernel(Protocol):
    """An attention kernel. q: (batch, heads, queries, width); k, v: (batch, heads or fewer, keys, width), none empty.

    causal: query i sees the keys up to i. A log-sum-exp is (batch, heads, queries), in float32 or better.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Return the softmax of these keys' scores times their values, and the scores' log-sum-exp."""
        ...

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v for the contribution of these keys; `out` and `lse` are over all keys."""
        ...


class FusedAttention:
    """The CPU's operators: for any dtype, and for grouped queries."""

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


class EfficientAttention:
    """CUDA's operators of memory-efficient attention: for float32, float16 and bfloat16.

    They need as many heads of keys as of queries, widths with aligned rows, and rows of the log-sum-exp padded as by
    the forward. In half precision the backward derives the output's strides from its shape: the memory must have the
    forward's layout, with a token's heads next to each other.
    """

    _forward = staticmethod(torch.ops.aten._scaled_dot_product_efficient_attention)
    _backward = staticmethod(torch.ops.aten._scaled_dot_product_efficient_attention_backward)
    _ALIGNED, _ROWS = 8, 32

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        width, (q, k, v) = q.shape[-1], self._padded(q, k, v)
        out, lse, *_ = self._forward(q, k, v, None, True, 0.0, causal, scale=scale)
        return out[..., :width], lse[..., : q.shape[2]]

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, served, width = k.shape[1], q.shape[1] // k.shape[1], q.shape[-1]
        q, k, v = self._padded(q, k, v)
        gradient, out = self._aligned(gradient), self._aligned(out).transpose(1, 2).contiguous().transpose(1, 2)
        lse = pad(lse, (0, -lse.shape[-1] % self._ROWS), value=torch.inf).contiguous()
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout state: there is no dropout
        parts = self._backward(
            gradient, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
        )
        of_q, of_k, of_v = (x[..., :width] for x in parts[:3])
        if served > 1:
            of_k, of_v = (x.unflatten(1, (heads, served)).sum(2) for x in (of_k, of_v))
        return of_q, of_k, of_v

    def _padded(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        served = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(served, 1) if served > 1 else x for x in (k, v))
        return self._aligned(q), self._aligned(k), self._aligned(v)

    def _aligned(self, x: Tensor) -> Tensor:
        missing = -x.shape[-1] % self._ALIGNED
        return pad(x, (0, missing)) if missing else x


class MatmulAttention:
    """Attention by matrix products, on any device, some queries at a time; half precision is computed in float32."""

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


_CPU, _PRODUCTS = FusedAttention(), MatmulAttention()


def choose_kernel(q: Tensor) -> AttentionKernel:
    """Return the kernel for queries of this device and dtype."""
    if q.is_cpu:
        return _CPU
    if q.is_cuda and q.dtype is not torch.float64:
        return _find_cuda_kernel(q.device, q.dtype)
    return _PRODUCTS


@lru_cache
def _find_cuda_kernel(device: torch.device, dtype: torch.dtype) -> AttentionKernel:
    """Return CUDA's operators if they pass a test: they are private to PyTorch and may change."""
    kernel = EfficientAttention()
    why = trial(kernel, device, dtype)
    if not why:
        return kernel
    log.warning("ring attention uses matrix products on %s in %s, which are slower: %s", device, dtype, why)
    return _PRODUCTS


def trial(kernel: AttentionKernel, device: torch.device, dtype: torch.dtype) -> str:
    """Describe how a kernel differs from matrix products on a device, or its error; "" if it is right.

    Not collective: ranks may use different kernels.
    """
    generator, near = torch.Generator("cpu").manual_seed(0), 32 * torch.finfo(dtype).eps

    def drawn(heads: int, tokens: int) -> Tensor:
        return torch.randn(2, heads, tokens, 20, generator=generator, device="cpu").to(device, dtype)

    for causal, keys in ((True, 37), (False, 70)):
        q, k, v, gradient = drawn(4, 37), drawn(2, keys), drawn(2, keys), drawn(4, 37)
        try:
            out, lse = kernel.forward(q, k, v, causal, 0.3)
            wanted, of_all = _PRODUCTS.forward(q, k, v, causal, 0.3)
            further = of_all + 0.5  # as if there were more keys
            results = (out, lse, *kernel.backward(gradient, q, k, v, wanted, further, causal, 0.3))
            right = (wanted, of_all, *_PRODUCTS.backward(gradient, q, k, v, wanted, further, causal, 0.3))
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            return str(error)
        for what, one, other in zip(("results", "log-sum-exp", "of q", "of k", "of v"), results, right, strict=True):
            if one.shape != other.shape:
                return f"{what}: shape {tuple(one.shape)}, expected {tuple(other.shape)}"
            difference = float((one.double() - other.double()).abs().max())
            if not difference <= near * max(1.0, float(other.double().abs().max())):
                return f"{what} differ by {difference:.2g}"
    return ""
