"""A pytest plugin that leaves out what a further run would only say again: `-p tests.again --again=ranks`, or mpi.

The suites run on several numbers of ranks and under several MPIs. A test that learns nothing from another number is
marked `any_ranks`, one from another MPI `any_mpi`. Both run on 2 ranks under the first, and all in `ci/test full`.
"""

from __future__ import annotations

import pytest

MARKS = {"ranks": "any_ranks", "mpi": "any_mpi"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--again", default="", metavar="WHAT,...", help=f"what differs from an earlier run: {list(MARKS)}")


@pytest.hookimpl(trylast=True)  # a conftest may mark a whole folder
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    said = [what for what in config.getoption("again").split(",") if what]
    if unknown := set(said) - set(MARKS):
        raise pytest.UsageError(f"--again: expected some of {', '.join(MARKS)}, got {', '.join(sorted(unknown))}")
    repeats = [item for item in items if any(item.get_closest_marker(MARKS[what]) for what in said)]
    if repeats:
        config.hook.pytest_deselected(items=repeats)
        left_out = set(map(id, repeats))
        items[:] = [item for item in items if id(item) not in left_out]
