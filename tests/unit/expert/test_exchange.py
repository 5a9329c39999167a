"""Exchange: rows reach their experts in order, sums return to their tokens, by every path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.communicator import Communicator
from commlib.dtypes import Array, numpy_dtype
from commlib.expert.dispatcher import Dispatcher
from commlib.expert.hierarchical_dispatcher import HierarchicalDispatcher
from commlib.expert.local_dispatcher import LocalDispatcher
from commlib.expert.message_dispatcher import MessageDispatcher
from commlib.expert.placement import ExpertPlacement
from commlib.expert.shared_memory_dispatcher import SharedMemoryDispatcher
from tests.bodies.loopback import run


@dataclass
class Assignment:
    """Some experts for each token."""

    tokens: Array
    counts: Array
    starts: Array
    slots: Array


def assign(chosen: Array) -> Assignment:
    """Return the assignment of a table [tokens, experts] of bool."""
    experts, tokens = np.nonzero(chosen.T)
    numbers = np.zeros(chosen.shape, np.int32)
    numbers[tokens, experts] = np.arange(len(tokens))
    starts = np.cumsum([0, *chosen.sum(1)])
    return Assignment(
        tokens.astype(np.int32),
        chosen.sum(0).astype(np.int64),
        starts.astype(np.int32),
        numbers[chosen].astype(np.int32),
    )


def expected_rows(
    chosen: list[Array], xs: list[Array], placement: ExpertPlacement, rank: int, nodes: list[int] | None
) -> Array:
    """Return the rows that a rank must get: expert by expert, rank by rank, token by token.

    nodes: those of the ranks. Ranks are then ordered by their places in the nodes.
    """
    places = nodes and [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    order = sorted(range(len(xs)), key=lambda rank: (places[rank] if places else 0, rank))
    return np.concatenate([xs[one][chosen[one][:, expert]] for expert in placement.of_rank(rank) for one in order])


Make = Callable[[Communicator, ExpertPlacement], Dispatcher]
WAYS: dict[str, Make] = {
    "node": lambda comm, placement: SharedMemoryDispatcher(comm, placement),
    "messages": lambda comm, placement: MessageDispatcher(comm, placement),
    "hierarchical": lambda comm, placement: HierarchicalDispatcher(comm, placement),
}


def check(way: Make, ranks: int, chosen: list[list[Array]], width: int, dtype: str, nodes: list[int] | None) -> None:
    """Send several layers' tokens there and back, forward and backward, the last one's backward first."""
    kind = numpy_dtype(dtype)
    experts = chosen[0][0].shape[1]
    placement = ExpertPlacement.even(experts, ranks)
    draw = np.random.default_rng(0)
    # Small integers: sums are exact in every dtype.
    xs = [[draw.integers(-4, 5, (len(one), width)).astype(kind) for one in layer] for layer in chosen]
    gates = [[draw.integers(1, 4, int(one.sum())).astype(np.float32) for one in layer] for layer in chosen]

    def rank_main(comm: Communicator) -> None:
        me = comm.rank
        exchange = way(comm, placement) if ranks > 1 else LocalDispatcher(placement)
        plans: list[Any] = []
        for number, layer in enumerate(chosen):
            assigned, x = assign(layer[me]), xs[number][me]
            plan, rows, received, counts = exchange.dispatch(f"layer {number}", assigned, x, gates[number][me])
            np.testing.assert_array_equal(rows, expected_rows(layer, xs[number], placement, me, nodes))
            mine = placement.of_rank(me)
            np.testing.assert_array_equal(counts, [sum(int(one[:, expert].sum()) for one in layer) for expert in mine])
            sums = exchange.combine(f"layer {number}", plan, rows, received)
            weights = np.zeros(layer[me].shape)
            weights.T[layer[me].T] = gates[number][me]
            np.testing.assert_array_equal(sums, (x.astype(np.float64) * weights.sum(1)[:, None]).astype(kind))
            plans.append((plan, rows, received))
        for number in reversed(range(len(chosen))):
            plan, rows, received = plans.pop()
            layer, x = chosen[number], xs[number][me]
            np.testing.assert_array_equal(
                rows, expected_rows(layer, xs[number], placement, me, nodes)
            )  # nothing was written there
            again = exchange.combine_back(f"layer {number}", plan, x)
            np.testing.assert_array_equal(again, rows)
            sums, numbers = exchange.dispatch_back(f"layer {number}", plan, again, received * 2)
            np.testing.assert_array_equal(numbers, gates[number][me] * 2)
            np.testing.assert_array_equal(sums, (x.astype(np.float64) * layer[me].sum(1)[:, None]).astype(kind))

    run(ranks, rank_main, nodes=nodes)


@st.composite
def tables(draw: Any, ranks: int, layers: int) -> list[list[Array]]:
    experts = draw(st.integers(ranks, ranks + 3))
    seed, density = draw(st.integers(0, 1000)), draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))
    lengths = draw(st.lists(st.sampled_from([0, 1, 3, 17]), min_size=ranks, max_size=ranks))
    random = np.random.default_rng(seed)
    assigned_tables = [[random.random((length, experts)) < density for length in lengths] for _ in range(layers)]
    if draw(st.booleans()):
        for one in assigned_tables[0]:
            one[:, 0] = False  # an expert without tokens
    return assigned_tables


@pytest.mark.parametrize(
    ("way", "ranks"),
    [("node", 1), ("node", 2), ("node", 3), ("messages", 2), ("messages", 3), ("hierarchical", 4)],
)
def test_rows_return_to_their_tokens(way: str, ranks: int) -> None:
    @settings(max_examples=20, deadline=None)
    @given(tables(ranks, 3), st.sampled_from([1, 5, 64]), st.sampled_from(["float32", "bfloat16", "float64"]))
    def round_trip(chosen: list[list[Array]], width: int, dtype: str) -> None:
        check(WAYS[way], ranks, chosen, width, dtype, [0, 0, 1, 1] if way == "hierarchical" else None)

    round_trip()


def test_regions_are_reused() -> None:
    """Memory is bounded by concurrent use."""

    def rank_main(comm: Communicator) -> int:
        exchange = SharedMemoryDispatcher(comm, ExpertPlacement.even(4, 2))
        for step in range(100):
            chosen = np.random.default_rng(step).random((50, 4)) < 0.5
            assigned = assign(chosen)
            x = np.ones((50, 8), np.float32)
            plan, rows, gates, _ = exchange.dispatch("a", assigned, x, np.ones(len(assigned.tokens), np.float32))
            exchange.combine("a", plan, rows, gates)
            of_rows = exchange.combine_back("a", plan, x)
            exchange.dispatch_back("a", plan, of_rows, gates)
            del rows, gates, of_rows
        return exchange.regions.nbytes

    largest = 2 * 2 * 50 * (8 + 1) * 4  # every token to both experts of a rank
    for memories in run(2, rank_main):
        assert memories < 8 * largest
