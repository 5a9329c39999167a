"""Steps of a node as exchanges: what each rank sends and takes, and copies within a rank."""

from __future__ import annotations

import numpy as np

from commlib.buffers.views import address_of
from commlib.collectives.host.node_exchanges import LocalCopy, copies_of, group_transfers, make_exchanges
from commlib.node.collective import NOTHING
from commlib.schedule.hierarchy import hierarchical_program


def test_a_part_for_all_ranks_is_published_once() -> None:
    pairs = {(0, 1): [(8, 0, 4)], (0, 2): [(8, 16, 4)]}
    (giver,) = make_exchanges(pairs, 0, 3, reduce=False, nbytes=None)
    assert (giver.sends, giver.takes, giver.longest) == ([(8, 4)], [NOTHING] * 3, 4)
    (taker,) = make_exchanges(pairs, 2, 3, reduce=False, nbytes=64)
    assert (taker.sends, taker.takes) == ([NOTHING], [(16, 4), NOTHING, NOTHING])
    assert (taker.offsets, taker.nbytes) == ([8, 0, 0], 64)


def test_all_ranks_make_as_many_exchanges_as_the_one_with_the_most_runs() -> None:
    pairs = {(0, 1): [(0, 0, 4), (8, 8, 4)], (1, 0): [(0, 0, 2)]}
    for place in (0, 1):
        first, second = make_exchanges(pairs, place, 2, reduce=False, nbytes=None)
        assert (first.longest, second.longest) == (4, 4)
    assert second.sends == [NOTHING, NOTHING]


def test_operands_of_a_reduction_arrive_in_one_place() -> None:
    pairs = {(giver, taker): [(4 * taker, 0, 4)] for giver in (0, 1) for taker in (0, 1)}
    (exchange,) = make_exchanges(pairs, 1, 2, reduce=True, nbytes=8)
    assert exchange.sends == [(0, 4), (4, 4)]
    assert (exchange.takes, exchange.offsets) == ([(0, 4)] * 2, [4, 4])


def test_what_is_in_place_is_not_moved() -> None:
    gather = hierarchical_program("all_reduce", ((0, 1), (2, 3)), 2, 0).after[0]
    runs = [(8 * (each.target.span.start), 8 * each.target.span.start, 8) for each in gather.transfers]
    (pairs,) = group_transfers(gather, runs, (0, 1), {"incoming": "target"}).values()
    assert pairs == {(0, 1): [(0, 0, 8)], (1, 0): [(8, 8, 8)]}
    assert len(group_transfers(gather, runs, (0, 1), {})["incoming", "target"]) == 4


def test_copies_stay_within_a_rank() -> None:
    source, target = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    assert copies_of({(0, 1): [(0, 0, 8)]}, 0) == LocalCopy([])
    copies_of({(1, 1): [(0, 4, 2), (6, 0, 0), (6, 0, 2)]}, 1).run_at(address_of(source), address_of(target))
    assert target.tolist() == [6, 7, 0, 0, 0, 1, 0, 0]
