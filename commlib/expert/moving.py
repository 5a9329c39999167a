"""Moving experts between ranks: send their rows of stacked arrays from the old owner to the new one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.expert.placement import ExpertPlacement


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
    sent = np.concatenate(rows) if rows else np.empty(0, np.uint8)
    sends, takes = ([len(experts) * nbytes for experts in each] for each in (leaving, coming))
    came, _ = comm.all_to_all_v(sent, sends, takes=takes)
    order = [expert for experts in coming for expert in experts]
    found = []
    at = 0
    for array in arrays:
        stack = np.empty((len(then), *array.shape[1:]), array.dtype)
        length = array[:1].nbytes
        for place, expert in enumerate(then):
            if expert in order:
                first = order.index(expert) * nbytes + at
                stack[place : place + 1].reshape(-1).view(np.uint8)[:] = came[first : first + length]
            else:
                stack[place] = array[here.index(expert)]
        at += length
        found.append(stack)
    return found


def _bytes(arrays: Sequence[Array], place: int) -> Array:
    return np.concatenate([np.ascontiguousarray(array[place]).reshape(-1).view(np.uint8) for array in arrays])
