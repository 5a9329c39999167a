"""Checkpoints within an expert: what torch computes again in backward has the weights of that expert, too.

PyTorch computes again by the module, which has the weights of an expert only while this one is called.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint

With = Callable[[Callable[..., Any]], Any]
"""Calls a function with the weights of an expert."""


class _Current(threading.local):
    expert: With | None = None


_current = _Current()


@contextmanager
def called_as(expert: With) -> Iterator[None]:
    """Let what is checkpointed within be computed again as now. expert: calls a function with an expert's weights."""
    before, _current.expert = _current.expert, expert
    try:
        yield
    finally:
        _current.expert = before


def _again(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is called with the weights of the expert that is called now."""
    if (expert := _current.expert) is None:
        return function

    def called(*args: Any, **options: Any) -> Any:
        return expert(lambda: function(*args, **options))

    return called


@functools.cache
def watch_checkpoints() -> None:
    """Let torch's checkpoints, of both kinds, know of experts from now on."""
    torchs: Any = checkpoint
    reentrant, other = torchs.CheckpointFunction, torchs._checkpoint_without_reentrant_generator

    class CheckpointFunction(reentrant):  # type: ignore[misc, valid-type]
        @staticmethod
        def apply(function: Any, *args: Any) -> Any:
            return reentrant.apply(_again(function), *args)

    @functools.wraps(other)
    def generator(function: Any, *args: Any, **options: Any) -> Any:
        return other(_again(function), *args, **options)

    torchs.CheckpointFunction = CheckpointFunction
    torchs._checkpoint_without_reentrant_generator = generator
