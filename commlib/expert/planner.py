"""Planner: swap experts between ranks until loads are balanced. [pure]

Two experts of two ranks are swapped as long as a swap relieves the busiest rank. Every rank keeps its number of
experts, and few experts move. Source: the expert swaps that users of large mixtures request; see also LPT scheduling
(Graham 1969).
"""

from __future__ import annotations

from collections.abc import Sequence

from commlib.expert.placement import ExpertPlacement

_ROUNDING = 1e-9
"""Relative rounding error of sums of shares, which depends on their order."""


def imbalance(load: Sequence[float], placement: ExpertPlacement) -> float:
    """Return the load of the busiest rank divided by the mean; 1 is even. load: of each expert."""
    of_ranks = _rank_loads(load, placement.owners, placement.ranks)
    mean = sum(of_ranks) / len(of_ranks)
    return max(of_ranks) / mean if mean else 1.0


def plan(load: Sequence[float], placement: ExpertPlacement) -> ExpertPlacement:
    """Return a better placement of experts. load: how often each was chosen."""
    owners = list(placement.owners)
    while (swap := _best_swap(load, owners, placement.ranks)) is not None:
        one, other = swap
        owners[one], owners[other] = owners[other], owners[one]
    return ExpertPlacement(tuple(owners), placement.ranks)


def _best_swap(load: Sequence[float], owners: Sequence[int], ranks: int) -> tuple[int, int] | None:
    """Return the two experts whose swap relieves the busiest rank most, or None."""
    of_ranks = _rank_loads(load, owners, ranks)
    busiest = max(range(ranks), key=lambda rank: of_ranks[rank])
    best, swap = of_ranks[busiest], None
    for one, owner in enumerate(owners):
        if owner != busiest:
            continue
        for other, peer in enumerate(owners):
            moved = load[one] - load[other]
            if peer == busiest or moved <= 0:
                continue
            worst = max(of_ranks[busiest] - moved, of_ranks[peer] + moved)
            if worst < best * (1 - _ROUNDING):  # otherwise two experts could be swapped forever
                best, swap = worst, (one, other)
    return swap


def _rank_loads(load: Sequence[float], owners: Sequence[int], ranks: int) -> list[float]:
    loads = [0.0] * ranks
    for share, owner in zip(load, owners, strict=True):
        loads[owner] += share
    return loads
