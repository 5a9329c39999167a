"""The cost of an all-reduce between GPUs has the bounds that it must have."""

from __future__ import annotations

import pytest

from commlib.cost.gpus import H100, Gpu, all_reduce_seconds
from commlib.errors import UsageError

GPU = Gpu(memory=1e12, link=1e11, launch=0.0, stream_barrier=0.0)


def test_ranks_that_share_a_gpu_move_all_bytes_in_its_memory():
    for ranks in (2, 3, 4):
        assert all_reduce_seconds(1e9, ranks, GPU, one_gpu=True) == pytest.approx(2 * ranks * 1e9 / 1e12)
        assert all_reduce_seconds(1e9, ranks, GPU, one_gpu=True, symmetric=False) == pytest.approx(6 * ranks * 1e-3)


def test_gpus_of_their_own_are_bound_by_their_links():
    assert all_reduce_seconds(1e9, 4, GPU, one_gpu=False) == pytest.approx(0.75 * 1e9 / 1e11)
    fast = Gpu(memory=1e9, link=1e15, launch=0.0, stream_barrier=0.0)
    assert all_reduce_seconds(1e9, 4, fast, one_gpu=False) == pytest.approx(2.0)


def test_small_ones_cost_barriers_and_launches():
    assert all_reduce_seconds(0, 4, H100, one_gpu=True) == pytest.approx(2 * H100.stream_barrier + H100.launch)
    assert all_reduce_seconds(0, 1, H100, one_gpu=True) == H100.launch
    with pytest.raises(UsageError, match="ranks"):
        all_reduce_seconds(1, 0, H100, one_gpu=True)
