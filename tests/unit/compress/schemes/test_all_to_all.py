"""The quantised all-reduce, with codecs of known losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.compress.codecs.quantise import QSGD, Blocks
from commlib.compress.scheme import BucketPart
from commlib.compress.schemes.all_to_all import AllToAll
from tests.bodies.loopback import run
from tests.unit.compress.known_codecs import Exact, Whole


def values_of(rank: int, count: int) -> Any:
    return (np.arange(count) % 13 - 5 * rank).astype(np.float32)


@settings(max_examples=12, deadline=None)
@given(
    ranks=st.integers(1, 4),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    align=st.sampled_from([1, 8]),
    flags=st.integers(0, 20),
)
def test_a_lossless_codec_gives_the_sum(ranks, counts, align, flags):
    starts = np.cumsum([0, *counts])
    parts = [
        BucketPart(f"p{i}", int(start), (count,)) for i, (start, count) in enumerate(zip(starts, counts, strict=False))
    ]
    total = int(starts[-1])

    def reduce(comm):
        values = values_of(comm.rank, total)
        on = np.array([i % comm.size == comm.rank and i % 3 > 0 for i in range(flags)], np.float32)
        reducer = AllToAll(Exact(align=align)).reducer(comm, parts)
        assert reducer.reduce(values, on)
        return values, on > 0

    expected = sum(values_of(rank, total) for rank in range(ranks))
    for values, on in run(ranks, reduce):
        np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(on, [i % 3 > 0 for i in range(flags)])


def test_workers_and_servers_add_errors_to_the_next_step():
    # 3 ranks x 0.75 each step: with feedback on both sides the sum of 8 steps is off by less than what the residuals
    # hold: below 1 for each of 3 workers and 1 for the server.
    def train(comm):
        reducer = AllToAll(Whole()).reducer(comm, [BucketPart("w", 0, (10,))])
        total = np.zeros(10, np.float32)
        for _ in range(8):
            values = np.full(10, 0.75, np.float32)
            reducer.reduce(values, np.zeros(0, np.float32))
            total += values
        residual = np.zeros(10, np.float32)
        for what in reducer.state()["w"].values():
            residual += what
        return total, residual

    results = run(3, train)
    for total, _ in results:
        np.testing.assert_array_equal(total, results[0][0])
    np.testing.assert_array_equal(results[0][0] + sum(residual for _, residual in results), 3 * 8 * 0.75)
    assert np.all(sum(residual for _, residual in results) < 4)


def test_without_feedback_errors_remain():
    def train(comm):
        reducer = AllToAll(Whole(), feedback=False).reducer(comm, [BucketPart("w", 0, (10,))])
        assert reducer.state() == {}
        values = np.full(10, 0.75, np.float32)
        reducer.reduce(values, np.zeros(0, np.float32))
        return values

    for values in run(3, train):
        assert not values.any()


def test_a_skipped_step_leaves_no_trace():
    def train(comm):
        reducer = AllToAll(Whole()).reducer(comm, [BucketPart("w", 0, (6,))])
        nothing = np.zeros(0, np.float32)
        reducer.reduce(np.full(6, 0.25, np.float32), nothing)
        reducer.commit()
        before = reducer.state()["w"]
        reducer.reduce(np.full(6, 0.5, np.float32), nothing)
        assert not np.array_equal(reducer.state()["w"]["residual"], before["residual"])
        reducer.rollback()
        reducer.rollback()  # once is enough
        after = reducer.state()["w"]
        assert before.keys() == after.keys() == {"residual", "residual_of_sum"}
        for what, array in before.items():
            np.testing.assert_array_equal(after[what], array)

    run(2, train)


@pytest.mark.parametrize("codec", [Blocks(4, rounding="stochastic"), QSGD()])
def test_draws_continue_from_a_state(codec):
    """A reducer with the state of another continues its random rounding."""

    def train(comm):
        def make():
            return AllToAll(codec).reducer(comm, [BucketPart("w", 0, (300,))], key="b")

        first = make()
        for step in range(3):
            first.reduce(values_of(comm.rank + step, 300) / 7, np.zeros(0, np.float32))
            first.commit()
        second, new = make(), make()
        second.load(first.state())
        for step in range(3, 6):
            one, other, third = (values_of(comm.rank + step, 300) / 7 for _ in range(3))
            for reducer, values in ((first, one), (second, other), (new, third)):
                assert reducer.reduce(values, np.zeros(0, np.float32))
            np.testing.assert_array_equal(one, other)
            assert not np.array_equal(one, third)

    run(2, train)


def test_state_is_loaded_into_another_bucket_by_name():
    def train(comm):
        nothing = np.zeros(0, np.float32)
        first = AllToAll(Whole()).reducer(comm, [BucketPart("a", 0, (3, 2)), BucketPart("b", 8, (2,))])
        first.reduce((np.arange(10) / 8).astype(np.float32), nothing)
        state = first.state()
        assert state["a"]["residual"].shape == (3, 2)
        second = AllToAll(Whole()).reducer(
            comm, [BucketPart("b", 0, (2,)), BucketPart("a", 4, (3, 2)), BucketPart("new", 12, (1,))]
        )
        second.load(state)
        again = second.state()
        for name in ("a", "b"):
            np.testing.assert_array_equal(again[name]["residual"], state[name]["residual"])
        assert not again["new"]["residual"].any()

    run(2, train)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_nonfinite_result_is_reported_on_all_ranks(bad):
    def train(comm):
        reducer = AllToAll(Exact()).reducer(comm, [BucketPart("w", 0, (6,))])
        values = np.zeros(6, np.float32)
        values[4] = bad if comm.rank == 1 else 1
        return reducer.reduce(values, np.zeros(1, np.float32))

    assert run(3, train) == [False] * 3


def test_sent_bytes_count_outgoing_data():
    def train(comm):
        reducer = AllToAll(Exact()).reducer(comm, [BucketPart("w", 0, (64,))])
        reducer.reduce(np.zeros(64, np.float32), np.zeros(1, np.float32))
        return reducer.sent_bytes

    # Of 4 chunks of 16 float32 three leave, twice; a flag fills the payload up to the next 64 bytes.
    assert run(4, train) == [2 * 3 * 128] * 4
