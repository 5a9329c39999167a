"""Tied weights: find the weights shared by stages on several ranks, and make communicators of their owners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from commlib.communicator import Communicator


def find_shared(
    comm: Communicator, weights: Sequence[Iterable[Any]], placement: Sequence[int]
) -> list[tuple[Any, Communicator | None]]:
    """Return all weights that several ranks have, with the communicator of their owners; None on other ranks.

    weights: of each stage; a shared weight is the same object in all its stages. placement: the rank of each stage.
    Collective, with the same model on all ranks.
    """
    shared = find_owners(weights, placement)
    groups = list(dict.fromkeys(ranks for _, ranks in shared))
    requests = [(0 if comm.rank in ranks else -1, 0, f"{comm.name}.tied") for ranks in groups]
    subgroups = dict(zip(groups, comm.split_all(requests) if requests else [], strict=True))
    return [(weight, subgroups[ranks]) for weight, ranks in shared]


def find_owners(values: Sequence[Iterable[Any]], placement: Sequence[int]) -> list[tuple[Any, tuple[int, ...]]]:
    """Return the values that stages on several ranks have, with these ranks."""
    owners: dict[int, tuple[Any, list[int]]] = {}
    for own, rank in zip(values, placement, strict=True):
        for value in own:
            ranks = owners.setdefault(id(value), (value, []))[1]
            if rank not in ranks:
                ranks.append(rank)
    return [(value, tuple(sorted(ranks))) for value, ranks in owners.values() if len(ranks) > 1]
