"""A pytest plugin that runs some variants of each test with many: `-p tests.plugins.variants --variants=4`.

As many as CI has time for. They are spread evenly over a test's parameters, the first and the last among them; a single
one depends on the test's name, so that tests of one module use other parameters in turn. They are the same on all
ranks and in all runs; `ci/test full` runs all.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--variants", type=int, default=0, metavar="N", help="variants of each test at most; 0: all")


def spread(count: int, most: int, name: str = "") -> list[int]:
    """Return `most` places among `count`, evenly, from the first to the last; all if there are no more.

    A single one depends on the name.
    """
    if count <= most:
        return list(range(count))
    if most == 1:
        return [zlib.crc32(name.encode()) % count]
    return [at * (count - 1) // (most - 1) for at in range(most)]


@pytest.hookimpl(trylast=True)  # after marks: of the remaining tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    most = config.getoption("variants")
    if most < 1:
        return
    variants = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        variants[item.nodeid.partition("[")[0]].append(item)
    selected = {id(every[at]) for name, every in variants.items() for at in spread(len(every), most, name)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in selected])
    items[:] = [item for item in items if id(item) in selected]
