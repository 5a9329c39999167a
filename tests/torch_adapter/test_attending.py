"""Attention of blocks with its log-sum-exp: it uses the CPU's operators, and checks operators before use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from commlib_torch.tensor.attention_kernels import (
    EfficientAttention,
    FusedAttention,
    MatmulAttention,
    choose_kernel,
    trial,
)

pytestmark = [pytest.mark.any_ranks]

CPU = torch.device("cpu")


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("most_scores", [1, 200, 1 << 20])
@pytest.mark.parametrize(("heads", "of_keys"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize(("queries", "keys", "causal"), [(9, 9, True), (9, 5, False), (1, 7, False), (5, 9, True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_block_attention_matches_the_operators_of_the_cpu(
    dtype: torch.dtype, queries: int, keys: int, causal: bool, heads: int, of_keys: int, most_scores: int
) -> None:
    """The backward receives a log-sum-exp over more keys than these."""
    q, gradient = (drawn(2, heads, queries, 6, dtype=dtype, seed=seed) for seed in (0, 1))
    k, v = (drawn(2, of_keys, keys, 6, dtype=dtype, seed=seed) for seed in (2, 3))
    products, operators = MatmulAttention(most_scores), FusedAttention()
    got, wanted = (list(way.forward(q, k, v, causal, 0.4)) for way in (products, operators))
    out, lse = wanted[0], wanted[1] + 0.25
    got += products.backward(gradient, q, k, v, out, lse, causal, 0.4)
    wanted += operators.backward(gradient, q, k, v, out, lse, causal, 0.4)
    # Products in float32 are rounded once at the end; operators also round weights in half precision.
    near = 8 * torch.finfo(dtype).eps
    for one, other in zip(got, wanted, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert float((one.double() - other.double()).abs().max()) <= near * max(1.0, float(other.double().abs().max()))


def test_each_device_has_its_attention_operators() -> None:
    assert isinstance(choose_kernel(torch.zeros(1)), FusedAttention)
    assert isinstance(choose_kernel(torch.zeros(1, device="meta")), MatmulAttention)


def test_correct_operators_pass() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert trial(FusedAttention(), CPU, dtype) == ""
        assert trial(MatmulAttention(100), CPU, dtype) == ""


def test_a_default_device_changes_nothing() -> None:
    """Regression: the trial drew numbers on the default device with a CPU generator, which PyTorch refuses."""
    with torch.device("meta"):
        assert trial(FusedAttention(), CPU, torch.float32) == ""


def test_missing_operators_do_not_pass() -> None:
    """CUDA's operators do not exist on the CPU."""
    assert "aten::_scaled_dot_product_efficient_attention" in trial(EfficientAttention(), CPU, torch.float32)


class Changed(FusedAttention):
    """Operators that behave as in another version of PyTorch."""

    def __init__(self, what: str) -> None:
        self.what = what

    def forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(*arguments)
        if self.what == "of base 2":
            lse = lse / torch.log(torch.tensor(2.0))
        return out, torch.nn.functional.pad(lse, (0, 3)) if self.what == "padded" else lse

    def backward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        of_q, of_k, of_v = super().backward(*arguments)
        return of_q, of_k * (2 if self.what == "twice" else 1), of_v


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("of base 2", "log-sum-exp differ by"),
        ("padded", r"log-sum-exp: shape \(2, 4, 40\), expected \(2, 4, 37\)"),
        ("twice", "of k differ by"),
    ],
)
def test_changed_operators_do_not_pass(what: str, why: str) -> None:
    import re

    assert re.match(why, trial(Changed(what), CPU, torch.float32))
