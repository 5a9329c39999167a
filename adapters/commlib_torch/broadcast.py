"""Broadcast of parameters and optimizer state from one rank, after start-up or a restart.

With `ranks=` it is an ordered verb among those ranks. Without it, it runs by name, in any order with other named
operations, and `root_rank` is a global rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from commlib.arguments import describe_type
from commlib.communicator import Communicator
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.horovod.broadcast import BroadcastRanks, NamedRanks, broadcast_pack, name_values, plan_packs
from commlib.horovod.process_sets import process_set_of
from commlib.horovod.pytree import put_back, take_out
from commlib.ranks import Ranks, communicator_of
from commlib.sharding.shard_replicas import find_shard_replicas
from commlib.sharding.shards import Shard, check_same_shard, world_ranks
from commlib.tensor_verbs import check_ordered, choose_root
from commlib_torch._bridge import array_of, check_dense, to_host
from commlib_torch._call import OutputTensor
from commlib_torch._shards import shard_of
from commlib_torch.named_verbs._named_operations import ProcessSets

Parameters = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Tensor]


def broadcast_parameters(
    params: Parameters,
    root_rank: int | None = None,
    process_set: ProcessSets = None,
    *,
    root: int | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Overwrite tensors on every rank with those of `root_rank`, in place. Collective.

    `params` is `model.state_dict()`, `model.named_parameters()`, or an iterable of tensors; any shapes and dtypes.
    Experts differ among ranks: they are broadcast among the ranks that have the same experts only. Parameters sharded
    along an axis of a mesh, and all tensors passed with them, get the values of the rank that has the coordinates of
    `root_rank` along the other axes.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, or an iterable of tensors, of any shapes and dtypes.
        root_rank: The global rank whose values the others get.
        process_set: The participating ranks; None: all.
        root: With `ranks`: the rank among them whose values the others get.
        ranks: A communicator, mesh or process set: then this is the ordered verb on these ranks.

    Raises:
        MismatchError: On every rank if ranks give different names, shapes or dtypes.
        UsageError: For values that are not tensors, and for sharded parameters if some of the ranks have other
            shards.
    """
    group, source = _ranks("broadcast_parameters", root_rank, root, process_set, ranks)
    pairs = name_values("broadcast_parameters", params)
    for name, tensor in pairs:
        if not isinstance(tensor, Tensor):
            raise UsageError(f"{name} is not a tensor but a {type(tensor).__name__}: use broadcast_object for it")
        try:
            check_dense(tensor)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error
    shards = [(name, shard_of(tensor)) for name, tensor in pairs]
    group, source = _shard_ranks("broadcast_parameters", shards, group, source, process_set)
    lines = [f"{name}: {tensor.dtype}{list(tensor.shape)}" for name, tensor in pairs]
    check_agreement(group, "tensors to broadcast", [f"root {source}", *lines])
    _broadcast_tensors([tensor for _, tensor in pairs if not _is_local(tensor)], source, group)
    for _, tensor in pairs:
        shard = shard_of(tensor)
        if shard is not None and shard.is_local and shard.replicas is not None:
            _broadcast_tensors([tensor], 0, shard.replicas)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int | None = None,
    model: torch.nn.Module | None = None,
    process_set: ProcessSets = None,
    *,
    root: int | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Give every rank the state and the hyperparameters of the optimizer of `root_rank`. Collective.

    Works before and after an optimizer's first step: ranks without state take the root's, and if the root has none, no
    rank has any. No step is run, so `model`, which Horovod needs for some optimizers, is unused. Experts differ among
    ranks: each rank keeps its state for them; see `gather_optimizer_state`.

    Args:
        optimizer: The optimizer.
        root_rank: The global rank whose values the others get.
        model: Unused; Horovod needs it for some optimizers.
        process_set: The participating ranks; None: all.
        root: With `ranks`: the rank among them whose values the others get.
        ranks: A communicator, mesh or process set: then this is the ordered verb on these ranks.

    Raises:
        MismatchError: On every rank if parameter groups differ.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"broadcast_optimizer_state: expected a torch optimizer, got {describe_type(optimizer)}")
    own = {
        parameter: dict(optimizer.state[parameter]) if parameter in optimizer.state else None
        for group in optimizer.param_groups
        for parameter in group["params"]
        if _is_local(parameter)
    }
    group, source = _ranks("broadcast_optimizer_state", root_rank, root, process_set, ranks)
    shards = [
        (f"parameter {place} of group {number}", shard_of(one))
        for number, group in enumerate(optimizer.param_groups)
        for place, one in enumerate(group["params"])
    ]
    group, source = _shard_ranks("broadcast_optimizer_state", shards, group, source, process_set)
    groups = [str([str(list(p.shape)) for p in group["params"]]) for group in optimizer.param_groups]
    check_agreement(group, "optimizer parameter groups", [f"root {source}", *groups])
    structure, tensors = take_out(optimizer.state_dict() if group.rank == source else None, Tensor)
    tensors = [to_host(tensor) for tensor in tensors]
    kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    structure, kinds = group.broadcast_object((structure, kinds), source)
    if group.rank != source:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
    _broadcast_tensors(tensors, source, group)
    # The root loads its own state too: side effects of loading (casts, for example) must occur on every rank.
    optimizer.load_state_dict(put_back(structure, tensors))
    for parameter, state in own.items():
        if state is not None:
            optimizer.state[parameter] = state
        elif optimizer.state.pop(parameter, None):
            warnings.warn(
                "broadcast_optimizer_state: the root has optimizer state for experts, and this rank has none for its "
                "own: they start without state here. Load the result of gather_optimizer_state on every rank instead",
                stacklevel=2,
            )


def _is_local(tensor: Tensor) -> bool:
    shard = shard_of(tensor)
    return shard is not None and shard.is_local


def _ranks(
    what: str, root_rank: int | None, root: int | None, process_set: ProcessSets, ranks: Ranks | None
) -> tuple[BroadcastRanks, int]:
    source = choose_root(root_rank, root)
    if ranks is None:
        return NamedRanks(what, process_set), source
    check_ordered(None, process_set)
    return communicator_of(ranks, what), source


def _shard_ranks(
    what: str,
    shards: Sequence[tuple[str, Shard | None]],
    group: BroadcastRanks,
    source: int,
    process_set: ProcessSets,
) -> tuple[BroadcastRanks, int]:
    """Return the ranks with the same shards, and their root, unless the caller chose ranks. Raises UsageError."""
    comm = group if isinstance(group, Communicator) else None
    if comm is None and process_set is None and (replicas := find_shard_replicas(what, shards, group)) is not None:
        group, source, comm = replicas.comm, replicas.root(source), replicas.comm
    everyone = process_set_of(process_set).ranks or () if comm is None else world_ranks(comm)
    check_same_shard(what, shards, everyone)
    return group, source


def _broadcast_tensors(tensors: Sequence[Tensor], root: int, ranks: BroadcastRanks) -> None:
    """Broadcast tensors that have the same shapes and dtypes on every rank, in packs of small ones."""
    if ranks.size == 1:
        return
    for pack in plan_packs(tensor.numel() * tensor.element_size() for tensor in tensors):
        places = [OutputTensor(tensors[number], to_host, array_of) for number in pack]
        broadcast_pack([place.array for place in places], root, ranks)
        if ranks.rank != root:
            for place in places:
                place.finish(None)
