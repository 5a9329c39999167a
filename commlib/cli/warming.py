"""Warming: worker functions of `commlib warm`; each process compiles kernels by their number in the list of all."""

from __future__ import annotations

import logging
from functools import cache

from commlib.kernels import precompile


def hush() -> None:
    """Suppress warnings in this process: compilation is expected, and `commlib warm` counts unsaved kernels."""
    logging.getLogger("commlib").setLevel(logging.ERROR)


@cache
def _tasks(rare: bool) -> list[precompile.CompileTask]:
    return list(precompile.tasks(rare=rare))


def count(rare: bool) -> tuple[int, str]:
    """Return the number of kernels, and the CPU that this process compiles for."""
    from numba.core.registry import cpu_target

    _, cpu, _ = cpu_target.target_context.codegen().magic_tuple()
    return len(_tasks(rare)), cpu


def compile_one(rare: bool, number: int) -> tuple[str, str, str]:
    """Compile one kernel; return its name, its name in the cache, and an error text or ""."""
    task = _tasks(rare)[number]
    try:
        return task.name, task.compile(), ""
    except Exception as error:
        return task.name, "", f"{type(error).__name__}: {error}"
