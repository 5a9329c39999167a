"""Checkpoints within an expert: recomputation in backward uses the weights of the same expert.

PyTorch recomputes with the module, which has the weights of an expert only during the expert's call.
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


class _CurrentExpert(threading.local):
    expert: With | None = None


_current = _CurrentExpert()


@contextmanager
def run_as_expert(expert: With) -> Iterator[None]:
    """Let checkpoints in the context recompute with this expert. expert: calls a function with an expert's weights."""
    before, _current.expert = _current.expert, expert
    try:
        yield
    finally:
        _current.expert = before


def _wrap_for_recompute(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function: later calls use the weights of the current expert."""
    if (expert := _current.expert) is None:
        return function

    def called(*args: Any, **options: Any) -> Any:
        return expert(lambda: function(*args, **options))

    return called


@functools.cache
def watch_checkpoints() -> None:
    """Make both kinds of torch's checkpoints expert-aware from now on."""
    torchs: Any = checkpoint
    reentrant, other = torchs.CheckpointFunction, torchs._checkpoint_without_reentrant_generator

    class CheckpointFunction(reentrant):  # type: ignore[misc, valid-type]
        @staticmethod
        def apply(function: Any, *args: Any) -> Any:
            return reentrant.apply(_wrap_for_recompute(function), *args)

    @functools.wraps(other)
    def generator(function: Any, *args: Any, **options: Any) -> Any:
        return other(_wrap_for_recompute(function), *args, **options)

    torchs.CheckpointFunction = CheckpointFunction
    torchs._checkpoint_without_reentrant_generator = generator
