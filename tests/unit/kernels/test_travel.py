"""Travel: places bring rows to their experts in order, and back to their tokens, for all ranks in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.dtypes import Array
from commlib.expert.placement import ExpertPlacement
from commlib.kernels.host.row_exchange import count_moved_rows, order_numbers, take_moved_rows, write_places
from tests.unit.expert.test_exchange import assign, expected_rows


@st.composite
def tables(draw: Any) -> tuple[ExpertPlacement, list[Array]]:
    """Draw owners of experts, in any order, and the experts of each rank's tokens."""
    ranks = draw(st.integers(1, 4))
    experts = ranks + draw(st.integers(0, 3))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    owners = random.permutation(np.arange(experts) % ranks)
    chosen = [random.random((draw(st.sampled_from([0, 1, 9])), experts)) < 0.4 for _ in range(ranks)]
    return ExpertPlacement(tuple(owners.tolist()), ranks), chosen


def rows_at(places: Array, here: Array, there: Array) -> Array:
    return np.array([here[~place] if place < 0 else there[place] for place in places.tolist()], here.dtype)


@settings(deadline=None, max_examples=100)
@given(tables())
def test_rows_return_to_their_tokens(drawn: tuple[ExpertPlacement, list[Array]]) -> None:
    placement, chosen = drawn
    ranks, counts = range(placement.ranks), np.array([each.sum(0) for each in chosen], np.int64)
    owners, order = np.array(placement.owners, np.int32), np.array(placement.order, np.int32)
    assigned = [assign(each) for each in chosen]
    tokens = [np.arange(len(each)) + 100 * rank for rank, each in enumerate(chosen)]
    numbers = [np.arange(len(each.tokens), dtype=np.float32) + 100 * rank for rank, each in enumerate(assigned)]
    sends, takes = np.empty((2, len(ranks), len(ranks)), np.int64)
    parts, counts_ = [], []
    for rank in ranks:
        count_moved_rows(counts, owners, rank, sends[rank], takes[rank])
        going, coming, number = sends[rank].sum(), takes[rank].sum(), len(assigned[rank].tokens)
        local = counts[:, list(placement.of_rank(rank))].sum()
        buffers = [np.empty(n, np.int32) for n in (going, local, coming, number, number)]
        write_places(counts, order, owners, rank, assigned[rank].tokens, assigned[rank].slots, *buffers)
        parts.append(buffers)
        counts_.append(np.empty(going, np.float32))
        take_moved_rows(counts, order, owners, rank, numbers[rank], counts_[rank])
    np.testing.assert_array_equal(sends, takes.T)
    assert not sends.diagonal().any()

    def moved(messages: list[Array], lengths: Array) -> list[Array]:
        """Return the messages that each rank receives; `lengths` are those of their parts."""
        cut = [np.split(one, np.cumsum(each)[:-1]) for one, each in zip(messages, lengths, strict=True)]
        return [np.concatenate([cut[source][rank] for source in ranks]) for rank in ranks]

    nothing = np.empty(0, np.int64)
    received = moved([rows_at(parts[rank][0], tokens[rank], nothing) for rank in ranks], sends)
    rows = [rows_at(parts[rank][1], tokens[rank], received[rank]) for rank in ranks]
    received_counts = moved(counts_, sends)
    gates = [np.empty(len(each), np.float32) for each in rows]
    for rank in ranks:
        np.testing.assert_array_equal(rows[rank], expected_rows(chosen, tokens, placement, rank, None))
        order_numbers(parts[rank][3], parts[rank][2], numbers[rank], received_counts[rank], gates[rank])
    back = moved([rows_at(parts[rank][2], rows[rank], nothing) for rank in ranks], takes)
    numbers_back = moved([rows_at(parts[rank][2], gates[rank], nothing) for rank in ranks], takes)
    for rank in ranks:
        positions, members = parts[rank][3:]
        np.testing.assert_array_equal(rows_at(positions, rows[rank], back[rank]), tokens[rank][assigned[rank].tokens])
        np.testing.assert_array_equal(rows_at(positions, gates[rank], numbers_back[rank]), numbers[rank])
        np.testing.assert_array_equal(members, positions[assigned[rank].slots])
