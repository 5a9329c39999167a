"""Tied weights: keep a weight that stages on several ranks share the same, and its gradient complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib.pipeline.tied import find_shared
from commlib_torch.collectives import writing

_ELSEWHERE, _NO, _YES = -1, 0, 1


@dataclass(slots=True)
class _Tied:
    """A weight that several ranks have.

    name: one that it has. comm: of the ranks that have it; None where this is none. places: the modules of this rank in
    which it is, and its name there: parameters are replaced, such as by `load_state_dict(assign=True)`.
    """

    name: str
    comm: Communicator | None
    places: list[tuple[nn.Module, str]]
    trains: bool = True

    @property
    def weight(self) -> nn.Parameter:
        """What it is now: one in all places. Raises UsageError if it is in one of them no more."""
        found = [module._parameters.get(key) for module, key in self.places]
        first = found[0]
        for (module, key), parameter in zip(self.places, found, strict=True):
            if parameter is None or first is None:
                raise UsageError(
                    f"pipeline: {self.name}, which stages on several ranks share, is no parameter of "
                    f"{type(module).__name__} any more (it was {key}): change what weights are before pipeline()"
                )
            if parameter is not first:
                module._parameters[key] = first
        assert first is not None
        return first


class TiedWeights:
    """The weights that several ranks have: all of them, in the same order on all ranks."""

    def __init__(self, weights: Sequence[_Tied]) -> None:
        self._all = weights
        self._weights = [tied for tied in weights if tied.comm is not None]
        self._before: list[Tensor | None] = []
        self._are_spread = False

    @property
    def exist(self) -> bool:
        """Whether any rank has any."""
        return bool(self._all)

    @classmethod
    def found(cls, comm: Communicator, parts: Sequence[nn.Module], placement: Sequence[int]) -> TiedWeights:
        """Find the weights that several ranks have in a model that this rank still has as a whole. Collective.

        Raises UsageError on all ranks for one of a layer that gives it sparse gradients.
        """
        names = {id(weight): name for part in reversed(parts) for name, weight in part.named_parameters()}
        own = [part for part, rank in zip(parts, placement, strict=True) if rank == comm.rank]
        modules = {id(module): module for part in own for module in part.modules()}.values()
        weights = []
        for weight, group in find_shared(comm, [part.parameters() for part in parts], placement):
            places = [(module, key) for module in modules for key, one in module._parameters.items() if one is weight]
            _refuse_sparse(parts, weight)
            weights.append(_Tied(names[id(weight)], group, places, trains=weight.requires_grad))
        return cls(weights)

    @torch.no_grad()
    def spread(self) -> None:
        """Give all owners the weights of the first one, once they are on no meta device. Collective over them."""
        if not any(tied.weight.is_meta for tied in self._weights):
            for tied in self._weights:
                assert tied.comm is not None
                writing.broadcast_(tied.weight.detach(), 0, comm=tied.comm).run()
            self._are_spread = True

    def begin(self, comm: Communicator) -> None:
        """Let a weight that was frozen or thawed on a rank, under one of its names, be so on all. Collective."""
        if not self._all:
            return
        told = self._gathered(comm, [tied.weight.requires_grad for tied in self._weights])
        for tied, others in zip(self._all, told, strict=True):
            if (not tied.trains) in others:  # whoever differs from what was agreed has changed it
                tied.trains = not tied.trains
            if tied.comm is not None:
                tied.weight.requires_grad_(tied.trains)
        if not self._are_spread:
            self.spread()

    def apart(self) -> AbstractContextManager[None]:
        """Keep the gradients of this step apart from those that are there already: they are complete."""
        return self._apart() if self._weights else nullcontext()

    @contextmanager
    def _apart(self) -> Iterator[None]:
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
        """Add the gradients of all owners, once, and then those from before. Collective.

        A weight that no stage has used, or that is frozen, has none, as in one process.
        """
        if not self._all:
            return
        told = self._gathered(comm, [tied.weight.grad is not None for tied in self._weights])
        used = {id(tied) for tied, others in zip(self._all, told, strict=True) if True in others}
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
            writing.all_reduce_(weight.grad, comm=tied.comm).run()
            if before is not None:
                weight.grad.add_(before)
        self._before = []

    def is_counted_elsewhere(self, weight: Tensor) -> bool:
        """Return whether another rank counts this weight in norms."""
        return any(tied.weight is weight and tied.comm is not None and tied.comm.rank != 0 for tied in self._weights)

    def _gathered(self, comm: Communicator, own: Sequence[bool]) -> list[set[bool]]:
        """Return what the owners of each weight say of it, given what this rank says of its own."""
        answers = iter(own)
        said = [_ELSEWHERE if tied.comm is None else _YES if next(answers) else _NO for tied in self._all]
        table = comm.all_gather(np.array([said], np.int8))
        return [{bool(value) for value in column if value != _ELSEWHERE} for column in table.T]


def _refuse_sparse(parts: Sequence[nn.Module], weight: Tensor) -> None:
    for name, layer in (pair for part in parts for pair in part.named_modules()):
        if getattr(layer, "sparse", False) is True and any(one is weight for one in layer._parameters.values()):
            raise UsageError(
                f"pipeline: layer {name} ({type(layer).__name__}) has sparse gradients, and stages on other ranks have "
                "its weight, too: their gradients are added up as dense ones, so say sparse=False"
            )
