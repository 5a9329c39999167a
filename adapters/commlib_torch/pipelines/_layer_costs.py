"""Layer costs: time each unit of a model on one microbatch, and measure its activations and outputs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from commlib.pipeline.schedule.auto import LayerCosts
from commlib_torch._copies import copy_of, preserve_random_state
from commlib_torch.pipelines._parts import INPUTS, SplitModel

_TIMES = 3  # runs per unit; the fastest counts


def layer_costs(cut: SplitModel, example: tuple[tuple[Any, ...], dict[str, Any]]) -> LayerCosts:
    """Return the costs of each part of a model for a microbatch like `example`, its (args, kwargs).

    Copies run: the model and the random states do not change.
    """
    values: dict[str, Any] = {INPUTS: example}
    rows: list[tuple[float, float, float, int, int]] = []
    with preserve_random_state():
        for part in copy_of(list(cut.parts)):
            best = min(
                (_measure(part, _copy_inputs(values)) for _ in range(_TIMES)), key=lambda row: row[0] + row[1] + row[2]
            )
            with torch.no_grad():
                results = part(pytree.tree_map_only(Tensor, torch.clone, values))
            rows.append((*best, sum(map(_nbytes, _tensors(results)))))
            values |= results
    forward, inputs, weights, memory, outputs = zip(*rows, strict=True)
    return LayerCosts(forward, inputs, weights, memory, outputs)


def _measure(part: nn.Module, values: dict[str, Any]) -> tuple[float, float, float, int]:
    """Return the seconds of F, I and W, and the bytes saved between them."""
    own = {parameter.untyped_storage().data_ptr() for parameter in part.parameters()}
    memory: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            memory[storage.data_ptr()] = storage.nbytes()
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
    return forward, inputs, max(0.0, whole - inputs), sum(memory.values())


def _seconds(roots: Sequence[Tensor], ends: Sequence[Tensor], gradients: Sequence[Tensor]) -> float:
    if not roots or not ends:
        return 0.0
    began = time.perf_counter()
    torch.autograd.grad(roots, ends, gradients, retain_graph=True, allow_unused=True)
    return time.perf_counter() - began


def _copy_inputs(values: dict[str, Any]) -> dict[str, Any]:
    """Return copies that require gradients and are not leaves: a part may change them in place."""

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex()).clone()

    return pytree.tree_map_only(Tensor, copied, values)  # type: ignore[no-any-return]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
