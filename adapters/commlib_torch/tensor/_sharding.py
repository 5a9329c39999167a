"""Sharding of parameters: a parameter keeps its identity, holds this rank's shard, and loads it from a full state.

In evaluation, `nn.TransformerEncoderLayer` passes the weights of its layers to a fused kernel, which does not support
shards. A hook on one of these layers prevents this. `nn.TransformerEncoder` removes padding from its input for that
kernel, without checking for hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from commlib.comparison.agreement import LayerAgreement
from commlib.errors import UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import Sharding
from commlib.sharding.shards import Shard
from commlib.tensor_parallel.checks.axis_equality import begin
from commlib.tensor_parallel.run.divisibility import Divisibility
from commlib_torch._autograd import backward_passes
from commlib_torch._bridge import host_array, to_device_of, to_tensor
from commlib_torch._shard_marks import check_part, watch_files
from commlib_torch._shards import describe, prepare_loading, shard_of, shards_of
from commlib_torch.tensor._initializing import watch_initialization
from commlib_torch.tensor.optimizing import state_may_be_whole, watch_optimizers

_TAKES = "commlib_takes_own"


def check_division(what: str, module: nn.Module, shardings: Mapping[str, Sharding], division: Divisibility) -> None:
    """Raise UsageError unless the parameters and buffers of a module, given by name, can be sharded this way."""
    for name, sharding in shardings.items():
        parameter = _get_held(what, module, name)
        if isinstance(parameter, nn.Parameter):
            _check_reduced(f"{what}.{name}", parameter)
        division.add(f"{what}.{name}", parameter, shard_of(parameter), sharding)


def _check_reduced(what: str, parameter: nn.Parameter) -> None:
    """Raise UsageError for a parameter whose gradients are already reduced like a full weight's."""
    if shard_of(parameter) is None:
        for member in backward_passes.members:
            if member.comm.size > 1 and parameter in member:
                raise UsageError(
                    f"plan: the gradient of {what} is reduced already by a DistributedOptimizer or DataParallel, as "
                    "that of the full weight: shard the model first, and wrap it or its optimizer afterwards"
                )


def _get_held(what: str, module: nn.Module, name: str) -> Tensor:
    """Return a parameter of a module or its submodules, or one of the module's own buffers."""
    if (buffer := module._buffers.get(name)) is not None:
        return buffer
    try:
        return module.get_parameter(name)
    except AttributeError:
        own = ", ".join(other for other, _ in module.named_parameters(recurse=False))
        raise UsageError(
            f"plan: {what}: its {name} is not a parameter, but computed from {own or 'others'} at each call, as by "
            "weight_norm, spectral_norm and pruning: make it a parameter first (remove_weight_norm, "
            "remove_spectral_norm, prune.remove), or leave the layer out of the plan"
        ) from None


def shard_parameters(what: str, module: nn.Module, axis: ParallelAxis, shardings: Mapping[str, Sharding]) -> None:
    """Replace the values of a module's parameters and buffers by this rank's shards, in the same objects.

    Optimizers that have them continue to work. A parameter shared by several modules is sharded once. Raises
    UsageError, before any change, if one is already sharded differently.
    """
    check_division(what, module, shardings, Divisibility(axis))
    watch_optimizers()
    watch_initialization()
    watch_files()
    state_may_be_whole()
    keep_unfused(module)
    take_own_when_loaded(module)
    for name, sharding in shardings.items():
        parameter, shard = _get_held(what, module, name), Shard(axis, sharding)
        tied = shard_of(parameter)
        if tied is None:
            with torch.no_grad():
                part = to_device_of(shard.own(host_array(parameter)), parameter)
                _end_graphs(f"{what}.{name}", parameter)
                parameter.data = part
                parameter.grad = None
        inner, _, last = name.rpartition(".")
        describe(module.get_submodule(inner), last, tied or shard)
    module.layer_name = what  # type: ignore[assignment]  # no module
    begin(axis)
    compare_at_first_use(module, what, axis, shardings)


def _end_graphs(what: str, parameter: Tensor) -> None:
    """Detach the sharded parameter from graphs of earlier forwards that are still referenced.

    A graph ends in a node with the shape of the parameter, and later graphs share the node while it lives. Assigning
    data of another dtype removes it; a backward of an old graph raises an error with the reason.
    """
    if not parameter.is_leaf or not parameter.requires_grad:
        return
    with torch.enable_grad():
        view = parameter.view_as(parameter).grad_fn
    node = None if view is None else view.next_functions[0][0]

    def refuse(gradients: Any) -> None:
        raise UsageError(
            f"{what}: this is the backward of a forward that ran before the layer was sharded: drop the results of "
            "the unsharded model, and call the sharded one"
        )

    if node is not None:
        node.register_prehook(refuse)
    other = torch.float32 if parameter.dtype is torch.float64 else torch.float64
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)


def describe_everywhere(model: nn.Module) -> None:
    """Mark modules that refer to a sharded parameter, for example a tied bias, with its shard."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            shard = shard_of(parameter)
            if shard is not None and name not in shards_of(module):
                take_own_when_loaded(module)
                describe(module, name, shard)


def compare_at_first_use(module: nn.Module, what: str, axis: ParallelAxis, options: Mapping[str, Any]) -> None:
    """Compare a layer and its call among ranks, at its first call. what: its name."""
    if axis.size > 1:
        codec = None if axis.codec is None else axis.codec.name
        hook = _FirstUse(LayerAgreement(axis.comm, type(module).__name__, what), what, {"codec": codec, **options})
        hook.handle = module.register_forward_pre_hook(hook)


class _FirstUse:
    """A hook that removes itself at the first call."""

    def __init__(self, agreement: LayerAgreement, what: str, options: Mapping[str, Any]) -> None:
        self._agreement, self._what, self._options = agreement, what, options
        self.handle: Any = None  # copied with the module and its hooks

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Compare among ranks."""
        if torch.compiler.is_compiling():
            return  # compares the first eager call
        if any(isinstance(one, fx.Proxy) for one in args):
            return
        self.handle.remove()
        tensors = [one for one in args if isinstance(one, Tensor)]
        settings = {"style": getattr(module, "style", None), **self._options}
        settings |= {f"dtype of {name}": one.dtype for name, one in module.named_parameters()}
        settings |= {f"input {at}": f"{one.dtype}, {one.dim()} dimensions" for at, one in enumerate(tensors)}
        self._agreement.settle("first used", settings)


def take_own_when_loaded(module: nn.Module) -> None:
    """Let a module take this rank's shards from a full state that it loads."""
    if not getattr(module, _TAKES, False):
        setattr(module, _TAKES, True)
        module.register_load_state_dict_pre_hook(_take_own)


def _take_own(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take this rank's shards of full values in a state."""
    for name, shard in shards_of(module).items():
        value = state.get(prefix + name)
        if isinstance(value, Tensor):
            check_part(prefix + name, value, shard)
        if isinstance(value, Tensor) and tuple(value.shape) == shard.sharding.shape:
            state[prefix + name] = to_tensor(shard.own(host_array(value)))
    prepare_loading(module)


def keep_unfused(module: nn.Module) -> None:
    """Ensure that a layer is called, in every parent module."""
    if not _is_unfused(module):
        module.register_forward_pre_hook(_report_call)


def keep_padding(model: nn.Module) -> None:
    """Ensure that the encoders in a model call their layers with ordinary tensors if they contain sharded layers."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(map(_is_unfused, module.modules())):
            module.use_nested_tensor = False


def _is_unfused(module: nn.Module) -> bool:
    return _report_call in module._forward_pre_hooks.values()


def _report_call(module: nn.Module, args: Any) -> None:
    """Report a layer call outside of the model to the plan check; the hook's presence keeps the layer unfused."""
    if not torch.compiler.is_compiling():  # otherwise the compiler would make a program for each value of `inside`
        check = vars(module).get("plan_check")
        if check is not None and not check.inside:
            check.used(module, args)
