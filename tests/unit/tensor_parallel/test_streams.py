"""Seeds: the same along some axes of a mesh, different along the others."""

from __future__ import annotations

from itertools import product

from commlib.tensor_parallel.streams import fold, seed_at


def test_seeds_differ_along_all_axes_but_tp() -> None:
    places = [dict(zip(("pp", "dp", "cp", "tp"), place, strict=True)) for place in product(range(3), repeat=4)]
    seeds = {tuple(place.items()): seed_at(7, place) for place in places}
    assert len(set(seeds.values())) == 27
    for place in places:
        assert seeds[tuple(place.items())] == seeds[tuple({**place, "tp": 0}.items())]


def test_the_first_rank_has_the_original_seed() -> None:
    assert seed_at(7, {"dp": 0, "tp": 1}) == 7


def test_folded_seeds_differ_and_are_not_negative() -> None:
    folded = {fold(seed, place) for seed in range(100) for place in range(100)}
    assert len(folded) == 10_000
    assert all(0 <= seed < 2**63 for seed in folded)
