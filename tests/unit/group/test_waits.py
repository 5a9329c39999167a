"""A wait is timed per call: many short waits are not one long wait."""

from __future__ import annotations

import time

import numpy as np
import pytest

from commlib.config.settings import Config
from tests.bodies.loopback import run


@pytest.mark.parametrize("nodes", [[0, 1], [0, 0, 1, 1]])
def test_many_short_waits_are_not_a_long_wait(nodes):
    """The small all-reduce of a slow training: each waits a little, in the same compiled call, and all is well."""

    def body(comm):
        x = np.ones(4)
        for _ in range(10):
            if comm.rank == comm.size - 1:
                time.sleep(0.25)
            comm.all_reduce(x, out=x)

    run(len(nodes), body, nodes=nodes, config=Config(timeout=1.5, check="never"))
