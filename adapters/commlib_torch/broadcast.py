"""Give every rank the parameters and the optimizer state of one of them: after start-up, or after a restart.

With `comm=` in order, among that group's ranks; without it by name, so it fits in between other operations by name, and
`root_rank` is a number among all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from commlib.communicator import Communicator
from commlib.data_parallel import check_agreement
from commlib.errors import UsageError
from commlib.horovod.broadcast import NamedRanks, Ranks, broadcast_pack, named, packs
from commlib.horovod.nested import put_back, take_out
from commlib.horovod.process_sets import process_set_of
from commlib.sharding.same_parts import same_parts
from commlib.sharding.shards import Shard, check_apart, world_ranks
from commlib.tensor_verbs import check_ordered, choose_root
from commlib_torch._bridge import array_of, check_dense, on_host
from commlib_torch._call import InPlace
from commlib_torch._shards import shard_of
from commlib_torch.horovod._start import ProcessSets

Parameters = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Tensor]


def broadcast_parameters(
    params: Parameters,
    root_rank: int | None = None,
    process_set: ProcessSets = None,
    *,
    root: int | None = None,
    comm: Communicator | None = None,
) -> None:
    """Overwrite tensors on every rank by those of `root_rank`, in place. Collective.

    `params` is `model.state_dict()`, `model.named_parameters()`, or an iterable of tensors; any shapes and dtypes.
    Experts are not the same on all ranks: they are made equal among those ranks alone that have the same ones. So are
    parameters that are divided along an axis of a mesh, and all that come with them: with the values of the rank that
    is where `root_rank` is along the other axes.
    Raises MismatchError on every rank if ranks give different names, shapes or dtypes; UsageError for what is no
    tensor, and for divided parameters of which some of the ranks have other parts.
    """
    ranks, source = _ranks("broadcast_parameters", root_rank, root, process_set, comm)
    pairs = named(params)
    for name, tensor in pairs:
        if not isinstance(tensor, Tensor):
            raise UsageError(f"{name} is no tensor but a {type(tensor).__name__}: use broadcast_object for it")
        try:
            check_dense(tensor)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error
    shards = [(name, shard_of(tensor)) for name, tensor in pairs]
    ranks, source = _apart("broadcast_parameters", shards, ranks, source, process_set, comm)
    lines = [f"{name}: {tensor.dtype}{list(tensor.shape)}" for name, tensor in pairs]
    check_agreement(ranks, "tensors to broadcast", [f"root {source}", *lines])
    _broadcast_tensors([tensor for _, tensor in pairs if not _is_local(tensor)], source, ranks)
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
    comm: Communicator | None = None,
) -> None:
    """Give every rank the state and the hyperparameters of the optimizer of `root_rank`. Collective.

    Works whether or not an optimizer has stepped yet: ranks without state take the root's, and if it has none all end
    up without. No step is run, so `model`, which Horovod wants for some optimizers, is not used. Of experts, which are
    not the same on all ranks, each rank keeps the state that it has; see `gather_optimizer_state`. Raises MismatchError
    on every rank if parameter groups differ.
    """
    own = {
        parameter: dict(optimizer.state[parameter]) if parameter in optimizer.state else None
        for group in optimizer.param_groups
        for parameter in group["params"]
        if _is_local(parameter)
    }
    ranks, source = _ranks("broadcast_optimizer_state", root_rank, root, process_set, comm)
    shards = [
        (f"parameter {place} of group {number}", shard_of(one))
        for number, group in enumerate(optimizer.param_groups)
        for place, one in enumerate(group["params"])
    ]
    ranks, source = _apart("broadcast_optimizer_state", shards, ranks, source, process_set, comm)
    groups = [str([str(list(p.shape)) for p in group["params"]]) for group in optimizer.param_groups]
    check_agreement(ranks, "optimizer parameter groups", [f"root {source}", *groups])
    structure, tensors = take_out(optimizer.state_dict() if ranks.rank == source else None, Tensor)
    tensors = [on_host(tensor) for tensor in tensors]
    kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    structure, kinds = ranks.broadcast_object((structure, kinds), source)
    if ranks.rank != source:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
    _broadcast_tensors(tensors, source, ranks)
    # The root loads its own state too: what loading does to it (casts, say) must happen on every rank.
    optimizer.load_state_dict(put_back(structure, tensors))
    for parameter, state in own.items():
        if state is not None:
            optimizer.state[parameter] = state
        elif optimizer.state.pop(parameter, None):
            warnings.warn(
                "broadcast_optimizer_state: the root has state of experts that this rank has not: it begins anew here. "
                "Load what gather_optimizer_state returned on every rank instead",
                stacklevel=2,
            )


def _is_local(tensor: Tensor) -> bool:
    shard = shard_of(tensor)
    return shard is not None and shard.is_local


def _ranks(
    what: str, root_rank: int | None, root: int | None, process_set: ProcessSets, comm: Communicator | None
) -> tuple[Ranks, int]:
    source = choose_root(root_rank, root)
    if comm is None:
        return NamedRanks(what, process_set), source
    check_ordered(None, process_set)
    return comm, source


def _apart(
    what: str,
    shards: Sequence[tuple[str, Shard | None]],
    ranks: Ranks,
    source: int,
    process_set: ProcessSets,
    comm: Communicator | None,
) -> tuple[Ranks, int]:
    """Return the ranks with the same parts, and the root among them, if nobody has said which. Raises UsageError."""
    if comm is None and process_set is None and (found := same_parts(what, shards, ranks)) is not None:
        ranks, source, comm = found.comm, found.root(source), found.comm
    everyone = process_set_of(process_set).ranks or () if comm is None else world_ranks(comm)
    check_apart(what, shards, everyone)
    return ranks, source


def _broadcast_tensors(tensors: Sequence[Tensor], root: int, ranks: Ranks) -> None:
    """Broadcast tensors that have the same shapes and dtypes on every rank, many small ones at a time."""
    if ranks.size == 1:
        return
    for pack in packs(tensor.numel() * tensor.element_size() for tensor in tensors):
        places = [InPlace(tensors[number], on_host, array_of) for number in pack]
        broadcast_pack([place.array for place in places], root, ranks)
        if ranks.rank != root:
            for place in places:
                place.finish(None)
