"""Planner: which experts change places, so that ranks have equal loads. [pure]

Two experts of two ranks are exchanged, as often as that makes the busiest rank less busy: every rank keeps as many
experts as it has, and few of them move. Source: the expert swaps that users of large mixtures ask for; see also LPT
scheduling (Graham 1969).
"""

from __future__ import annotations

from collections.abc import Sequence

from commlib.expert.placement import Placement

_ROUNDING = 1e-9
"""Sums of shares depend on their order by less."""


def imbalance(load: Sequence[float], placement: Placement) -> float:
    """Return the load of the busiest rank by the mean one: 1 is even. load: of each expert."""
    of_ranks = _of_ranks(load, placement.owners, placement.ranks)
    mean = sum(of_ranks) / len(of_ranks)
    return max(of_ranks) / mean if mean else 1.0


def plan(load: Sequence[float], placement: Placement) -> Placement:
    """Return where experts had better be, given how often each was chosen."""
    owners = list(placement.owners)
    while (swap := _best_swap(load, owners, placement.ranks)) is not None:
        one, other = swap
        owners[one], owners[other] = owners[other], owners[one]
    return Placement(tuple(owners), placement.ranks)


def _best_swap(load: Sequence[float], owners: Sequence[int], ranks: int) -> tuple[int, int] | None:
    """Return the two experts whose exchange relieves the busiest rank most, or None."""
    of_ranks = _of_ranks(load, owners, ranks)
    busiest = max(range(ranks), key=lambda rank: of_ranks[rank])
    best, found = of_ranks[busiest], None
    for one, owner in enumerate(owners):
        if owner != busiest:
            continue
        for other, peer in enumerate(owners):
            moved = load[one] - load[other]
            if peer == busiest or moved <= 0:
                continue
            worst = max(of_ranks[busiest] - moved, of_ranks[peer] + moved)
            if worst < best * (1 - _ROUNDING):  # or two experts would change places for ever
                best, found = worst, (one, other)
    return found


def _of_ranks(load: Sequence[float], owners: Sequence[int], ranks: int) -> list[float]:
    found = [0.0] * ranks
    for share, owner in zip(load, owners, strict=True):
        found[owner] += share
    return found
