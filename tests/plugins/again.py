"""A pytest plugin that omits tests that a further run would repeat: `-p tests.plugins.again --again=ranks`, or mpi.

The suites run on several numbers of ranks and under several MPIs. A test that gains nothing from another number is
marked `any_ranks`, from another MPI `any_mpi`. Both run on 2 ranks under the first; `ci/test full` documents the rest.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import pytest

MARKS = {"ranks": "any_ranks", "mpi": "any_mpi"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--again", default="", metavar="WHAT,...", help=f"what differs from an earlier run: {list(MARKS)}")


def ranks_of(mark: pytest.Mark) -> tuple[int, int | None]:
    """Return the minimum and maximum of `ranks(min=1, max=None)`, passed by position or by name."""

    def ranks(min: int = 1, max: int | None = None) -> tuple[int, int | None]:
        return min, max

    return ranks(*mark.args, **mark.kwargs)


@pytest.hookimpl(trylast=True)  # a conftest may mark a whole folder
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    requested = [kind for kind in config.getoption("again").split(",") if kind]
    if unknown := set(requested) - set(MARKS):
        raise pytest.UsageError(f"--again: expected some of {', '.join(MARKS)}, got {', '.join(sorted(unknown))}")
    repeats = [item for item in items if any(item.get_closest_marker(MARKS[kind]) for kind in requested)]
    if repeats:
        config.hook.pytest_deselected(items=repeats)
        omitted = set(map(id, repeats))
        items[:] = [item for item in items if id(item) not in omitted]


_MORE_THAN_2 = re.compile(r"ranks\((min=)?[3-9]")


def leaves_out(config: pytest.Config, path: Path, *, every_mpi: Collection[str], every_number: Collection[str]) -> bool:
    """Return whether all tests of an adapter's file are omitted: then it need not be imported, with its framework.

    every_mpi, every_number: see `mark_adapter`.
    """
    repeated = config.getoption("again", "").split(",")
    if not path.name.startswith("test_"):
        return False
    return ("mpi" in repeated and path.name not in every_mpi) or (
        "ranks" in repeated and not _gains_from_ranks(path.read_text(), every_number)
    )


def _gains_from_ranks(text: str, every_number: Collection[str]) -> bool:
    return _MORE_THAN_2.search(text) is not None or any(f"def {name}(" in text for name in every_number)


def mark_adapter(
    items: list[pytest.Item], folder: str, *, every_mpi: Collection[str], every_number: Collection[str]
) -> None:
    """Mark the tests in an adapter's folder: adapters use only the core, which is tested everywhere.

    Only those in files `every_mpi` gain something from another MPI; from another number of ranks only those named
    `every_number`, and those that need more than 2.
    """
    for item in items:
        if item.path.parent.name != folder:
            continue
        if item.path.name not in every_mpi:
            item.add_marker(pytest.mark.any_mpi)
        needed = item.get_closest_marker("ranks")
        least = 1 if needed is None else ranks_of(needed)[0]
        if least < 3 and getattr(item, "originalname", "") not in every_number:
            item.add_marker(pytest.mark.any_ranks)
        elif not _gains_from_ranks(item.path.read_text(), every_number):
            raise pytest.UsageError(f"{item.nodeid} is for {least} ranks or more: write ranks(min={least}) in its file")
