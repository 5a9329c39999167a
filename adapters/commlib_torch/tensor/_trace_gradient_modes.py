"""GradientModes: detect the code for which a model turns off gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from commlib.tensor_parallel.recording import StepRecording, replace_attribute
from commlib_torch.tensor._trace_stack import CallStack


class GradientModes:
    """Counts the no-grad contexts that a model has entered: in a run without gradients, nothing else shows them."""

    def __init__(self, recording: StepRecording, stack: CallStack) -> None:
        self._recording, self._stack, self._depth = recording, stack, 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count within the context."""

        def counting(function: Any, change: int) -> Any:
            def called(*args: Any) -> Any:
                if self._stack.is_running:
                    self._depth += change
                    self._recording.detaches = self._depth > 0
                return function(*args)

            return called

        with ExitStack() as stack:
            for kind in (torch.no_grad, torch.inference_mode):
                for name, change in (("__enter__", 1), ("__exit__", -1)):
                    stack.enter_context(replace_attribute(kind, name, counting(getattr(kind, name), change)))
            yield

    @contextmanager
    def ignore_one(self) -> Iterator[None]:
        """Do not count the next no-grad context within this context."""
        self._depth -= 1
        try:
            yield
        finally:
            self._depth += 1
