"""Batch statistics: running statistics of whole batches, though layers process microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(slots=True)
class _BatchMoments:
    """Sums over the microbatches of a batch, in float64, and the layer's running statistics before it."""

    layer: _BatchNorm
    before: tuple[Tensor, Tensor]
    batches: int
    count: float = 0.0
    total: Tensor | float = 0.0
    squares: Tensor | float = 0.0


class WholeBatchStatistics:
    """Update the running statistics of batch norm layers once per step, by mean and variance of the whole batch.

    A layer still normalises a microbatch by the microbatch's own statistics, because the others are not available yet.
    GPipe and torchgpipe's DeferredBatchNorm do the same.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        modules = {id(layer): layer for part in parts for layer in part.modules()}.values()  # stages may share a layer
        self._layers = [layer for layer in modules if isinstance(layer, _BatchNorm) and layer.track_running_stats]
        self._seen: dict[int, _BatchMoments] = {}
        for layer in self._layers:
            layer.register_forward_pre_hook(self._note)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Collect statistics within the context, and update the layers at its end; restore them if it fails."""
        for layer in self._layers:
            assert layer.running_mean is not None and layer.running_var is not None
            before = layer.running_mean.clone(), layer.running_var.clone()
            self._seen[id(layer)] = _BatchMoments(layer, before, int(layer.num_batches_tracked or 0))
        try:
            yield
            for seen in self._seen.values():
                _update(seen)
        finally:
            self._seen.clear()

    @torch.no_grad()
    def _note(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen = self._seen.get(id(layer))
        if seen is None or not layer.training or _is_recomputing():
            return
        x = arguments[0].detach().double()
        axes = [axis for axis in range(x.ndim) if axis != 1]
        seen.count += x.numel() / x.shape[1]
        seen.total = seen.total + x.sum(axes)
        seen.squares = seen.squares + x.square().sum(axes)


@torch.no_grad()
def _update(seen: _BatchMoments) -> None:
    layer = seen.layer
    mean, variance = layer.running_mean, layer.running_var
    assert mean is not None and variance is not None
    mean.copy_(seen.before[0])
    variance.copy_(seen.before[1])
    if seen.count < 2:
        return
    batch_mean = seen.total / seen.count
    batch_variance = (seen.squares / seen.count - batch_mean**2) * (seen.count / (seen.count - 1))
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.fill_(seen.batches + 1)
    momentum = layer.momentum if layer.momentum is not None else 1.0 / (seen.batches + 1)
    mean.lerp_(torch.as_tensor(batch_mean).to(mean), momentum)
    variance.lerp_(torch.as_tensor(batch_variance).to(variance), momentum)


def _is_recomputing() -> bool:
    """Return whether a backward is running: its forward recomputations must not be counted again."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def preserve_buffers(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Restore buffers at the end of the context, because recomputation changes them."""
    before = [(buffer, buffer.clone()) for part in parts for buffer in part.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
