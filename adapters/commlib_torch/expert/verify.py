"""verify: run a model with experts among ranks beside one in which each rank has all experts, and compare."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from commlib.comparison.agreement import together
from commlib.errors import UsageError
from commlib.expert.verify import DenseRun, compare_dense, mask_of
from commlib.tensor_parallel.checks.runs import WHOLE
from commlib.tensor_parallel.recording import replaced
from commlib_torch._bridge import back, host_array
from commlib_torch._shards import shard_of
from commlib_torch._unnoticed import unnoticed
from commlib_torch.expert.moe import MoE
from commlib_torch.tensor.tracing import arguments_of, tensors_in
from commlib_torch.tensor.verify import Fresh, evaluating

Wholes = dict[str, dict[str, Tensor]]
"""The weights of all experts of each mixture, by the names of both."""


def verify(model: nn.Module, batch: Any, *, tolerance: float | None = None, gradients: bool = True) -> None:
    """Compare one forward and backward of a model's mixtures of experts with those of dense ones, without exchange.

    model: a `MoE`, or one with some. batch: a tensor, or a tuple or dict of the model's arguments: this rank's own. The
    reference has the weights of all experts, which are gathered for it, on each rank: it computes for each token, as
    the routing says, its experts, and their gates anew from the logits. Compared, in this order, are the outputs of
    mixtures and of the model, the gradients of inputs, of other weights, routers among them, and of experts, for a loss
    that is a fixed weighted sum of the outputs; without `gradients` of the first router alone. Both run in evaluation
    mode. tolerance: relative to the largest element; by default 1e-4, in which routers compute, or that of the dtype.

    Collective. Raises UsageError on all ranks: the first that differs, by how much, on which ranks. All stays as it is:
    gradients that parameters have, statistics, losses of routers, random states, buffers, and what models keep.
    """
    layers = {name or "MoE": module for name, module in model.named_modules() if isinstance(module, MoE)}
    if not layers:
        raise UsageError("verify: the model has no mixture of experts")
    at, layer = next(iter(layers.items()))
    first = layer.mixture.ranks
    call = together(first.data, lambda: arguments_of(batch))
    wholes = {name: _gathered(layer) for name, layer in layers.items()}
    wanted = None if gradients else f"{at}.router.{next(layer.router.named_parameters())[0]}"
    own = _ran(model, layers, call, {}, wanted)
    dense = _ran(model, layers, call, wholes, wanted)
    shards = {
        f"{name}.experts.{inner}": (shard, layer.mixture.ranks)
        for name, layer in layers.items()
        for inner, weight in layer.experts.named_parameters()
        if (shard := shard_of(weight)) is not None
    }
    compare_dense(first, own, dense, shards, tolerance)


def _gathered(layer: MoE) -> dict[str, Tensor]:
    found = {}
    for name, weight in layer.experts.named_parameters():
        shard = shard_of(weight)
        assert shard is not None
        found[name] = back(shard.whole(host_array(weight)), weight).requires_grad_()
    return found


def _ran(model: nn.Module, layers: Mapping[str, MoE], call: Any, wholes: Wholes, only: str | None) -> DenseRun:
    """Run a model, with dense mixtures if there are the weights of all experts. only: the gradient that is wanted."""
    found, fresh = DenseRun(), Fresh()
    args, options = (fresh.of(part) for part in call)
    names = {layer: name for name, layer in layers.items()}
    first = next(iter(names))
    with unnoticed(model, call), evaluating(model), torch.enable_grad(), ExitStack() as stack:
        mixed: list[Tensor] = []  # by the first mixture, whose router's gradient is wanted alone

        def note(layer: Any, given: Any, out: Tensor) -> None:
            found.values.append((f"the output of {names[layer]}", host_array(out)))
            if only is not None and not mixed and layer is first:
                mixed.extend((given[0], out))

        for layer in layers.values():
            stack.callback(layer.register_forward_hook(note).remove)
        if wholes:
            stack.enter_context(
                replaced(MoE, "mixed", lambda layer, *given: _dense(layer, wholes[names[layer]], *given))
            )
        outputs = tensors_in(model(*args, **options))
        loss = torch.zeros((), dtype=torch.float64)
        for at, value in enumerate(outputs):
            found.values.append((f"output {at}", host_array(value)))
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
            _named(model, name): weight
            for name, weight in model.named_parameters()
            if weight.requires_grad and id(weight) not in stacks
        }
        wanted = {name: one for name, one in (others | experts).items() if only in (None, name) and one.requires_grad}
        got: Any = [None] * len(wanted)
        if loss.requires_grad and wanted:
            ends = [*wanted.values(), *mixed[1:]]
            got = torch.autograd.grad(loss, ends, allow_unused=True)
            if mixed and (gradient := got[len(wanted)]) is not None:
                found.scale_by(*map(host_array, (*mixed, gradient)))
            got = got[: len(wanted)]
        for (name, one), gradient in zip(wanted.items(), got, strict=True):
            values = host_array(torch.zeros_like(one) if gradient is None else gradient)
            (found.experts if name in experts else found.gradients)[name] = values
    return found


def _named(model: nn.Module, name: str) -> str:
    return f"MoE.{name}" if isinstance(model, MoE) else name


def _dense(layer: MoE, whole: Mapping[str, Tensor], tokens: Tensor, mask: Tensor | None, sequence: int) -> Tensor:
    """Return the outputs of a mixture all of whose experts are here, of the same routing. The gates are made anew."""
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
