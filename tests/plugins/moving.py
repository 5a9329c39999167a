"""A pytest plugin that ends a line of dots when it has been idle for a while: `-p tests.plugins.moving`.

Open MPI's launcher passes on whole lines only, so that a suite with few or slow tests would seem to have stopped.
"""

from __future__ import annotations

import time

import pytest

SECONDS = 20.0


class Lines:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.since = time.monotonic()
        self.width = 0  # of the line, when a test last ended

    def pytest_runtest_logfinish(self) -> None:
        writer = self.config.get_terminal_writer()
        now, width = time.monotonic(), writer.width_of_current_line
        if width <= self.width:  # pytest has begun another line
            self.since = now
        elif now - self.since >= SECONDS:
            writer.line()
            writer.flush()
            self.since, width = now, 0
        self.width = width


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Lines(config), "lines")
