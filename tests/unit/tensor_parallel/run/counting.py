"""A module that counts, for tests of the state that a trial restores."""

from __future__ import annotations

from typing import Any

calls = 0
log: list[int] = []
table: dict[str, Any] = {"calls": 0}


class Kept:
    calls = 0


def count() -> None:
    global calls, late  # the latter is there from the first call on
    calls += 1
    late = calls  # type: ignore[name-defined]
    log.append(1)
    table["calls"] += 1


def by_name() -> None:
    globals()["calls"] += 1
    globals()["new"] = 1


def seen() -> str:
    return f"{calls} {log} {table} {Kept.calls} {'late' in globals()} {'new' in globals()} {'other' in globals()}"
