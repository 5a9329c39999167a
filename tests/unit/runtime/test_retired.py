"""Groups that were dropped are freed once, whichever thread finds that all ranks have dropped them."""

from __future__ import annotations

from typing import Any

from commlib.runtime.deferred_free import DeferredFree


class Part:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_groups_dropped_by_all_ranks_are_freed() -> None:
    retired, parts = DeferredFree(), [Part(), Part()]
    retired.note(("of two", 2), parts[:1])
    retired.note(("of one", 1), parts[1:])
    retired.free(lambda notes: [notes, []])
    assert [part.closed for part in parts] == [0, 1]
    retired.free(lambda notes: [notes, notes])
    retired.free(lambda notes: [notes, notes])
    assert [part.closed for part in parts] == [1, 1]


def test_two_groups_may_be_split_at_once() -> None:
    """Both threads have read the same notes before either frees: the second one broke its group with a KeyError."""
    retired, part = DeferredFree(), Part()
    retired.note(("of one", 1), [part])

    def gather(notes: Any) -> list[Any]:
        retired.free(lambda others: [others])  # the other thread is quicker
        return [notes]

    retired.free(gather)
    assert part.closed == 1
