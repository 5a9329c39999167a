"""Arrays on GPUs between hosts: combined in each node's GPUs, shares over the network."""

from __future__ import annotations

import pytest

from tests.multihost.test_hosts import layout, run_tests

# Tests written for one host that also hold for several, on the late device.
SHARED = [
    f"tests/mpi/test_device_{name}"
    for name in (
        "named.py::test_movement",
        "named.py::test_any_order_together_with_host_operations",
        "rows.py::test_any_lengths",
    )
]


@pytest.mark.any_mpi
@pytest.mark.parametrize("ranks_per_host", [layout(2, 2), layout(3, 2, marks=pytest.mark.long)])
def test_gpus(ranks_per_host):
    run_tests(ranks_per_host, ["tests/multihost/gpus.py", *SHARED])
