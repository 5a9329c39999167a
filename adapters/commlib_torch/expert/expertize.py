"""expertize: convert MLPs of a plain model to mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from commlib.communicator import Communicator
from commlib.comparison.agreement import agree_on_call, lines_of, options_of, run_together
from commlib.comparison.model_signature import is_plain
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.expert.expert_ranks import ExpertRanks, MixtureRanks
from commlib.expert.experts import Experts
from commlib.mesh_groups import Mesh
from commlib.tensor_parallel.plan import resolve
from commlib_torch._readiness import check_module
from commlib_torch._shards import shard_of
from commlib_torch.expert._attribute_state import attribute_state_of, broadcast_attribute_state, fingerprint_of
from commlib_torch.expert._copies import check_copies, copy_mlp
from commlib_torch.expert._expert_stack import check_tied
from commlib_torch.expert.moe import MoE
from commlib_torch.expert.verify import verify as verify_experts
from commlib_torch.tensor._structure import structure_of as likeness_of_models
from commlib_torch.tensor._values import values_of_rank_0

ModelT = TypeVar("ModelT", bound=nn.Module)


def expertize(
    model: ModelT, ranks: MixtureRanks, plan: Mapping[str, Experts], *, verify: Any = None, example: Any = None
) -> ModelT:
    """Convert the MLPs that `plan` names to mixtures of experts among `ranks`, and return `model`.

    Each MLP is a module from (..., width) to the same shape. Experts are modules like it, with new values; with
    copy=True they have its values (upcycling: with a `top_k` above 1 the model initially gives the same results); with
    hidden= they are built-in MLPs instead. The rest of the model gets the values of rank 0. Collective.

    Args:
        model: A module.
        ranks: The ranks that share the experts, such as `mesh["ep"]`, or a mesh of any number of axes, for its axis ep
            or a part of dp.
        plan: Experts by patterns of names, `{"layers.*.mlp": Experts(8, top_k=2)}`.
        verify: A batch (a tensor, or a tuple or dict of the model's arguments), local to this rank, for one forward and
            backward compared with a dense mixture that has all experts on each rank: see `commlib_torch.expert.verify`.
        example: As `verify`, but only outputs and the gradient of the first router are compared.

    Raises:
        UsageError: On all ranks, for a plan that does not fit or changes the results; the model is then unchanged.
        MismatchError: If ranks have different models or plans.
    """
    comm = ranks.comm if isinstance(ranks, Mesh) else ExpertRanks.of(ranks, 1).data
    agree_on_call(comm, "expertize", plan=plan, verify=verify, example=example)
    mlps = run_together(comm, lambda: _find_mlps(model, plan))
    lines = [line for name, module, experts in mlps for line in _describe_mlp(name, module, experts, model)]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    check_agreement(comm, "expertize", [*lines, *(f"{name}: {one.dtype}{list(one.shape)}" for name, one in tensors)])
    copied, not_copied = (
        {layer for _, module, experts in mlps for layer in module.modules() if (experts.hidden is None) is is_copied}
        for is_copied in (True, False)
    )
    likeness_of_models(model, closely=copied, without=not_copied).compare(comm, "expertize")
    mixtures: dict[int, MoE] = {}
    for name, module, experts in mlps:
        if id(module) not in mixtures:  # one module may have several names
            make = None if experts.hidden is not None else _maker(module, experts, model)
            mixtures[id(module)] = _make_layer(name, module, experts, ranks, make)
    _put(model, {name: mixtures[id(module)] for name, module, _ in mlps})
    try:
        with _values_of_rank_0(model, comm, next(iter(mixtures.values()))):
            if verify is not None or example is not None:
                verify_experts(model, example if verify is None else verify, gradients=verify is not None)
    except BaseException:
        _put(model, {name: module for name, module, _ in mlps})
        raise
    return model


def _put(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, module)


@contextmanager
def _values_of_rank_0(model: nn.Module, comm: Communicator, mixture: MoE) -> Iterator[None]:
    """Overwrite all but the experts with the values of rank 0; shards with those of the first rank with the same shard.

    Restores them if the caller's code raises. Collective.
    """
    mixtures = [layer for one in model.modules() if isinstance(one, MoE) for layer in one.modules()]
    tensors: list[Tensor] = [one for one in (*model.parameters(), *model.buffers()) if not one.is_meta]
    whole, parts = [one for one in tensors if shard_of(one) is None], [one for one in tensors if shard_of(one)]
    data = mixture.mixture.ranks.data
    with values_of_rank_0(whole, comm), values_of_rank_0(parts, data), broadcast_attribute_state(model, mixtures, comm):
        yield


def _find_mlps(model: nn.Module, plan: Mapping[str, Experts]) -> list[tuple[str, nn.Module, Experts]]:
    check_module("expertize", model)
    modules = dict(model.named_modules(remove_duplicate=False))
    mlps = [(name, modules[name], experts) for name, experts in resolve(plan, list(modules), (Experts,)).items()]
    mixtures = {layer: name for name, one in modules.items() if isinstance(one, MoE) for layer in one.modules()}
    going = {id(one) for _, module, _ in mlps for one in (*module.modules(), *module.parameters())}
    for name, module, experts in mlps:
        if not name:
            raise UsageError("expertize: the plan names the model itself: make it a layer of another one")
        if (mixture := mixtures.get(module)) is not None:
            within = "" if mixture == name else f"within {mixture}, "
            raise UsageError(f"expertize: {name} is {within}a mixture of experts already: leave it out of the plan")
        sharded = [own for own, one in module.named_parameters() if shard_of(one) is not None]
        experts.check_conversion(f"expertize: {name}", next(iter(sharded), ""))
        width_of(name, module)
        if experts.hidden is None:
            check_tied(f"expertize: {name}", module, model)
            check_copies("expertize", name, module, model, going)
        if not experts.copy and experts.hidden is None:
            for inner, layer in module.named_modules():
                own = list(layer.parameters(recurse=False))
                if own and not hasattr(layer, "reset_parameters"):
                    raise UsageError(
                        f"expertize: {f'{name}.{inner}' if inner else name} has parameters, but no reset_parameters() "
                        "to initialize each expert: pass copy=True or hidden=, or replace it by a MoE(width, experts, "
                        "ranks, expert=...)"
                    )
    return mlps


def _describe_mlp(name: str, module: nn.Module, experts: Experts, model: nn.Module) -> list[str]:
    """Describe an MLP and its experts, for comparison among ranks."""
    lines = lines_of(name, options_of(experts))
    if experts.hidden is None:
        lines += structure_of(name, module, model)
    if experts.copy:
        lines += values_of(name, module)
    return lines


def width_of(name: str, module: nn.Module) -> int:
    """Return the input and output features of an MLP. Raises UsageError if its linear layers do not show them."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    widths = {layer.in_features for layer in layers} & {layer.out_features for layer in layers}
    width = layers[0].in_features if layers else 0
    if width not in widths:
        raise UsageError(
            f"expertize: {name} is a {type(module).__name__}, expected an MLP with a first linear layer whose input "
            "features are the output features of another one: replace other layers by a MoE(width, experts, ranks, "
            "expert=...)"
        )
    return width


def _maker(module: nn.Module, experts: Experts, model: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that makes an expert like a module."""

    def make() -> nn.Module:
        copied = copy_mlp(module, model)
        if not experts.copy:
            nn.Module.apply(copied, _reset)  # submodules before their parents, which may give them other values
        return copied

    return make


def _reset(layer: nn.Module) -> None:
    reset = getattr(layer, "reset_parameters", None)
    if reset is not None:
        reset()


def _make_layer(
    name: str, module: nn.Module, experts: Experts, ranks: MixtureRanks, make: Callable[[], nn.Module] | None
) -> MoE:
    first = next(module.parameters())
    moe = MoE(width_of(name, module), experts, ranks, expert=make, name=name)
    moe.to(first.device, first.dtype)
    moe.train(module.training)
    return moe


def structure_of(name: str, module: nn.Module, model: nn.Module) -> list[str]:
    """Describe an MLP of a model: its modules, their settings, and attribute state."""
    lines = []
    for inner, layer in module.named_modules():
        where = f"{name}.{inner}" if inner else name
        kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
        settings = {
            key: value
            for key, value in vars(layer).items()
            if not key.startswith("_") and (isinstance(value, bool | float) or callable(value))
        }
        frozen = [key for key, one in layer._parameters.items() if one is not None and not one.requires_grad]
        lines += [f"{where}: {kind}({layer.extra_repr()})", *lines_of(where, settings), f"{where}: frozen {frozen}"]
    for where, key, value in attribute_state_of(module.named_modules(prefix=name), model):
        if is_plain(value) and key.isidentifier() and not key.startswith("_"):
            continue  # a warning covers it
        fingerprint = fingerprint_of(value)
        kind, _, more = fingerprint.kind.partition(" ")
        lines.append(f"{where}: {kind} {key}: {more} {fingerprint.digest}")
    return lines


def values_of(name: str, module: nn.Module) -> list[str]:
    """Return digests of an MLP's parameters, except those without values."""
    values = []
    for inner, one in module.named_parameters():
        if not one.is_meta:
            values.append(f"values of {name}.{inner}: {fingerprint_of(one).digest}")
    return values
