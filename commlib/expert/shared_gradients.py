"""Gradient checks with experts: shared weights need equal gradients on all ranks, experts need their own.

An optimizer that runs on one rank does not reduce them, and clipping by the norm of this rank's experts scales each
rank's gradients by a different factor. Reducing the gradients of experts as if all ranks had the same ones mixes them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from commlib.communicator import Communicator
from commlib.comparison.gradient_comparison import tolerance_of, worst_of
from commlib.dtypes import Array
from commlib.errors import MismatchError
from commlib.expert.routing import Routing
from commlib.sharding.shards import Shard

MIXTURES = "mixtures of experts"
"""Key under which a communicator keeps the mixtures whose experts are sharded among its ranks."""
Gradient = tuple[str, Shard | None, float, str]
"""The name of a weight, its shard, the sum of squares of its gradient, and its dtype."""


def has_experts(shards: Iterable[Shard | None]) -> bool:
    """Return whether some of the weights belong to experts that other ranks do not have."""
    return any(shard is not None and shard.is_local and shard.axis.size > 1 for shard in shards)


def is_even(routing: Routing) -> bool:
    """Return whether all tokens go to all experts with equal gates: then equal experts have the same gradients."""
    gates, counts = routing.gates, routing.counts
    if counts.min() != counts.max() or (gates.size and gates.min() != gates.max()):
        return False
    each = np.diff(routing.starts)
    return bool(((each == 0) | (each == len(counts))).all())  # padding has no experts


def check_step(what: str, gradients: Sequence[Gradient], warned: set[str], prints: Sequence[float] = ()) -> None:
    """Compare the gradients of a step among ranks with other experts, and among replicas of experts.

    One small message each. what: the step. warned: names of the communicators for which this optimizer has warned; each
    is warned of once. prints: fingerprints of the values of shared weights, if these are compared, too. Values that are
    not finite are not compared. Warns on all ranks that differ, and raises MismatchError on all whose experts are
    mixed.
    """
    for comm, is_axis in _comms(gradients):
        whole = [one for one in gradients if one[1] is None]
        stacks = [one for one in gradients if is_axis and one[1] is not None and one[1].axis.comm is comm]
        uneven = float(any(not one.was_even for one in comm.cached.get(MIXTURES, ())))
        own = [uneven, *(squares for _, _, squares, _ in (*whole, *stacks)), *prints]
        everyone = comm.all_gather(np.array([own], np.float64))
        if not np.isfinite(everyone).all():
            continue
        uneven_ranks, everyone = everyone[:, 0], everyone[:, 1:]
        squares, of_stacks, values = np.split(everyone, [len(whole), len(whole) + len(stacks)], 1)
        if comm.name not in warned and (
            _compare_gradients(what, comm, whole, squares) or _compare_values(what, comm, whole, values)
        ):
            warned.add(comm.name)
        if uneven_ranks.any():
            _check_mixed(what, comm, stacks, of_stacks)


def _comms(gradients: Sequence[Gradient]) -> Iterator[tuple[Communicator, bool]]:
    """Yield the communicators of expert axes (True) and of replicas (False), each once."""
    comms: dict[int, tuple[Communicator, bool]] = {}
    for _, shard, _, _ in gradients:
        if shard is not None and shard.is_local:
            comms.setdefault(id(shard.axis.comm), (shard.axis.comm, True))
            if shard.replicas is not None:
                comms.setdefault(id(shard.replicas), (shard.replicas, False))
    yield from (pair for pair in comms.values() if pair[0].size > 1)


def _compare_gradients(what: str, comm: Communicator, whole: Sequence[Gradient], squares: Array) -> bool:
    """Warn if gradients of a shared weight differ, and return whether they do. Averaging weights may be intended."""
    if (worst := worst_of(squares, [dtype for *_, dtype in whole])) is None:
        return False
    place, low, high = worst
    norms = np.sqrt(squares[:, place])
    warnings.warn(
        f"{what} on rank {comm.rank} of {comm.name}: ranks step with different gradients of a weight that they share "
        f"outside their experts, so its values diverge: the gradient of {whole[place][0]} has norm {norms[low]:.3g} "
        f"on rank {low} and {norms[high]:.3g} on rank {high}. Let a DistributedOptimizer(..., mesh=mesh) reduce "
        "gradients (it does not mix those of different experts), and clip by the norm of all experts "
        "(clip_grad_norm, clip_by_global_norm with variables=), not by the norm of this rank's experts",
        stacklevel=2,
    )
    return True


def _compare_values(what: str, comm: Communicator, whole: Sequence[Gradient], prints: Array) -> bool:
    """Warn of a shared weight with different values on ranks, and return whether there is one."""
    for (name, _, _, dtype), values in zip(whole, prints.T, strict=False):  # may be empty
        differences = np.abs(values - values[0])
        if differences.max() > tolerance_of(dtype) * np.abs(values).max():
            warnings.warn(
                f"{what} on rank {comm.rank} of {comm.name}: ranks have different values of a weight that they share "
                f"outside their experts: {name} differs between rank 0 and rank {int(differences.argmax())}, and stays "
                "so. Give all ranks one seed, or broadcast (broadcast_parameters, broadcast_variables), before the "
                "first step; expertize takes the values of rank 0",
                stacklevel=2,
            )
            return True
    return False


def _check_mixed(what: str, comm: Communicator, stacks: Sequence[Gradient], squares: Array) -> None:
    """Raise if different experts have the same gradient on all ranks: it has been reduced over ranks by mistake."""
    if not stacks or not squares.any() or (squares != squares[0]).any():
        return
    raise MismatchError(
        f"{what} on rank {comm.rank} of {comm.name}: gradients of different experts are the same on all ranks, such as "
        f"those of {stacks[int(squares[0].argmax())][0]}: they have been reduced over ranks with other experts, "
        "which mixes them. Do not reduce the gradients of experts, which include all tokens already, or let a "
        "DistributedOptimizer(..., mesh=mesh) reduce all gradients"
    )
