"""Measured: time each unit of a model, and count what it keeps and gives, on one microbatch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from commlib.pipeline.schedule.auto import LayerCosts
from commlib_torch._parts import INPUTS, Cut

_TIMES = 3  # each unit is run; the fastest counts


def layer_costs(cut: Cut, example: tuple[tuple[Any, ...], dict[str, Any]]) -> LayerCosts:
    """Return what each part of a model costs for a microbatch like `example`, its (args, kwargs).

    Weights and their gradients stay as they are, and so do random numbers and buffers such as running statistics.
    """
    values: dict[str, Any] = {INPUTS: example}
    rows: list[tuple[float, float, float, int, int]] = []
    buffers = [(buffer, buffer.clone()) for part in cut.parts for buffer in part.buffers()]
    random = torch.get_rng_state()
    for part in cut.parts:
        given = pytree.tree_map_only(Tensor, _as_leaf, values)
        best = min((_measure(part, given) for _ in range(_TIMES)), key=lambda row: row[0] + row[1] + row[2])
        with torch.no_grad():
            results = part(values)
        rows.append((*best, sum(map(_nbytes, _tensors(results)))))
        values |= results
    torch.set_rng_state(random)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    forward, inputs, weights, kept, outputs = zip(*rows, strict=True)
    return LayerCosts(forward, inputs, weights, kept, outputs)


def _measure(part: nn.Module, values: dict[str, Any]) -> tuple[float, float, float, int]:
    """Return the seconds of F, I and W, and the bytes that are kept between."""
    own = {parameter.untyped_storage().data_ptr() for parameter in part.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        began = time.perf_counter()
        results = part(values)
        forward = time.perf_counter() - began
    roots = [tensor for tensor in _tensors(results) if tensor.requires_grad]
    gradients = [torch.ones_like(tensor) for tensor in roots]
    leaves = [tensor for tensor in _tensors(values) if tensor.requires_grad]
    weights = [parameter for parameter in part.parameters() if parameter.requires_grad]
    inputs = _seconds(roots, leaves, gradients)
    whole = _seconds(roots, [*leaves, *weights], gradients)
    return forward, inputs, max(0.0, whole - inputs), sum(kept.values())


def _seconds(roots: Sequence[Tensor], ends: Sequence[Tensor], gradients: Sequence[Tensor]) -> float:
    if not roots or not ends:
        return 0.0
    began = time.perf_counter()
    torch.autograd.grad(roots, ends, gradients, retain_graph=True, allow_unused=True)
    return time.perf_counter() - began


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
