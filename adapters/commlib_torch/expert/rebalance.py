"""rebalance_experts: move frequently chosen experts to less busy ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from commlib.communicator import Communicator
from commlib.comparison.agreement import run_together
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.expert.expert_ranks import place_shard
from commlib.expert.mixture import check_has_mixtures
from commlib.expert.moving import move_experts, no_copy, rebalance
from commlib.expert.placement import ExpertPlacement
from commlib.sharding.shards import world_ranks
from commlib_torch._bridge import array_of, to_host, to_tensor
from commlib_torch._shard_marks import mark_part
from commlib_torch._shards import change_shard, shard_of, shards_of
from commlib_torch.expert._family import Family
from commlib_torch.expert._optimizer_states import is_number, is_stack
from commlib_torch.expert._step_hooks import keepers_of
from commlib_torch.expert.moe import MoE
from commlib_torch.pipelines._stage_module import StageModule


def rebalance_experts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    least: float = 1.1,
    copies: Sequence[nn.Module] = (),
) -> dict[str, tuple[float, float]]:
    """Move experts between ranks if that relieves the busiest one, with their optimizer states.

    It uses the number of tokens of all ranks per expert since the last call, or since `expert_stats`; call it between
    steps, every few hundred of them. A layer stays unchanged unless the load of its busiest rank falls by the factor
    `least`. Gradients move with experts. So do copies of a layer, such as a weight average, and all optimizer states of
    these: copies made by `copy.deepcopy`, and layers that have loaded the layer's state.

    Returns, by layer name, the ratio of the busiest rank's load to the mean, before and after. Collective.

        ct.rebalance_experts(model, optimizer)

    Args:
        model: The model with mixtures of experts.
        optimizer: Its optimizer, whose state moves with the experts; None: there is none.
        least: The factor by which the load of a layer's busiest rank must fall, or the layer stays unchanged.
        copies: Other models with the same mixtures, such as an average of the weights.

    Raises:
        UsageError: For a model without mixtures; on all ranks, before a layer's experts move, for `copies` with other
            mixtures, and for an optimizer with states that are not per element of the weights.
        MismatchError: If ranks have other copies, or optimizers.
    """
    layers = mixtures_of("rebalance_experts", model)
    following = _find_copies(layers, copies)

    def move(number: int, placement: ExpertPlacement) -> None:
        _move(layers[number], following[id(layers[number])], optimizer, placement)

    return rebalance([layer.mixture for layer in layers], least, move)


def mixtures_of(verb: str, model: nn.Module) -> list[MoE]:
    """Return the mixtures of a model. Raises UsageError for a call of `verb` if it has none."""
    layers = _mixtures(model) if isinstance(model, nn.Module) else []
    check_has_mixtures(verb, model, nn.Module, layers, whole=not isinstance(model, StageModule))
    return layers


def _mixtures(model: nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def _find_copies(layers: Sequence[MoE], given: Sequence[nn.Module]) -> dict[int, list[MoE]]:
    """Return the copies that move with each layer, by its id. given: models with copies. Collective."""
    pairs: dict[MoE, MoE] = {}
    if layers:
        pairs = run_together(layers[0].mixture.ranks.data, lambda: dict(_match_given(layers, given)))
    for layer in layers:
        comm, count = layer.mixture.ranks.axis.comm, len(_living_copies(layers, pairs)[id(layer)])
        if len(set(comm.all_gather_object(count))) > 1:
            gc.collect()  # some ranks may have collected copies that are still alive on others
            count = len(_living_copies(layers, pairs)[id(layer)])
            what = f"rebalance_experts: {layer.mixture.name}"
            check_agreement(comm, what, [f"copies of the layer, such as averages of weights: {count}"])
    return _living_copies(layers, pairs)


def _match_given(layers: Sequence[MoE], models: Sequence[nn.Module]) -> Iterator[tuple[MoE, MoE]]:
    """Yield (copy, layer) of given models. Raises UsageError if their mixtures are not those of the layers."""
    for model in models:
        mixtures = _mixtures(model)
        for number, layer in enumerate(layers):
            copy = mixtures[number] if len(mixtures) == len(layers) else layer
            shapes = [[(one.dtype, one.shape) for one in each.experts.parameters()] for each in (copy, layer)]
            if copy is layer or shapes[0] != shapes[1] or not _are_together(copy, layer):
                raise no_copy(type(model).__name__, layer.mixture.name)
            yield copy, layer


def _living_copies(layers: Sequence[MoE], given: Mapping[MoE, MoE]) -> dict[int, list[MoE]]:
    """Return the copies that move with each layer, by its id: known ones, and given ones."""
    families: dict[int, tuple[Family, list[MoE]]] = {}
    for layer in layers:
        families.setdefault(id(layer.family), (layer.family, []))[1].append(layer)
    copies_by_layer: dict[int, list[MoE]] = {}
    for family, own in families.values():
        for layer, copies in zip(own, family.copies(own), strict=True):
            mixtures = {id(layer.mixture): layer.mixture}
            copies_by_layer[id(layer)] = []
            mine = [copy for copy, original in given.items() if original is layer]
            for copy in [*mine, *(one for one in copies if one not in given)]:
                if id(copy.mixture) in mixtures or not _are_together(copy, layer):
                    continue  # a shallow copy, or one with other expert owners
                mixtures[id(copy.mixture)] = copy.mixture
                copies_by_layer[id(layer)].append(copy)
    return copies_by_layer


def _are_together(copy: MoE, layer: MoE) -> bool:
    one, other = copy.mixture, layer.mixture
    ranks = [world_ranks(each.ranks.axis.comm) for each in (one, other)]
    return ranks[0] == ranks[1] and one.placement == other.placement


@torch.no_grad()
def _move(
    layer: MoE, copies: Sequence[MoE], optimizer: torch.optim.Optimizer | None, placement: ExpertPlacement
) -> None:
    mixture, everyone = layer.mixture, [layer, *copies]
    comm = mixture.ranks.axis.comm
    _fill_gradients(comm, everyone)
    stacks = _agree_on_stacks(comm, mixture.name, everyone, optimizer)
    arrays = move_experts([array_of(to_host(each)) for each in stacks], mixture.placement, placement, comm)
    for each, array in zip(stacks, arrays, strict=True):
        each.copy_(to_tensor(array))
    for one in everyone:
        _mark(one, placement)
        _mark_state(one, optimizer)
    mixture.place(placement)
    for copy in copies:
        if copy.mixture.ranks is mixture.ranks:
            copy.mixture.follow(mixture)
        else:
            copy.mixture.place(placement)


def _mark(layer: MoE, placement: ExpertPlacement) -> None:
    """Mark the weights of a layer with their experts."""
    for module in layer.experts.modules():
        for name, shard in shards_of(module).items():
            change_shard(module, name, place_shard(shard, placement.owners))


def _mark_state(layer: MoE, optimizer: torch.optim.Optimizer | None) -> None:
    """Mark a layer's optimizer states with their experts, for files of the optimizer."""
    for parameter in layer.experts.parameters():
        shard = shard_of(parameter)
        for keeper in keepers_of(parameter, optimizer):
            for value in keeper.state[parameter].values():
                if shard is not None and is_stack(value, parameter):
                    mark_part(value, shard)


def _fill_gradients(comm: Communicator, layers: Sequence[MoE]) -> None:
    """Add zero gradients to weights if another rank has a gradient: gradients move with experts. Collective."""
    weights = [weight for layer in layers for weight in layer.experts.parameters()]
    everyone = comm.all_gather_object([weight.grad is not None for weight in weights])
    for weight, *have in zip(weights, *everyone, strict=False):  # differences of parameters are reported elsewhere
        if any(have) and weight.grad is None:
            weight.grad = torch.zeros_like(weight)


def owners_of(model: nn.Module) -> list[list[int]]:
    """Return the expert owners (ranks) of each mixture of a model."""
    return [list(layer.mixture.placement.owners) for layer in _mixtures(model)]


def put_owners(model: nn.Module, owners: Sequence[Sequence[int]]) -> None:
    """Restore the expert owners that `owners_of` returned. Collective if they differ."""
    for layer, ranks in zip(_mixtures(model), owners, strict=True):
        placement = ExpertPlacement(tuple(ranks), layer.mixture.placement.ranks)
        if placement != layer.mixture.placement:
            _mark(layer, placement)
            layer.mixture.place(placement)
        layer.mixture.has_moved = False  # the next loaded values belong to these


def _agree_on_stacks(
    comm: Communicator, name: str, layers: Sequence[MoE], optimizer: torch.optim.Optimizer | None
) -> list[Tensor]:
    """Return all values with a row per expert: weights, and their optimizer states. Collective."""
    stacks = run_together(comm, lambda: list(_stacks(name, layers, optimizer)))
    lines = [f"{what}: {stack.dtype}{list(stack.shape[1:])}" for what, stack in stacks]
    check_agreement(comm, f"rebalance_experts: {name}", lines)
    return [stack for _, stack in stacks]


def _stacks(name: str, layers: Sequence[MoE], optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    for number, layer in enumerate(layers):
        for own, parameter in layer.experts.named_parameters():
            what = f"{name}.experts.{own}" if number == 0 else f"{name}.experts.{own} of copy {number}"
            yield what, parameter
            if parameter.grad is not None:
                yield f"the gradient of {what}", parameter.grad
            for one in keepers_of(parameter, optimizer):
                for key, value in sorted(one.state[parameter].items()):
                    if is_stack(value, parameter):
                        yield f"{what}, {key} of {type(one).__name__}", value
                    elif value is not None and not is_number(value):
                        raise UsageError(
                            f"rebalance_experts: the {type(one).__name__} state {key} of {what} is not a tensor of "
                            f"shape {list(parameter.shape)}: it cannot be assigned to experts"
                        )
