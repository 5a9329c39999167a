"""Check arrays before they are sent on a channel."""

from __future__ import annotations

from typing import Any

from commlib.dtypes import name_of
from commlib.errors import UsageError
from commlib.p2p.channels.posted_end import MOST_DIMENSIONS


def check_sendable(array: Any, dtype: Any, text: str) -> None:
    """Raise UsageError if an array does not have the channel's dtype, or has too many dimensions."""
    if array.dtype != dtype:
        raise UsageError(
            f"send on {text}: x is {name_of(array.dtype)}, but the channel was opened for {name_of(dtype)}: convert "
            "it, or open another channel"
        )
    if array.ndim > MOST_DIMENSIONS:
        raise UsageError(f"send on {text}: x has {array.ndim} dimensions, expected at most {MOST_DIMENSIONS}")
