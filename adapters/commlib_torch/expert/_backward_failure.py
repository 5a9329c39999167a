"""Backward failures: notify the ranks that wait for this rank's experts."""

from __future__ import annotations

from torch.autograd import Variable

from commlib.expert.chunked_dispatch import ChunkedDispatch
from commlib.expert.mixture import Mixture


class BackwardGuard:
    """The backward of one layer call: experts run between its two all-to-alls, and may raise."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self.flow: ChunkedDispatch | None = None
        """The flow of the call, if its tokens are sent in chunks."""
        self.is_open = False

    def open(self) -> None:
        """Note that gradients have reached the experts of this rank."""
        if self.mixture.ranks.axis.size > 1:
            self.is_open = True
            Variable._execution_engine.queue_callback(_EndCallback(self))

    def close(self) -> None:
        """Note that the gradients of their rows have been sent back."""
        self.is_open = False


class _EndCallback:
    """A callback at the end of a backward; autograd drops it without a call if the backward fails."""

    def __init__(self, between: BackwardGuard) -> None:
        self._between, self._is_done = between, False

    def __call__(self) -> None:
        self._is_done = True

    def __del__(self) -> None:
        if self._between.is_open and not self._is_done:
            self._between.is_open = False
            self._between.mixture.leave("raised in a backward")
            if self._between.flow is not None:
                self._between.flow.drop()
