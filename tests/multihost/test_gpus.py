"""Arrays on GPUs between hosts: combined in each node's GPUs, shares over the network."""

from __future__ import annotations

import pytest

from tests.multihost.test_hosts import layout, run_tests


@pytest.mark.any_mpi
@pytest.mark.parametrize("ranks_per_host", [layout(2, 2), layout(3, 2, marks=pytest.mark.long)])
def test_gpus(ranks_per_host):
    run_tests(ranks_per_host, ["tests/multihost/gpus.py"])
