"""One call of one verb on one rank, checked and ready to run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from commlib.buffers.views import address_of, as_host, contiguous, writable
from commlib.dtypes import Array, name_of
from commlib.errors import UsageError


@dataclass(slots=True)  # not frozen: that would triple the price of making one, for each call
class Operation:
    """`text` says what is called; ranks that call the same thing have the same text. `run` does it.

    It holds the arrays that it reads and writes, so that they stay alive while it is queued.

    compares: `run` itself finds out whether all ranks call the same thing, before any data moves.
    meets: ranks compare it always, because `run` blocks in MPI: none goes there before all have come, and all that
    have come do.
    finish: makes of `run`'s value what is returned. What it raises concerns this rank alone: its part is done.
    """

    text: str
    run: Callable[[], Any]
    compares: bool = False
    meets: bool = False
    finish: Callable[[Any], Any] | None = None


@lru_cache(maxsize=4096)
def signature(text: str) -> int:
    """Return a positive 62-bit number for `text`, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2 | 1


def follow(history: int, text: str) -> int:
    """Return the positive 62-bit number of a history of calls, and this call after it."""
    return (history * 0x9E3779B97F4A7C15 + signature(text)) & (1 << 62) - 1


@dataclass(slots=True)
class Result:
    """Where a verb's result goes: `flat` is contiguous and 1-D, `deliver` gives the user what was asked for."""

    array: Array
    flat: Array
    given: Any  # the user's `out`, to be returned as it came
    staged: bool = False  # `array` is not contiguous, so `flat` is a copy

    def deliver(self) -> Any:
        if self.given is None:
            return self.array
        if self.staged:
            self.array[...] = self.flat.reshape(self.array.shape)
        return self.given


def source(x: Any, verb: str) -> Array:
    """Return the array to read from: contiguous, any shape. Raises UsageError."""
    return contiguous(as_host(x, verb), verb)


def result(out: Any, shape: tuple[int, ...], dtype: Any, verb: str) -> Result:
    """Return where to put a result of this shape and dtype: `out`, or a new array. Raises UsageError."""
    if out is None:
        array = np.empty(shape, dtype)
        return Result(array, array.reshape(-1), None)
    array = writable(as_host(out, verb, "out"), verb, "out")
    if array.shape != shape or array.dtype != dtype:
        raise UsageError(
            f"{verb}: out has shape {array.shape} and dtype {name_of(array.dtype)}; "
            f"the result has shape {shape} and dtype {name_of(dtype)}"
        )
    flat = contiguous(array, verb)
    return Result(array, flat.reshape(-1), out, staged=flat is not array)


def apart(x: Array, target: Array) -> Array:
    """Return `x`, or a copy of it if it overlaps `target` without being the same memory."""
    same = address_of(x) == address_of(target) and x.nbytes == target.nbytes
    return x if same or not np.may_share_memory(x, target) else x.copy()


def rows(array: Array, verb: str) -> tuple[int, int]:
    """Return (length of dimension 0, elements in each row). Raises UsageError for a 0-d array."""
    if array.ndim == 0:
        raise UsageError(f"{verb}: x is 0-dimensional, but {verb} splits dimension 0: reshape it to (1,)")
    return array.shape[0], int(np.prod(array.shape[1:], dtype=np.int64))


def describe(verb: str, size: int | tuple[int, ...], dtype: Any, *details: str) -> str:
    """Return the text that ranks compare: verb, count or shape, dtype, and what else must agree."""
    what = f"{size} x" if isinstance(size, int) else f"shape {size}"
    return ", ".join([f"{verb} of {what} {name_of(dtype)}", *details])
