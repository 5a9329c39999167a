"""verify: run a divided model and the undivided one on the same batch, and name the first layer that differs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from commlib.dtypes import Array
from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel.checks.runs import WHOLE, Outputs, Run, compare_runs, outputs_of
from commlib_torch._bridge import host_array
from commlib_torch._shards import shards_in
from commlib_torch._uncompiled import uncompiled_calls
from commlib_torch._unnoticed import mapped, unnoticed
from commlib_torch.tensor._stand_ins import standing_in, zeros_in
from commlib_torch.tensor.moves import On, axis_of
from commlib_torch.tensor.tracing import Recorder, arguments_of, styles_in, tensors_in


def verify(model: nn.Module, reference: nn.Module, axis: On, batch: Any, *, tolerance: float | None = None) -> None:
    """Compare one forward and backward of a divided model with those of the undivided one.

    batch: a tensor, or a tuple or dict of the model's arguments, whole and the same on every rank. Both run in
    evaluation mode; what is compared, in this order, are the results of all layers and of the operations between them
    as they ran, the gradients of the inputs and those of the weights, for a loss that is a fixed weighted sum of the
    outputs. tolerance: relative to the largest element; by default 1e-9 in float64, 1e-4 in float32, 5e-2 in bfloat16.

    Collective over the axis. Raises UsageError on all ranks: the first that differs, by how much, on which ranks.
    All stays as it is: gradients that parameters have, random states, buffers, arguments, and what models keep.
    """
    on, styles, call = axis_of(axis), styles_in(model), arguments_of(batch)
    whole = ran(reference, call, styles, WHOLE)
    own = ran(model, call, styles, outputs_of(whole, styles, on))
    compare_runs(on, whole, own, styles, tolerance)


def ran(model: nn.Module, call: Any, styles: Collection[str], outputs: Outputs) -> Run:
    """Run a model forward and backward in evaluation mode. call: its arguments, as `arguments_of` gives them.

    Weights that are zeros have other numbers for that, unless the whole fails with them, or gives no numbers.
    """
    zeros = zeros_in(model) if outputs.zeros is None else zeros_in(model) & outputs.zeros
    if outputs.zeros is not None or not zeros:
        return _ran(model, call, styles, outputs, zeros)
    with suppress(Exception):
        found = _ran(model, call, styles, outputs, zeros)
        if found.is_finite:
            return found
    return _ran(model, call, styles, outputs, frozenset())


def _ran(model: nn.Module, call: Any, styles: Collection[str], outputs: Outputs, zeros: frozenset[str]) -> Run:
    fresh = Fresh()
    args, options = (fresh.of(part) for part in call)
    recorder = Recorder(model, styles, recomputes=False)
    with unnoticed(model, call), evaluating(model), uncompiled_calls(), torch.enable_grad(), standing_in(model, zeros):
        trace, result = recorder.run(args, options)
        loss = torch.zeros((), dtype=torch.float64)
        for at, value in enumerate(tensors_in(result)):
            if value.is_floating_point():
                weights = torch.from_numpy(outputs.weights(at, tuple(value.shape)))
                loss = loss + (value * weights.to(value)).sum()
        wanted = {f"input {at}": tensor for at, tensor in enumerate(fresh.inputs)}
        wanted |= {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        found: Any = [None] * len(wanted)
        if loss.requires_grad:
            found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    values = [_array(value) for value in recorder.tensors]
    recorder.forget()
    gradients = {name: None if each is None else _array(each) for name, each in zip(wanted, found, strict=True)}
    shards = {name: shard for name, _, shard in shards_in(model)}
    shardings = {name: getattr(module, "sharding", None) for name, module in model.named_modules()}
    known = {name: sharding for name, sharding in shardings.items() if isinstance(sharding, Sharding)}
    return Run(trace, values, gradients, shards, known, zeros=zeros)


def _array(tensor: Tensor) -> Array:
    return host_array(tensor)


class Fresh:
    """Copies of a batch's tensors, of which the floats take gradients."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []

    def of(self, value: Any) -> Any:
        """Return the batch with copies."""
        return mapped(value, self._copied)

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        copied = value.detach().clone()
        if copied.is_floating_point():
            self.inputs.append(copied.requires_grad_())
            return copied.clone()  # which a model may write
        return copied


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Let a model evaluate for a while, layer by layer: a fused path would not be seen, nor know divided weights."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with unfused():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def unfused() -> Iterator[None]:
    """Let PyTorch run encoder layers and attention layer by layer for a while."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
