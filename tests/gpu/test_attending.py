"""Attention of blocks on a GPU: CUDA's operators do what the ring expects, and a ring runs them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from commlib_torch.tensor.attention_kernels import EfficientAttention, MatmulAttention, choose_kernel, trial  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")

HALVES_AND_SINGLE = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES_AND_SINGLE, ids=str)
def test_operators(gpu: Any, dtype: Any) -> None:
    assert trial(EfficientAttention(), torch.device("cuda", gpu.device.index), dtype) == ""


def test_which_operators_are_used(gpu: Any) -> None:
    where = torch.device("cuda", gpu.device.index)
    for dtype in HALVES_AND_SINGLE:
        assert isinstance(choose_kernel(torch.zeros(1, dtype=dtype, device=where)), EfficientAttention)
    assert isinstance(choose_kernel(torch.zeros(1, dtype=torch.float64, device=where)), MatmulAttention)
