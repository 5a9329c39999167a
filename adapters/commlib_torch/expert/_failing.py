"""Backwards that fail between the exchanges of a layer: ranks that wait for its experts hear of it."""

from __future__ import annotations

from torch.autograd import Variable

from commlib.expert.flow import Flow
from commlib.expert.mixture import Mixture


class Between:
    """The backward of one call of a layer: between the two exchanges experts compute, and may raise."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self.flow: Flow | None = None
        """That of the call, if its tokens travel in several parts."""
        self.is_open = False

    def open(self) -> None:
        """Note that gradients have come to the experts of this rank."""
        if self.mixture.ranks.axis.size > 1:
            self.is_open = True
            Variable._execution_engine.queue_callback(_AtEnd(self))

    def close(self) -> None:
        """Note that those of their rows have gone back."""
        self.is_open = False


class _AtEnd:
    """What autograd calls at the end of a backward; of one that fails it is dropped without that."""

    def __init__(self, between: Between) -> None:
        self._between, self._is_done = between, False

    def __call__(self) -> None:
        self._is_done = True

    def __del__(self) -> None:
        if self._between.is_open and not self._is_done:
            self._between.is_open = False
            self._between.mixture.leave("raised in a backward")
            if self._between.flow is not None:
                self._between.flow.drop()
