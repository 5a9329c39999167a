"""A pytest plugin that delays the host at random before it queues work: `-p tests.late.late_host`.

The host is usually far ahead of its streams, so it changes their memory before they use it. Where it falls behind, as
on a loaded machine, the change may happen at any time. HOST_SEED seeds the naps; each rank adds its number, or else its
process'.
"""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.late.engine import Engine

SHARE = 0.3  # of the copies and kernels that are queued behind a nap
LONGEST = 2e-3  # seconds: some copies' time


def pytest_configure(config: pytest.Config) -> None:
    seed = int(os.environ.get("HOST_SEED", "0")) + int(os.environ.get("OMPI_COMM_WORLD_RANK", os.getpid()))
    chance = random.Random(seed)

    def nap() -> None:
        if chance.random() < SHARE:
            time.sleep(LONGEST * chance.random())

    Engine.before = nap
