"""Guided: call the layers of a model of PyTorch as a guide says, and let them give this rank's part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from commlib.tensor_parallel.checks.guide import Guide
from commlib.tensor_parallel.trace import Step
from commlib_torch._bridge import back
from commlib_torch._unnoticed import mapped


class Guided:
    """A guide, and the call of a layer that is being made."""

    def __init__(self, guide: Guide) -> None:
        self._guide = guide
        guide.begin()
        self._step: Step | None = None
        self._given: dict[int, Tensor] = {}

    def inputs(self, layer: str, tensors: list[Tensor]) -> Mapping[int, Tensor] | None:
        """Return by the ids of tensors with what a layer is called for them; None if with what is there."""
        self._step = self._guide.called(layer)
        numbers = () if self._step is None else self._guide.inputs(self._step)
        if len(numbers) != len(tensors):
            return None
        return {id(tensor): self._of(number, tensor) for number, tensor in zip(numbers, tensors, strict=True)}

    def result(self, results: list[Tensor]) -> Mapping[int, Tensor] | None:
        """Return what is to be taken for the results of the layer, by their ids; None if these are."""
        step, self._step = self._step, None
        part = None if step is None or not results else self._guide.part(step)
        if part is None:
            return None
        dim, spans = part
        return {id(results[0]): torch.cat([results[0].narrow(dim, at, stop - at) for at, stop in spans], dim)}

    def _of(self, number: int, like: Tensor) -> Tensor:
        """Return a value of the whole run: one tensor for all calls, since layers may look for it."""
        found = self._given.get(number)
        if found is None:
            found = back(self._guide.whole.values[number].copy(), like)
            if like.requires_grad and torch.is_grad_enabled():
                found = found.requires_grad_().clone()  # which may be written, as what it stands for
            self._given[number] = found
        return found


def exchanged(value: Any, given: Mapping[int, Tensor]) -> Any:
    """Return a nested structure with other tensors for some, which are given by the ids of these."""
    return mapped(value, lambda one: given.get(id(one), one) if isinstance(one, Tensor) else one)
