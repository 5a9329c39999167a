"""Attention of blocks on a GPU: CUDA's operators do what the ring expects of them, and a ring runs them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from commlib_torch.tensor.attending import ByProducts, Efficient, attending, trial  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")

HALVES_AND_SINGLE = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES_AND_SINGLE, ids=str)
def test_operators(gpu: Any, dtype: Any) -> None:
    assert trial(Efficient(), torch.device("cuda", gpu.device.index), dtype) == ""


def test_what_attends(gpu: Any) -> None:
    where = torch.device("cuda", gpu.device.index)
    for dtype in HALVES_AND_SINGLE:
        assert isinstance(attending(torch.zeros(1, dtype=dtype, device=where)), Efficient)
    assert isinstance(attending(torch.zeros(1, dtype=torch.float64, device=where)), ByProducts)
