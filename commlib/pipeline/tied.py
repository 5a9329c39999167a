"""Tied: find the weights that stages on several ranks share, and communicators of the ranks that have each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from commlib.communicator import Communicator


def find_tied(
    comm: Communicator, weights: Sequence[Iterable[Any]], placement: Sequence[int]
) -> tuple[list[tuple[Any, Communicator]], bool]:
    """Return this rank's weights that other ranks have, too, each with the communicator of its owners; and if any is.

    weights: of each stage, a shared one the same object in all of them; placement: the rank of each stage. Collective,
    with the same model on all ranks.
    """
    owners: dict[int, tuple[Any, list[int]]] = {}
    for own, rank in zip(weights, placement, strict=True):
        for weight in own:
            ranks = owners.setdefault(id(weight), (weight, []))[1]
            if rank not in ranks:
                ranks.append(rank)
    shared = [(weight, tuple(sorted(ranks))) for weight, ranks in owners.values() if len(ranks) > 1]
    groups = list(dict.fromkeys(ranks for _, ranks in shared))
    requests = [(0 if comm.rank in ranks else -1, 0, f"{comm.name}.tied") for ranks in groups]
    made = dict(zip(groups, comm.split_all(requests) if requests else [], strict=True))
    return [(weight, group) for weight, ranks in shared if (group := made[ranks]) is not None], bool(shared)
