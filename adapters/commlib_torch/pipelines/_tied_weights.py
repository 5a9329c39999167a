"""Tied weights: keep weights shared by stages on several ranks equal, and their gradients complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib.pipeline.tied_weights import find_shared
from commlib_torch._recorded_verbs import writing

_ELSEWHERE, _NO, _YES = -1, 0, 1


@dataclass(slots=True)
class _TiedWeight:
    """A weight that several ranks have.

    name: one of its names. comm: the ranks that have it; None if this rank does not. places: the modules of this rank
    that have it, and its name in each: parameters may be replaced, for example by `load_state_dict(assign=True)`.
    """

    name: str
    comm: Communicator | None
    places: list[tuple[nn.Module, str]]
    trains: bool = True

    @property
    def weight(self) -> nn.Parameter:
        """The current weight, the same in all places. Raises UsageError if one place has lost it."""
        weights = [module._parameters.get(key) for module, key in self.places]
        first = weights[0]
        for (module, key), parameter in zip(self.places, weights, strict=True):
            if parameter is None or first is None:
                raise UsageError(
                    f"pipeline: {self.name}, which stages on several ranks share, is no longer a parameter of "
                    f"{type(module).__name__} (it was {key}): replace weights before pipeline()"
                )
            if parameter is not first:
                module._parameters[key] = first
        assert first is not None
        return first


class TiedWeights:
    """The weights that several ranks have: all of them, in the same order on all ranks."""

    def __init__(self, weights: Sequence[_TiedWeight]) -> None:
        self._all = weights
        self._weights = [tied for tied in weights if tied.comm is not None]
        self._before: list[Tensor | None] = []
        self._are_spread = False

    @property
    def exist(self) -> bool:
        """Whether any rank has a tied weight."""
        return bool(self._all)

    @classmethod
    def find(cls, comm: Communicator, parts: Sequence[nn.Module], placement: Sequence[int]) -> TiedWeights:
        """Find the weights of several ranks in a model that is still complete on this rank. Collective.

        Raises UsageError on all ranks for a weight with sparse gradients.
        """
        names = {id(weight): name for part in reversed(parts) for name, weight in part.named_parameters()}
        own = [part for part, rank in zip(parts, placement, strict=True) if rank == comm.rank]
        modules = {id(module): module for part in own for module in part.modules()}.values()
        weights = []
        for weight, group in find_shared(comm, [part.parameters() for part in parts], placement):
            places = [(module, key) for module in modules for key, one in module._parameters.items() if one is weight]
            _refuse_sparse(parts, weight)
            weights.append(_TiedWeight(names[id(weight)], group, places, trains=weight.requires_grad))
        return cls(weights)

    @torch.no_grad()
    def spread(self) -> None:
        """Send the first owner's weights to all owners, once they are off the meta device. Collective over them."""
        if not any(tied.weight.is_meta for tied in self._weights):
            for tied in self._weights:
                assert tied.comm is not None
                writing.broadcast_(tied.weight.detach(), 0, ranks=tied.comm).run()
            self._are_spread = True

    def begin(self, comm: Communicator) -> None:
        """Freeze or unfreeze a weight on all ranks if one rank did so, under any of its names. Collective."""
        if not self._all:
            return
        answers = self._gather(comm, [tied.weight.requires_grad for tied in self._weights])
        for tied, others in zip(self._all, answers, strict=True):
            if (not tied.trains) in others:  # a rank whose setting differs from the agreed one has changed it
                tied.trains = not tied.trains
            if tied.comm is not None:
                tied.weight.requires_grad_(tied.trains)
        if not self._are_spread:
            self.spread()

    def separate_gradients(self) -> AbstractContextManager[None]:
        """Separate the gradients of this step from existing ones, which are complete."""
        return self._separate() if self._weights else nullcontext()

    @contextmanager
    def _separate(self) -> Iterator[None]:
        weights = [tied.weight for tied in self._weights]
        before = self._before = [None if weight.grad is None else weight.grad.clone() for weight in weights]
        for weight in weights:
            weight.grad = None
        try:
            yield
        except BaseException:
            for weight, gradient in zip(weights, before, strict=True):
                weight.grad = gradient
            raise

    @torch.no_grad()
    def add_up(self, comm: Communicator) -> None:
        """Sum the gradients of all owners once, then add the existing gradients. Collective.

        A weight that is frozen, or that no stage has used, has no gradient, as in one process.
        """
        if not self._all:
            return
        answers = self._gather(comm, [tied.weight.grad is not None for tied in self._weights])
        used = {id(tied) for tied, others in zip(self._all, answers, strict=True) if True in others}
        for tied, before in zip(self._weights, self._before, strict=True):
            weight = tied.weight
            if id(tied) not in used:
                weight.grad = before
                continue
            assert tied.comm is not None
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            elif weight.grad.layout is not torch.strided:
                weight.grad = weight.grad.to_dense()
            writing.all_reduce_(weight.grad, ranks=tied.comm).run()
            if before is not None:
                weight.grad.add_(before)
        self._before = []

    def is_counted_elsewhere(self, weight: Tensor) -> bool:
        """Return whether another rank counts this weight in norms."""
        return any(tied.weight is weight and tied.comm is not None and tied.comm.rank != 0 for tied in self._weights)

    def _gather(self, comm: Communicator, own: Sequence[bool]) -> list[set[bool]]:
        """Return the values that the owners of each weight report, given those of this rank."""
        answers = iter(own)
        codes = [_ELSEWHERE if tied.comm is None else _YES if next(answers) else _NO for tied in self._all]
        table = comm.all_gather(np.array([codes], np.int8))
        return [{bool(value) for value in column if value != _ELSEWHERE} for column in table.T]


def _refuse_sparse(parts: Sequence[nn.Module], weight: Tensor) -> None:
    for name, layer in (pair for part in parts for pair in part.named_modules()):
        if getattr(layer, "sparse", False) is True and any(one is weight for one in layer._parameters.values()):
            raise UsageError(
                f"pipeline: layer {name} ({type(layer).__name__}) has sparse gradients, and stages on other ranks "
                "share its weight: their gradients are summed as dense ones, so set sparse=False"
            )
