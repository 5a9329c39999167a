"""Guided calls: override the inputs and outputs of a PyTorch model's layers, and return this rank's shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from commlib.tensor_parallel.checks.guided_run import GuidedRun
from commlib.tensor_parallel.trace import TraceStep
from commlib_torch._bridge import to_device_of
from commlib_torch._trial_run import map_leaves


class GuidedCall:
    """The overrides of a run, and the current layer call."""

    def __init__(self, guide: GuidedRun) -> None:
        self._guide = guide
        guide.begin()
        self._step: TraceStep | None = None
        self._given: dict[int, Tensor] = {}

    def inputs(self, layer: str, tensors: list[Tensor]) -> Mapping[int, Tensor] | None:
        """Return replacements of a layer's input tensors by their ids; None if there are none."""
        self._step = self._guide.called(layer)
        numbers = () if self._step is None else self._guide.inputs(self._step)
        if len(numbers) != len(tensors):
            return None
        return {id(tensor): self._guided_value(number, tensor) for number, tensor in zip(numbers, tensors, strict=True)}

    def result(self, results: list[Tensor]) -> Mapping[int, Tensor] | None:
        """Return replacements of a layer's results by their ids; None if there are none."""
        step, self._step = self._step, None
        part = None if step is None or not results else self._guide.part(step)
        if part is None:
            return None
        dim, spans = part
        return {id(results[0]): torch.cat([results[0].narrow(dim, at, stop - at) for at, stop in spans], dim)}

    def _guided_value(self, number: int, like: Tensor) -> Tensor:
        """Return a value of the unsharded run: one tensor for all calls, because layers may test its identity."""
        guided = self._given.get(number)
        if guided is None:
            guided = to_device_of(self._guide.whole.values[number].copy(), like)
            if like.requires_grad and torch.is_grad_enabled():
                guided = guided.requires_grad_().clone()  # may be written, like the value it replaces
            self._given[number] = guided
        return guided


def replace_tensors(value: Any, given: Mapping[int, Tensor]) -> Any:
    """Return a nested structure with tensors replaced by id."""
    return map_leaves(value, lambda one: given.get(id(one), one) if isinstance(one, Tensor) else one)
