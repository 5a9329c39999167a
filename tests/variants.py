"""A pytest plugin that takes some variants of each test with many: `-p tests.variants --variants=4`.

What CI has time for. They are spread evenly over a test's parameters, the first and the last among them, and the same
on all ranks; `ci/test full` takes all.
"""

from __future__ import annotations

from collections import defaultdict

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--variants", type=int, default=0, metavar="N", help="variants of each test at most; 0: all")


def spread(count: int, most: int) -> list[int]:
    """Return `most` places among `count`, evenly, from the first to the last; all if there are no more."""
    if count <= most:
        return list(range(count))
    return [at * (count - 1) // (most - 1) for at in range(most)] if most > 1 else [0]


@pytest.hookimpl(trylast=True)  # behind marks: of what is left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    most = config.getoption("variants")
    if most < 1:
        return
    variants = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        variants[item.nodeid.partition("[")[0]].append(item)
    kept = {id(every[at]) for every in variants.values() for at in spread(len(every), most)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]
