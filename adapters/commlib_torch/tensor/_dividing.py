"""Divide a parameter: it is the same object from then on, with one rank's part, and loads its part of whole state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from commlib.comparison.agreement import Agreement
from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding
from commlib.sharding.shards import Shard
from commlib.tensor_parallel.checks.alike import begin
from commlib.tensor_parallel.run.division import Division
from commlib_torch._autograd import backward_passes
from commlib_torch._bridge import back, host_array, to_tensor
from commlib_torch._fast_path import keep_unfused
from commlib_torch._saved_parts import check_part, watch_files
from commlib_torch._shards import before_loading, describe, shard_of, shards_of
from commlib_torch.tensor._initializing import watch_initialization
from commlib_torch.tensor.optimizing import state_may_be_whole, watch_optimizers

_TAKES = "commlib_takes_own"


def check_division(what: str, module: nn.Module, shardings: Mapping[str, Sharding], division: Division) -> None:
    """Raise UsageError unless parameters and buffers of a module can be divided so: those that it has, by name."""
    for name, sharding in shardings.items():
        parameter = _held(what, module, name)
        if isinstance(parameter, nn.Parameter):
            _check_reduced(f"{what}.{name}", parameter)
        division.add(f"{what}.{name}", parameter, shard_of(parameter), sharding)


def _check_reduced(what: str, parameter: nn.Parameter) -> None:
    """Raise UsageError for a parameter whose gradients are reduced already, as those of the whole."""
    if shard_of(parameter) is None:
        for member in backward_passes.members:
            if member.comm.size > 1 and parameter in member:
                raise UsageError(
                    f"plan: the gradient of {what} is reduced already by a DistributedOptimizer or DataParallel, as "
                    "that of the whole: divide the model before, and make that of it then"
                )


def _held(what: str, module: nn.Module, name: str) -> Tensor:
    """Return a parameter of a module, or of modules within it, or a buffer of its own."""
    if (buffer := module._buffers.get(name)) is not None:
        return buffer
    try:
        return module.get_parameter(name)
    except AttributeError:
        own = ", ".join(other for other, _ in module.named_parameters(recurse=False))
        raise UsageError(
            f"plan: {what}: its {name} is no parameter, but is made of {own or 'others'} when it is called, as "
            "weight_norm, spectral_norm and pruning do: make it one before (remove_weight_norm, remove_spectral_norm, "
            "prune.remove), or leave the layer out of the plan"
        ) from None


def divide(what: str, module: nn.Module, axis: Axis, shardings: Mapping[str, Sharding]) -> None:
    """Let parameters and buffers of a module hold this rank's part of their values: the same objects, smaller ones.

    An optimizer that has one already goes on with it. A parameter that several modules share is divided once. Raises
    UsageError, before anything is changed, if one is divided otherwise already.
    """
    check_division(what, module, shardings, Division(axis))
    watch_optimizers()
    watch_initialization()
    watch_files()
    state_may_be_whole()
    keep_unfused(module)
    take_own_when_loaded(module)
    for name, sharding in shardings.items():
        parameter, shard = _held(what, module, name), Shard(axis, sharding)
        tied = shard_of(parameter)
        if tied is None:
            with torch.no_grad():
                part = back(shard.own(host_array(parameter)), parameter)
                _end_graphs(f"{what}.{name}", parameter)
                parameter.data = part
                parameter.grad = None
        inner, _, last = name.rpartition(".")
        describe(module.get_submodule(inner), last, tied or shard)
    module.layer_name = what  # type: ignore[assignment]  # no module
    begin(axis)
    compare_at_first_use(module, what, axis, shardings)


def _end_graphs(what: str, parameter: Tensor) -> None:
    """Let graphs from before, that somebody holds, be none of the divided parameter's.

    A graph ends in a node that knows the shape of the parameter, and later ones share it while it lives. Data of
    another dtype makes the parameter forget it; a backward of a graph that has it is an error that says why.
    """
    if not parameter.is_leaf or not parameter.requires_grad:
        return
    with torch.enable_grad():
        view = parameter.view_as(parameter).grad_fn
    node = None if view is None else view.next_functions[0][0]

    def refuse(gradients: Any) -> None:
        raise UsageError(
            f"{what}: this is the backward of a forward that ran before the layer was divided: let go of what "
            "was computed with the whole model, and call the divided one"
        )

    if node is not None:
        node.register_prehook(refuse)
    other = torch.float32 if parameter.dtype is torch.float64 else torch.float64
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)


def describe_everywhere(model: nn.Module) -> None:
    """Let modules that have a divided parameter for another one, as models tie biases, know what it is a part of."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            shard = shard_of(parameter)
            if shard is not None and name not in shards_of(module):
                take_own_when_loaded(module)
                describe(module, name, shard)


def compare_at_first_use(module: nn.Module, what: str, axis: Axis, options: Mapping[str, Any]) -> None:
    """Let ranks compare a layer, and how they call it, at its first call. what: its name."""
    if axis.size > 1:
        codec = None if axis.codec is None else axis.codec.name
        hook = _FirstUse(Agreement(axis.comm, type(module).__name__, what), what, {"codec": codec, **options})
        hook.handle = module.register_forward_pre_hook(hook)


class _FirstUse:
    """A hook that is there until the first call."""

    def __init__(self, agreement: Agreement, what: str, options: Mapping[str, Any]) -> None:
        self._agreement, self._what, self._options = agreement, what, options
        self.handle: Any = None  # copied with the module and its hooks

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Compare."""
        if torch.compiler.is_compiling():
            return  # the first call that is not compiled is compared
        if any(isinstance(one, fx.Proxy) for one in args):
            return
        self.handle.remove()
        tensors = [one for one in args if isinstance(one, Tensor)]
        said = {"style": getattr(module, "style", None), **self._options}
        said |= {f"dtype of {name}": one.dtype for name, one in module.named_parameters()}
        said |= {f"input {at}": f"{one.dtype}, {one.dim()} dimensions" for at, one in enumerate(tensors)}
        self._agreement.settle("first used", said)


def take_own_when_loaded(module: nn.Module) -> None:
    """Let a module take this rank's parts of whole state that it loads."""
    if not getattr(module, _TAKES, False):
        setattr(module, _TAKES, True)
        module.register_load_state_dict_pre_hook(_take_own)


def _take_own(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take this rank's parts of what is loaded, where that is whole."""
    for name, shard in shards_of(module).items():
        value = state.get(prefix + name)
        if isinstance(value, Tensor):
            check_part(prefix + name, value, shard)
        if isinstance(value, Tensor) and tuple(value.shape) == shard.sharding.shape:
            state[prefix + name] = to_tensor(shard.own(host_array(value)))
    before_loading(module)
