"""CallStack: where in a model a traced run is, and whether its operations are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

_RUNNING: ContextVar[Any] = ContextVar("the call stack of the trace that runs a model", default=None)
"""The innermost one: one trace may run within another."""


class CallStack:
    """The running modules of a model, and its running units: leaves and functions that are recorded as one step."""

    def __init__(self) -> None:
        self.modules: list[str] = []
        self.units: list[str] = []
        """The running units, outermost first: the names of leaves, and "" for functions. Within them, nothing else is
        recorded."""
        self.inputs: list[Tensor] = []
        """Values used within the running function."""
        self.hides = False
        """A layer with a style ran inside an operation that cannot be traced."""

    @contextmanager
    def run(self) -> Iterator[None]:
        """Make this the innermost trace within the context."""
        outer = _RUNNING.set(self)
        try:
            yield
        finally:
            _RUNNING.reset(outer)

    @property
    def is_running(self) -> bool:
        """Whether to record operations; those of a nested trace are not recorded."""
        return _RUNNING.get() is self

    @property
    def place(self) -> str:
        """The name of the running module."""
        return next((name for name in reversed(self.modules) if name), "the model")

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop recording within the context, for trial calls."""
        self.units.append("")
        try:
            yield
        finally:
            self.units.pop()
            self.inputs = []
