"""Moving experts between ranks: send their rows of stacked arrays from the old owner to the new one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.expert.mixture import Mixture
from commlib.expert.placement import ExpertPlacement


def rebalance(
    mixtures: Sequence[Mixture], least: float, move: Callable[[int, ExpertPlacement], None]
) -> dict[str, tuple[float, float]]:
    """Move the experts of mixtures whose busiest rank's load falls by the factor `least`. Collective.

    move: moves the experts of the mixture with this number to a placement. Returns, by name, the ratio of the busiest
    rank's load to the mean, before and after.
    """
    changes: dict[str, tuple[float, float]] = {}
    for number, mixture in enumerate(mixtures):
        placement, before, after = mixture.better_placement(least)
        if placement == mixture.placement:
            after = before
        else:
            move(number, placement)
        changes[mixture.name_among(changes)] = before, after
    return changes


def no_copy(model: str, mixture: str) -> UsageError:
    """Return the error for a model of `copies` that has no copy of a mixture. model: its name or class."""
    return UsageError(
        f"rebalance_experts: {model}, one of copies=, has no mixture like {mixture} whose experts are on the same "
        "ranks: pass models that were made and moved in the same way from the start"
    )


def move_experts(
    arrays: Sequence[Array], old: ExpertPlacement, new: ExpertPlacement, comm: Communicator
) -> list[Array]:
    """Return the stacks [experts of this rank, ...] for the new placement. Collective.

    All ranks pass the same number of arrays, with the same dtypes and shapes except for the number of experts. Each
    rank sends one message to each rank that takes over experts from it.
    """
    rank = comm.rank
    here, then = old.of_rank(rank), new.of_rank(rank)
    leaving = [[e for e in here if new.owners[e] == peer and peer != rank] for peer in range(comm.size)]
    coming = [[e for e in then if old.owners[e] == peer and peer != rank] for peer in range(comm.size)]
    nbytes = sum(array[:1].nbytes if len(array) else 0 for array in arrays)
    rows = [_bytes(arrays, here.index(expert)) for experts in leaving for expert in experts]
    message = np.concatenate(rows) if rows else np.empty(0, np.uint8)
    sends, takes = ([len(experts) * nbytes for experts in each] for each in (leaving, coming))
    received, _ = comm.all_to_all_v(message, sends, takes=takes)
    order = [expert for experts in coming for expert in experts]
    stacks = []
    at = 0
    for array in arrays:
        stack = np.empty((len(then), *array.shape[1:]), array.dtype)
        length = array[:1].nbytes
        for place, expert in enumerate(then):
            if expert in order:
                first = order.index(expert) * nbytes + at
                stack[place : place + 1].reshape(-1).view(np.uint8)[:] = received[first : first + length]
            else:
                stack[place] = array[here.index(expert)]
        at += length
        stacks.append(stack)
    return stacks


def _bytes(arrays: Sequence[Array], place: int) -> Array:
    return np.concatenate([np.ascontiguousarray(array[place]).reshape(-1).view(np.uint8) for array in arrays])
