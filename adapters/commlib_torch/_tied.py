"""Tied weights: keep a weight that stages on several ranks share the same, and its gradient complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from commlib.communicator import Communicator
from commlib.pipeline.tied import find_tied
from commlib_torch.collectives import writing


@dataclass(frozen=True, slots=True)
class _Tied:
    """A weight of this rank, and the communicator of the ranks that have it."""

    weight: nn.Parameter
    comm: Communicator


class TiedWeights:
    """The weights of this rank that other ranks have, too."""

    def __init__(self, weights: Sequence[_Tied], *, exist: bool) -> None:
        self._weights = weights
        self.exist = exist
        """Whether any rank has any."""
        self._before: list[Tensor | None] = []

    @classmethod
    def found(cls, comm: Communicator, parts: Sequence[nn.Module], placement: Sequence[int]) -> TiedWeights:
        """Find the weights that several ranks have in a model that this rank still has as a whole. Collective."""
        own, exist = find_tied(comm, [part.parameters() for part in parts], placement)
        return cls([_Tied(parameter, group) for parameter, group in own], exist=exist)

    @torch.no_grad()
    def spread(self) -> None:
        """Give all owners the weights of the first one. Collective over them."""
        for tied in self._weights:
            writing.broadcast_(tied.weight.detach(), 0, comm=tied.comm).run()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keep the gradients of this step apart from those that are there already: they are complete."""
        before = self._before = [None if t.weight.grad is None else t.weight.grad.clone() for t in self._weights]
        for tied in self._weights:
            tied.weight.grad = None
        try:
            yield
        except BaseException:
            for tied, gradient in zip(self._weights, before, strict=True):
                tied.weight.grad = gradient
            raise

    @torch.no_grad()
    def add_up(self) -> None:
        """Add the gradients of all owners, once, and then those from before. Collective over the owners."""
        for tied, before in zip(self._weights, self._before, strict=True):
            if tied.weight.grad is None:
                tied.weight.grad = torch.zeros_like(tied.weight)
            writing.all_reduce_(tied.weight.grad, comm=tied.comm).run()
            if before is not None:
                tied.weight.grad.add_(before)
        self._before = []

    def is_counted_elsewhere(self, weight: Tensor) -> bool:
        """Return whether another rank counts this weight in norms."""
        return any(tied.weight is weight and tied.comm.rank != 0 for tied in self._weights)
