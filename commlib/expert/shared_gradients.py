"""Gradients of a step beside experts: of weights that all ranks have they are the same, of other experts they are not.

Nobody reduces them for an optimizer that is on its own, and what is clipped by a norm of this rank's experts is scaled
by another factor on each. Who reduces the gradients of experts, too, as if all ranks had the same ones, mixes them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from commlib.communicator import Communicator
from commlib.comparison.whole_weights import tolerance_of, worst_of
from commlib.dtypes import Array
from commlib.errors import MismatchError
from commlib.expert.routing import Routing
from commlib.sharding.shards import Shard

MIXTURES = "mixtures of experts"
"""What a communicator keeps of the mixtures whose experts are divided among its ranks."""
Gradient = tuple[str, Shard | None, float, str]
"""The name of a weight, what it is a part of, the sum of squares of its gradient, and its dtype."""


def has_experts(shards: Iterable[Shard | None]) -> bool:
    """Return whether some of the weights are of experts that other ranks have not."""
    return any(shard is not None and shard.is_local and shard.axis.size > 1 for shard in shards)


def is_even(routing: Routing) -> bool:
    """Return whether all tokens go to all experts by one gate: then experts that are alike have the same gradients."""
    gates, counts = routing.gates, routing.counts
    if counts.min() != counts.max() or (gates.size and gates.min() != gates.max()):
        return False
    each = np.diff(routing.starts)
    return bool(((each == 0) | (each == len(counts))).all())  # padding has none


def check_step(what: str, gradients: Sequence[Gradient], warned: set[str], prints: Sequence[float] = ()) -> None:
    """Compare the gradients of a step among ranks with other experts, and with copies of them.

    One small message each. what: the step. warned: the names of communicators of which this optimizer was warned
    already, once for each. prints: of the values of weights that all ranks have, if these are compared, too. Nothing is
    said of what is not finite. Warns on all ranks that part, and raises MismatchError on all whose experts are mixed.
    """
    for comm, is_axis in _comms(gradients):
        whole = [one for one in gradients if one[1] is None]
        stacks = [one for one in gradients if is_axis and one[1] is not None and one[1].axis.comm is comm]
        apart = float(any(not one.was_even for one in comm.kept.get(MIXTURES, ())))
        own = [apart, *(squares for _, _, squares, _ in (*whole, *stacks)), *prints]
        everyone = comm.all_gather(np.array([own], np.float64))
        if not np.isfinite(everyone).all():
            continue
        are_apart, everyone = everyone[:, 0], everyone[:, 1:]
        squares, of_stacks, values = np.split(everyone, [len(whole), len(whole) + len(stacks)], 1)
        if comm.name not in warned and (
            _look_at_shared(what, comm, whole, squares) or _look_at_values(what, comm, whole, values)
        ):
            warned.add(comm.name)
        if are_apart.any():
            _check_mixed(what, comm, stacks, of_stacks)


def _comms(gradients: Sequence[Gradient]) -> Iterator[tuple[Communicator, bool]]:
    """Yield the ranks that have other experts, and those with copies, each once; whether they are the former."""
    found: dict[int, tuple[Communicator, bool]] = {}
    for _, shard, _, _ in gradients:
        if shard is not None and shard.is_local:
            found.setdefault(id(shard.axis.comm), (shard.axis.comm, True))
            if shard.replicas is not None:
                found.setdefault(id(shard.replicas), (shard.replicas, False))
    yield from (pair for pair in found.values() if pair[0].size > 1)


def _look_at_shared(what: str, comm: Communicator, whole: Sequence[Gradient], squares: Array) -> bool:
    """Warn where ranks part, and return whether they do. Who averages weights, and not gradients, may mean it."""
    if (found := worst_of(squares, [dtype for *_, dtype in whole])) is None:
        return False
    place, low, high = found
    norms = np.sqrt(squares[:, place])
    warnings.warn(
        f"{what} on rank {comm.rank} of {comm.name}: ranks step with different gradients of a weight that all of them "
        f"have beside their experts, and part: that of {whole[place][0]} has norm {norms[low]:.3g} on rank {low} and "
        f"{norms[high]:.3g} on rank {high}. Let a DistributedOptimizer(..., mesh=mesh) reduce gradients (it leaves "
        "those of other experts apart), and clip by the norm of all experts (clip_grad_norm, clip_by_global_norm with "
        "variables=), not by one of this rank's own",
        stacklevel=2,
    )
    return True


def _look_at_values(what: str, comm: Communicator, whole: Sequence[Gradient], prints: Array) -> bool:
    """Warn of a weight that has other values on ranks, and return whether there is one."""
    for (name, _, _, dtype), values in zip(whole, prints.T, strict=False):  # there may be none
        apart = np.abs(values - values[0])
        if apart.max() > tolerance_of(dtype) * np.abs(values).max():
            warnings.warn(
                f"{what} on rank {comm.rank} of {comm.name}: ranks have other values of a weight that all of them have "
                f"beside their experts: {name} differs between rank 0 and rank {int(apart.argmax())}, and goes on to. "
                "Give all ranks one seed, or broadcast (broadcast_parameters, broadcast_variables), before the first "
                "step; expertize takes the values of rank 0",
                stacklevel=2,
            )
            return True
    return False


def _check_mixed(what: str, comm: Communicator, stacks: Sequence[Gradient], squares: Array) -> None:
    """Raise where different experts have one gradient on all ranks: somebody has reduced those, too."""
    if not stacks or not squares.any() or (squares != squares[0]).any():
        return
    raise MismatchError(
        f"{what} on rank {comm.rank} of {comm.name}: gradients of different experts are the same on all ranks, such as "
        f"those of {stacks[int(squares[0].argmax())][0]}: they have been reduced over ranks that have other experts, "
        "which mixes these. Leave the gradients of experts out, which have those of all tokens already, or let a "
        "DistributedOptimizer(..., mesh=mesh) reduce all of them"
    )
