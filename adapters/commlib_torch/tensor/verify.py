"""verify: run a sharded and the unsharded model on the same batch, and report the first layer that differs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from commlib.dtypes import Array
from commlib.sharding.axis import AxisRanks, axis_of
from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel.checks.trace_run import WHOLE, OutputPlacements, TracedRun, compare_runs, outputs_of
from commlib_torch._bridge import host_array
from commlib_torch._graph_breaks import suspend_compile
from commlib_torch._shards import shards_in
from commlib_torch._trial_run import map_leaves, preserve_model
from commlib_torch.tensor._nested_tensors import tensors_in
from commlib_torch.tensor._placeholders import substitute_weights, zeros_in
from commlib_torch.tensor.tracing import TraceRecorder, arguments_of, styles_in


def verify(
    model: nn.Module, reference: nn.Module, ranks: AxisRanks, batch: Any, *, tolerance: float | None = None
) -> None:
    """Compare one forward and backward of a sharded model with those of the unsharded one.

    Collective over the axis. All state is restored: gradients of parameters, random states, buffers, arguments, and
    values stored by models.

    Both run in evaluation mode. It compares, in this order: the results of all layers and of the operations between
    them, in execution order; the gradients of the inputs; and the gradients of the weights, for a loss that is a fixed
    weighted sum of the outputs.

    Args:
        model: The sharded model.
        reference: The unsharded model.
        ranks: The ranks of the axis, such as `mesh["tp"]`.
        batch: A tensor, or a tuple or dict of the model's arguments, unsharded and equal on every rank.
        tolerance: Relative to the largest element; by default 1e-9 in float64, 1e-4 in float32, 5e-2 in bfloat16.

    Raises:
        UsageError: On all ranks with the first difference, its size, and its ranks.
    """
    on, styles, call = axis_of(ranks, "verify"), styles_in(model), arguments_of(batch)
    whole = run_model(reference, call, styles, WHOLE)
    own = run_model(model, call, styles, outputs_of(whole, styles, on))
    compare_runs(on, whole, own, styles, tolerance)


def run_model(model: nn.Module, call: Any, styles: Collection[str], outputs: OutputPlacements) -> TracedRun:
    """Run a model forward and backward in evaluation mode. call: its arguments, as from `arguments_of`.

    Weights of zeros are replaced for this run, unless the unsharded model fails with them, or returns NaN.
    """
    zeros = zeros_in(model) if outputs.zeros is None else zeros_in(model) & outputs.zeros
    if outputs.zeros is not None or not zeros:
        return _run(model, call, styles, outputs, zeros)
    with suppress(Exception):
        run = _run(model, call, styles, outputs, zeros)
        if run.is_finite:
            return run
    return _run(model, call, styles, outputs, frozenset())


def _run(
    model: nn.Module, call: Any, styles: Collection[str], outputs: OutputPlacements, zeros: frozenset[str]
) -> TracedRun:
    fresh = FreshInputs()
    args, options = (fresh.of(part) for part in call)
    recorder = TraceRecorder(model, styles, recomputes=False)
    with (
        preserve_model(model, call),
        evaluation_mode(model),
        suspend_compile(),
        torch.enable_grad(),
        substitute_weights(model, zeros),
    ):
        trace, result = recorder.run(args, options)
        loss = torch.zeros((), dtype=torch.float64)
        for at, value in enumerate(tensors_in(result)):
            if value.is_floating_point():
                weights = torch.from_numpy(outputs.weights(at, tuple(value.shape)))
                loss = loss + (value * weights.to(value)).sum()
        wanted = {f"input {at}": tensor for at, tensor in enumerate(fresh.inputs)}
        wanted |= {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        derivatives: Any = [None] * len(wanted)
        if loss.requires_grad:
            derivatives = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    values = [_array(value) for value in recorder.tensors]
    recorder.forget()
    gradients = {name: None if each is None else _array(each) for name, each in zip(wanted, derivatives, strict=True)}
    shards = {name: shard for name, _, shard in shards_in(model)}
    shardings = {name: getattr(module, "sharding", None) for name, module in model.named_modules()}
    known = {name: sharding for name, sharding in shardings.items() if isinstance(sharding, Sharding)}
    return TracedRun(trace, values, gradients, shards, known, zeros=zeros)


def _array(tensor: Tensor) -> Array:
    return host_array(tensor)


class FreshInputs:
    """Copies of a batch's tensors; the floats require gradients."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []

    def of(self, value: Any) -> Any:
        """Return the batch with copies."""
        return map_leaves(value, self._copied)

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        copied = value.detach().clone()
        if copied.is_floating_point():
            self.inputs.append(copied.requires_grad_())
            return copied.clone()  # a model may write to it
        return copied


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode within the context, with unfused layers: fused paths bypass sharded weights."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with disable_fusion():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def disable_fusion() -> Iterator[None]:
    """Disable PyTorch's fused paths of encoder layers and attention within the context."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
