"""verify: compare a model with distributed experts with one that has all experts on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from commlib.comparison.agreement import run_together
from commlib.errors import UsageError
from commlib.expert.verify import DenseRun, compare_dense, mask_of
from commlib.tensor_parallel.checks.trace_run import WHOLE
from commlib.tensor_parallel.recording import replace_attribute
from commlib_torch._bridge import host_array, to_device_of
from commlib_torch._shards import shard_of
from commlib_torch._trial_run import preserve_model
from commlib_torch.expert.moe import MoE
from commlib_torch.tensor._nested_tensors import tensors_in
from commlib_torch.tensor.tracing import arguments_of
from commlib_torch.tensor.verify import FreshInputs, evaluation_mode

Wholes = dict[str, dict[str, Tensor]]
"""The weights of all experts of each mixture, by mixture and parameter name."""


def verify(model: nn.Module, batch: Any, *, tolerance: float | None = None, gradients: bool = True) -> None:
    """Compare one forward and backward of a model's mixtures of experts with those of dense ones, without all-to-all.

    model: a `MoE`, or one with some. batch: a tensor, or a tuple or dict of the model's arguments, local to this rank.
    The reference has the weights of all experts on each rank, gathered for it. It runs the routed experts of each
    token, and computes their gates from the logits again. Compared are, in this order, the outputs of mixtures and of
    the model, the gradients of inputs, of other weights (including routers), and of experts, for a loss that is a fixed
    weighted sum of the outputs; with gradients=False only the gradient of the first router. Both run in evaluation
    mode. tolerance: relative to the largest element; by default 1e-4, the precision of routers, or that of the dtype.

    Collective. Raises UsageError on all ranks with the first difference, its size, and its ranks. All state is
    restored: gradients of parameters, statistics, losses of routers, random states, buffers, and values stored by
    models.
    """
    layers = {name or "MoE": module for name, module in model.named_modules() if isinstance(module, MoE)}
    if not layers:
        raise UsageError("verify: the model has no mixture of experts")
    at, layer = next(iter(layers.items()))
    first = layer.mixture.ranks
    call = run_together(first.data, lambda: arguments_of(batch))
    wholes = {name: _gather_weights(layer) for name, layer in layers.items()}
    wanted = None if gradients else f"{at}.router.{next(layer.router.named_parameters())[0]}"
    own = _run(model, layers, call, {}, wanted)
    dense = _run(model, layers, call, wholes, wanted)
    shards = {
        f"{name}.experts.{inner}": (shard, layer.mixture.ranks)
        for name, layer in layers.items()
        for inner, weight in layer.experts.named_parameters()
        if (shard := shard_of(weight)) is not None
    }
    compare_dense(first, own, dense, shards, tolerance)


def _gather_weights(layer: MoE) -> dict[str, Tensor]:
    weights = {}
    for name, weight in layer.experts.named_parameters():
        shard = shard_of(weight)
        assert shard is not None
        weights[name] = to_device_of(shard.whole(host_array(weight)), weight).requires_grad_()
    return weights


def _run(model: nn.Module, layers: Mapping[str, MoE], call: Any, wholes: Wholes, only: str | None) -> DenseRun:
    """Run a model, with dense mixtures if the weights of all experts are given. only: the wanted gradient."""
    dense, fresh = DenseRun(), FreshInputs()
    args, options = (fresh.of(part) for part in call)
    names = {layer: name for name, layer in layers.items()}
    first = next(iter(names))
    with preserve_model(model, call), evaluation_mode(model), torch.enable_grad(), ExitStack() as stack:
        mixed: list[Tensor] = []  # the gradient of the first mixture's router is enough

        def note(layer: Any, given: Any, out: Tensor) -> None:
            dense.values.append((f"the output of {names[layer]}", host_array(out)))
            if only is not None and not mixed and layer is first:
                mixed.extend((given[0], out))

        for layer in layers.values():
            stack.callback(layer.register_forward_hook(note).remove)
        if wholes:
            stack.enter_context(
                replace_attribute(MoE, "mixed", lambda layer, *given: _run_dense(layer, wholes[names[layer]], *given))
            )
        outputs = tensors_in(model(*args, **options))
        loss = torch.zeros((), dtype=torch.float64)
        for at, value in enumerate(outputs):
            dense.values.append((f"output {at}", host_array(value)))
            if value.is_floating_point():
                loss = loss + (value * torch.from_numpy(WHOLE.weights(at, tuple(value.shape))).to(value)).sum()
        experts = {
            f"{name}.experts.{inner}": wholes[name][inner] if wholes else weight
            for name, layer in layers.items()
            for inner, weight in layer.experts.named_parameters()
        }
        stacks = {id(weight) for layer in layers.values() for weight in layer.experts.parameters()}
        others = {f"input {at}": tensor for at, tensor in enumerate(fresh.inputs)}
        others |= {
            _named_mixtures(model, name): weight
            for name, weight in model.named_parameters()
            if weight.requires_grad and id(weight) not in stacks
        }
        wanted = {name: one for name, one in (others | experts).items() if only in (None, name) and one.requires_grad}
        gradients: Any = [None] * len(wanted)
        if loss.requires_grad and wanted:
            ends = [*wanted.values(), *mixed[1:]]
            gradients = torch.autograd.grad(loss, ends, allow_unused=True)
            if mixed and (gradient := gradients[len(wanted)]) is not None:
                dense.scale_by(*map(host_array, (*mixed, gradient)))
            gradients = gradients[: len(wanted)]
        for (name, one), gradient in zip(wanted.items(), gradients, strict=True):
            values = host_array(torch.zeros_like(one) if gradient is None else gradient)
            (dense.experts if name in experts else dense.gradients)[name] = values
    return dense


def _named_mixtures(model: nn.Module, name: str) -> str:
    return f"MoE.{name}" if isinstance(model, MoE) else name


def _run_dense(layer: MoE, whole: Mapping[str, Tensor], tokens: Tensor, mask: Tensor | None, sequence: int) -> Tensor:
    """Return the outputs of a mixture with all experts here, for the same routing. The gates are recomputed."""
    options, bias = layer.options, layer.expert_bias
    logits = layer.logits(tokens)
    routing = layer.mixture.route(
        host_array(logits),
        training=False,
        bias=None if bias is None else host_array(bias.float()),
        mask=None if mask is None else host_array(mask.reshape(-1)),
        sequence=sequence,
    )
    has = torch.from_numpy(mask_of(routing, len(tokens))).to(logits.device)
    scores = logits.double()
    scores = torch.sigmoid(scores) if options.scores == "sigmoid" else torch.softmax(scores, -1)
    gates = torch.where(has, scores, 0)
    if options.normalises:
        gates = gates / gates.sum(-1, keepdim=True).where(has.any(-1, keepdim=True), 1)
    gates = gates * options.scale
    y = torch.zeros_like(tokens)
    for expert in range(options.count):
        rows = has[:, expert].nonzero().squeeze(-1)
        weights = {name: stack[expert] for name, stack in whole.items()}
        out = functional_call(layer.experts, weights, (tokens[rows],))
        y = y.index_add(0, rows, (out * gates[rows, expert].unsqueeze(-1).to(out.dtype)).to(y.dtype))
    return y
