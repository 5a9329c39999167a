"""verify: run a divided model and the undivided one on the same batch, and name the first layer that differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.functional.axis import Axis
from commlib.functional.differences import Pair, compare
from commlib.functional.shards import Shard
from commlib.tensor.rules import check
from commlib.tensor.sharding import Sharding
from commlib.tensor.states import State
from commlib.tensor.trace import Step, Trace
from commlib_torch._bridge import array_of, packed
from commlib_torch.tensor._shards import shard_of
from commlib_torch.tensor.moves import On, axis_of
from commlib_torch.tensor.tracing import Recorder, arguments_of, styles_in, tensors_in, unchanged


def verify(model: nn.Module, reference: nn.Module, axis: On, batch: Any, *, tolerance: float | None = None) -> None:
    """Compare one forward and backward of a divided model with those of the undivided one.

    batch: a tensor, or a tuple or dict of the model's arguments, whole and the same on every rank. Both run in
    evaluation mode; what is compared, in this order, are the results of all layers and of the operations between them
    as they ran, the gradients of the inputs and those of the weights, for a loss that is a fixed weighted sum of the
    outputs. tolerance: relative to the largest element; by default 1e-9 in float64, 1e-4 in float32, 5e-2 in bfloat16.

    Collective over the axis. Raises UsageError on all ranks: the first that differs, by how much, on which ranks.
    Gradients that parameters have, random states and buffers stay as they are.
    """
    on = axis_of(axis)
    whole, whole_values, whole_gradients = _run(reference, batch, None)
    states = check(whole, styles_in(model), divided_output=True).states
    lengths = {place: states[value] for place, value in enumerate(whole.outputs)}
    own, own_values, own_gradients = _run(model, batch, (on, lengths, [whole_values[v] for v in whole.outputs]))
    modules = dict(model.named_modules())
    pairs = list(_values(whole, own, states, whole_values, own_values, modules))
    compare(on, [*pairs, *_gradients(model, own_gradients, whole_gradients)], tolerance)


_Outputs = tuple[Axis, Mapping[int, State], list[Tensor]]
"""An axis, how a model's outputs are divided over it, and those of the whole model."""


def _run(
    model: nn.Module, batch: Any, outputs: _Outputs | None
) -> tuple[Trace, list[Tensor], dict[str, Tensor | None]]:
    """Return the trace of one forward, all its values, and the gradients of inputs and weights by name."""
    fresh = _Fresh()
    args, options = (fresh.of(part) for part in arguments_of(batch))
    with unchanged(model), evaluating(model), torch.enable_grad():
        recorder = Recorder(model)
        trace, result = recorder.run(args, options)
        loss = sum((_weighted(at, value, outputs) for at, value in enumerate(tensors_in(result))), torch.zeros(()))
        wanted = {f"input {at}": tensor for at, tensor in enumerate(fresh.inputs)}
        wanted |= {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        found: Any = [None] * len(wanted)
        if isinstance(loss, Tensor) and loss.requires_grad:
            found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return trace, recorder.tensors, dict(zip(wanted, found, strict=True))


class _Fresh:
    """Copies of a batch's tensors, of which the floats take gradients."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            copied = value.detach().clone()
            if copied.is_floating_point():
                self.inputs.append(copied.requires_grad_())
            return copied
        if isinstance(value, Mapping):
            return {key: self.of(part) for key, part in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self.of(part) for part in value)
        return value


def _weighted(at: int, value: Tensor, outputs: _Outputs | None) -> Tensor | float:
    """Return a sum of a result's elements times numbers that are always the same."""
    if not value.is_floating_point():
        return 0.0
    shape = value.shape if outputs is None else outputs[2][at].shape
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(at), dtype=torch.float64)
    if outputs is not None and outputs[1][at].is_divided:
        dim, axis = outputs[1][at].dim, outputs[0]
        lengths = axis.comm.all_gather_object(value.shape[dim])
        weights = weights.narrow(dim, sum(lengths[: axis.rank]), value.shape[dim])
    return (value * weights.to(value)).sum()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Let a model evaluate for a while, layer by layer: a fused path would not be seen, nor know divided weights."""
    training = [module for module in model.modules() if module.training]
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.eval()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module in training:
            module.training = True


def _values(
    whole: Trace,
    own: Trace,
    states: Mapping[int, State],
    whole_values: list[Tensor],
    own_values: list[Tensor],
    modules: Mapping[str, nn.Module],
) -> Iterator[Pair]:
    """Yield what can be compared of two runs, step by step."""
    for step, local in _aligned(whole, own):
        for value, part in zip(step.outputs, local.outputs, strict=False):
            state, expected, came = states[value], whole_values[value], own_values[part]
            if step.kind in ("given", "constant", "weight", "unseen") or state.name in ("unknown", "partial"):
                continue
            arrays = array_of(packed(came.detach())), array_of(packed(expected.detach()))
            if not state.is_divided:
                yield Pair(step.where, *arrays)
            elif state.parts == 1:
                yield Pair(step.where, *arrays, dim=state.dim)
            elif step.kind == "product":
                yield Pair(step.where, *arrays, shard=_features(modules[step.layer], state, expected))


def _aligned(whole: Trace, own: Trace) -> Iterator[tuple[Step, Step]]:
    """Yield the steps of two runs that belong together: all, or if they differ the calls of layers."""
    both = [[step for step in trace.steps if step.kind != "weight"] for trace in (whole, own)]
    if [(step.layer, step.kind) for step in both[0]] == [(step.layer, step.kind) for step in both[1]]:
        yield from zip(*both, strict=True)
        return
    calls = [[step for step in steps if step.layer] for steps in both]
    yield from ((step, part) for step, part in zip(*calls, strict=False) if step.layer == part.layer)


def _features(layer: Any, state: State, whole: Tensor) -> Shard:
    """Return what a rank has of a layer's outputs, some fused parts: they are divided as its weight is."""
    given = layer.sharding
    return Shard(layer.axis, Sharding(tuple(whole.shape), state.dim, given.parts, given.units))


def _gradients(
    model: nn.Module, own: Mapping[str, Tensor | None], whole: Mapping[str, Tensor | None]
) -> Iterator[Pair]:
    parameters = dict(model.named_parameters())
    largest = max((float(gradient.abs().max()) for gradient in whole.values() if gradient is not None), default=0.0)
    for name, expected in whole.items():
        came, shard = own[name], shard_of(parameters[name]) if name in parameters else None
        if came is None and expected is None:
            continue
        if came is None or expected is None:
            raise UsageError(f"verify: {_gradient_of(name)} is there in one of the two models alone")
        arrays = array_of(packed(came)), array_of(packed(expected))
        yield Pair(_gradient_of(name), *arrays, shard=shard, floor=largest / 100)


def _gradient_of(name: str) -> str:
    return f"the gradient of {name}"
