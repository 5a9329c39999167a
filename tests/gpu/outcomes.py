"""A pytest plugin that writes each test's outcome as a line of JSON when it ends: `-p tests.gpu.outcomes`.

The variable GPU_TEST_OUTCOMES names the file. Among several ranks, rank 0 writes. If a later test hangs or ends the
process, the earlier lines remain.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


class Outcomes:
    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def _write(self, test: str, outcome: str, seconds: float) -> None:
        with self._path.open("a") as file:
            print(json.dumps({"test": test, "outcome": outcome, "seconds": round(seconds, 3)}), file=file)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid, "begun", 0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._write(report.nodeid, report.outcome, report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", 0)


def pytest_configure(config: pytest.Config) -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        config.pluginmanager.register(Outcomes(Path(os.environ["GPU_TEST_OUTCOMES"])), "outcomes")
