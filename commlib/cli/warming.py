"""Warming: each process of `commlib warm` compiles some of the kernels, by their numbers in the list of all."""

from __future__ import annotations

import logging
from functools import cache

from commlib.kernels import ahead


def hush() -> None:
    """Say nothing in this process: that it compiles is known, and what is not kept is counted."""
    logging.getLogger("commlib").setLevel(logging.ERROR)


@cache
def _tasks(rare: bool) -> list[ahead.Task]:
    return list(ahead.tasks(rare=rare))


def count(rare: bool) -> tuple[int, str]:
    """Return how many there are, and for which CPU this process compiles."""
    from numba.core.registry import cpu_target

    _, cpu, _ = cpu_target.target_context.codegen().magic_tuple()
    return len(_tasks(rare)), cpu


def compile_one(rare: bool, number: int) -> tuple[str, str, str]:
    """Return what was compiled, under which name it is kept, and what went wrong or ""."""
    task = _tasks(rare)[number]
    try:
        return task.name, task.compile(), ""
    except Exception as error:
        return task.name, "", f"{type(error).__name__}: {error}"
