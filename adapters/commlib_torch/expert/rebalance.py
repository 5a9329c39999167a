"""rebalance_experts: experts that are chosen often go to ranks whose experts are not."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from commlib.communicator import Communicator
from commlib.comparison.agreement import together
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.expert.moving import moved
from commlib.expert.placement import Placement
from commlib.expert.ranks import placed
from commlib.sharding.shards import world_ranks
from commlib_torch._bridge import array_of, on_host, to_tensor
from commlib_torch._saved_parts import mark_part
from commlib_torch._shards import change_shard, shard_of, shards_of
from commlib_torch.expert._family import Family
from commlib_torch.expert._states import is_number, is_stack
from commlib_torch.expert._steppers import keepers_of
from commlib_torch.expert.moe import MoE


def rebalance_experts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    least: float = 1.1,
    copies: Sequence[nn.Module] = (),
) -> dict[str, tuple[float, float]]:
    """Exchange experts between ranks where that relieves the busiest one, with what an optimizer keeps for them.

    It goes by how often experts were chosen since the last time, or since `expert_stats`, by tokens of all ranks; call
    it between steps, every some hundred of them. A layer whose busiest rank would not get `least` times less stays as
    it is. Gradients go with experts. So do copies of a layer, such as that of an average of weights, and what any
    optimizer keeps for these: those that `copy.deepcopy` has made, and those that have loaded the layer's own state.
    optimizer: one that may not have made a step yet. copies: other models with the same mixtures.

    Returns by the names of layers the load of the busiest rank by the mean one, before and after. Collective. Raises
    UsageError on all ranks, before a layer's experts go, for `copies` with other mixtures, and for an optimizer that
    keeps something else for them than for each element of their weights; MismatchError if ranks have other copies, or
    optimizers.

        ct.rebalance_experts(model, optimizer)
    """
    layers = _mixtures(model)
    following = _copies(layers, copies)
    found: dict[str, tuple[float, float]] = {}
    for layer in layers:
        placement, before, after = layer.mixture.better_placement(least)
        if placement == layer.mixture.placement:
            after = before
        else:
            _move(layer, following[id(layer)], optimizer, placement)
        found[layer.mixture.name_among(found)] = before, after
    return found


def _mixtures(model: nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def _copies(layers: Sequence[MoE], given: Sequence[nn.Module]) -> dict[int, list[MoE]]:
    """Return the copies that go with each layer, by its id. given: models that have some. Collective."""
    pairs: dict[MoE, MoE] = {}
    if layers:
        pairs = together(layers[0].mixture.ranks.data, lambda: dict(_given(layers, given)))
    for layer in layers:
        comm, count = layer.mixture.ranks.axis.comm, len(_living(layers, pairs)[id(layer)])
        if len(set(comm.all_gather_object(count))) > 1:
            gc.collect()  # some ranks may have some no more that others have not missed yet
            count = len(_living(layers, pairs)[id(layer)])
            what = f"rebalance_experts: {layer.mixture.name}"
            check_agreement(comm, what, [f"copies of the layer, such as averages of weights: {count}"])
    return _living(layers, pairs)


def _given(layers: Sequence[MoE], models: Sequence[nn.Module]) -> Iterator[tuple[MoE, MoE]]:
    """Yield (copy, layer) of models that are given. Raises UsageError for other mixtures than those of the layers."""
    for model in models:
        found = _mixtures(model)
        for number, layer in enumerate(layers):
            copy = found[number] if len(found) == len(layers) else layer
            shapes = [[(one.dtype, one.shape) for one in each.experts.parameters()] for each in (copy, layer)]
            if copy is layer or shapes[0] != shapes[1] or not _are_together(copy, layer):
                raise UsageError(
                    f"rebalance_experts: {type(model).__name__}, one of copies=, has no mixture like "
                    f"{layer.mixture.name} whose experts are on the same ranks: give models that are made and moved "
                    "alike from the beginning"
                )
            yield copy, layer


def _living(layers: Sequence[MoE], given: Mapping[MoE, MoE]) -> dict[int, list[MoE]]:
    """Return the copies that go with each layer, by its id: those that are known, and given ones with their layer."""
    families: dict[int, tuple[Family, list[MoE]]] = {}
    for layer in layers:
        families.setdefault(id(layer.family), (layer.family, []))[1].append(layer)
    found: dict[int, list[MoE]] = {}
    for family, own in families.values():
        for layer, copies in zip(own, family.copies(own), strict=True):
            mixtures = {id(layer.mixture): layer.mixture}
            found[id(layer)] = []
            mine = [copy for copy, original in given.items() if original is layer]
            for copy in [*mine, *(one for one in copies if one not in given)]:
                if id(copy.mixture) in mixtures or not _are_together(copy, layer):
                    continue  # a shallow copy, or one whose experts are elsewhere
                mixtures[id(copy.mixture)] = copy.mixture
                found[id(layer)].append(copy)
    return found


def _are_together(copy: MoE, layer: MoE) -> bool:
    one, other = copy.mixture, layer.mixture
    ranks = [world_ranks(each.ranks.axis.comm) for each in (one, other)]
    return ranks[0] == ranks[1] and one.placement == other.placement


@torch.no_grad()
def _move(layer: MoE, copies: Sequence[MoE], optimizer: torch.optim.Optimizer | None, placement: Placement) -> None:
    mixture, everyone = layer.mixture, [layer, *copies]
    comm = mixture.ranks.axis.comm
    _fill_gradients(comm, everyone)
    stacks = _agreed(comm, mixture.name, everyone, optimizer)
    arrays = moved([array_of(on_host(each)) for each in stacks], mixture.placement, placement, comm)
    for each, array in zip(stacks, arrays, strict=True):
        each.copy_(to_tensor(array))
    for one in everyone:
        _mark(one, placement)
        _mark_kept(one, optimizer)
    mixture.place(placement)
    for copy in copies:
        if copy.mixture.ranks is mixture.ranks:
            copy.mixture.follow(mixture)
        else:
            copy.mixture.place(placement)


def _mark(layer: MoE, placement: Placement) -> None:
    """Let the weights of a layer know of which experts they are."""
    for module in layer.experts.modules():
        for name, shard in shards_of(module).items():
            change_shard(module, name, placed(shard, placement.owners))


def _mark_kept(layer: MoE, optimizer: torch.optim.Optimizer | None) -> None:
    """Let what optimizers keep for the weights of a layer know of which experts it is, in a file of theirs, too."""
    for parameter in layer.experts.parameters():
        shard = shard_of(parameter)
        for keeper in keepers_of(parameter, optimizer):
            for value in keeper.state[parameter].values():
                if shard is not None and is_stack(value, parameter):
                    mark_part(value, shard)


def _fill_gradients(comm: Communicator, layers: Sequence[MoE]) -> None:
    """Give zeros to weights without a gradient of which another rank has one: gradients go with experts. Collective."""
    weights = [weight for layer in layers for weight in layer.experts.parameters()]
    everyone = comm.all_gather_object([weight.grad is not None for weight in weights])
    for weight, *have in zip(weights, *everyone, strict=False):  # others may have others, which is told by and by
        if any(have) and weight.grad is None:
            weight.grad = torch.zeros_like(weight)


def owners_of(model: nn.Module) -> list[list[int]]:
    """Return the ranks of the experts of each mixture of a model."""
    return [list(layer.mixture.placement.owners) for layer in _mixtures(model)]


def put_owners(model: nn.Module, owners: Sequence[Sequence[int]]) -> None:
    """Let weights be of the experts that they were when `owners_of` told. Collective where that is another place."""
    for layer, ranks in zip(_mixtures(model), owners, strict=True):
        placement = Placement(tuple(ranks), layer.mixture.placement.ranks)
        if placement != layer.mixture.placement:
            _mark(layer, placement)
            layer.mixture.place(placement)
        layer.mixture.has_moved = False  # values that are loaded next are of these


def _agreed(
    comm: Communicator, name: str, layers: Sequence[MoE], optimizer: torch.optim.Optimizer | None
) -> list[Tensor]:
    """Return what has a row for each expert: weights, and what optimizers keep for them. Collective."""
    found = together(comm, lambda: list(_stacks(name, layers, optimizer)))
    lines = [f"{what}: {stack.dtype}{list(stack.shape[1:])}" for what, stack in found]
    check_agreement(comm, f"rebalance_experts: {name}", lines)
    return [stack for _, stack in found]


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
                            f"rebalance_experts: {key} of {what}, which {type(one).__name__} keeps, is no tensor of "
                            f"shape {list(parameter.shape)}: it is not known what of it belongs to which expert"
                        )
