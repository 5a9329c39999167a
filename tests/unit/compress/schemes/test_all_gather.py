"""Reductions of sparse payloads over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.compress.codecs.sparse import RandomK, TopK
from commlib.compress.scheme import BucketPart, Scheme
from commlib.compress.schemes.all_gather import AllGather
from tests.bodies.loopback import run
from tests.unit.compress.known_codecs import Exact

NO_FLAGS = np.zeros(0, np.float32)


def placed(counts: list[int], gap: int = 3) -> tuple[list[BucketPart], int]:
    """Return parts with gaps between them, and the length of the bucket."""
    parts, at = [], gap
    for number, count in enumerate(counts):
        parts.append(BucketPart(f"p{number}", at, (count,)))
        at += count + gap
    return parts, at


def whole_numbers(rank: int, step: int, count: int) -> Any:
    """Return small integers: their sums are exact in any order. Some are zero, many are equal."""
    return np.random.default_rng([rank, step]).integers(-4, 5, count).astype(np.float32)


@settings(max_examples=15, deadline=None)
@given(
    ranks=st.integers(1, 4),
    counts=st.lists(st.sampled_from([0, 1, 7, 30, 300]), max_size=4),
    codec=st.sampled_from([TopK(1.0), TopK(1.0, "float16"), RandomK(1.0), Exact(fixed=False)]),
    dense_below=st.sampled_from([0, 10, 100]),
    flags=st.integers(0, 20),
)
def test_sending_everything_gives_the_sum(ranks, counts, codec, dense_below, flags):
    parts, length = placed(counts)
    places = [i for part in parts for i in range(part.start, part.stop)]

    def reduce(comm):
        reducer = AllGather(codec, dense_below=dense_below).reducer(comm, parts)
        for step in range(2):  # no residual remains from the first
            values = whole_numbers(comm.rank, step, length)
            on = np.array([i % ranks == comm.rank and i % 3 > 0 for i in range(flags)], np.float32)
            assert reducer.reduce(values, on)
        return values[places], on > 0

    expected = sum(whole_numbers(rank, 1, length) for rank in range(ranks))[places]
    for values, on in run(ranks, reduce):
        np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(on, [i % 3 > 0 for i in range(flags)])


def test_each_rank_sends_the_largest_of_each_parameter():
    def reduce(comm):
        values = np.array([0, 1, 2, 3, -9, 8, 7, 5], np.float32) * (comm.rank + 1)
        if comm.rank == 1:
            values[:4] = [6, 0, 0, 0]
        parts = [BucketPart("a", 0, (4,)), BucketPart("b", 4, (2, 2))]
        reducer = AllGather(TopK(0.5), dense_below=0).reducer(comm, parts)
        assert reducer.reduce(values, NO_FLAGS)
        return values, reducer.state()

    for rank, (values, state) in enumerate(run(3, reduce)):
        # a: rank 0 sends 2 and 3, rank 1 sends 6 (its other elements are zero), rank 2 three times what rank 0 sends
        np.testing.assert_array_equal(values, [6, 0, 2 + 6, 3 + 9, -9 * 6, 8 * 6, 0, 0])
        residual = [[0, 1, 0, 0], [0, 0, 0, 0], [0, 3, 0, 0]][rank]
        np.testing.assert_array_equal(state["a"]["residual"], residual)
        np.testing.assert_array_equal(state["b"]["residual"], np.array([[0, 0], [7, 5]]) * (rank + 1))


@pytest.mark.parametrize("codec", [TopK(0.05), TopK(0.05, "bfloat16"), RandomK(0.05)])
def test_sums_and_residuals_add_up_to_the_sums_of_gradients(codec):
    """Exactly: all values are integers, and bfloat16 represents all up to 256."""
    parts, length = placed([40, 333, 1500])
    places = [i for part in parts for i in range(part.start, part.stop)]
    steps = 6

    def train(comm):
        reducer = AllGather(codec, dense_below=100).reducer(comm, parts, key="bucket")
        total, given_ = np.zeros(length, np.float32), np.zeros(length, np.float32)
        bits = []
        for step in range(steps):
            values = whole_numbers(comm.rank, step, length)
            given_ += values
            assert reducer.reduce(values, NO_FLAGS)
            reducer.commit()
            bits.append(values.tobytes())
            total += values
        state = reducer.state()
        assert state.keys() == {"p1", "p2"}  # p0 is small, and travels whole
        residual = np.zeros(length, np.float32)
        for part in parts[1:]:
            residual[part.start : part.stop] = state[part.name]["residual"]
        return bits, total, given_, residual

    results = run(3, train)
    assert len({tuple(bits) for bits, *_ in results}) == 1
    given_ = sum(result[2] for result in results)
    residual = sum(result[3] for result in results)
    np.testing.assert_array_equal((results[0][1] + residual)[places], given_[places])
    assert residual.any()


def test_random_values_travel_without_places():
    count, flags = 6400, 5

    def reduce(comm):
        reducer = AllGather(RandomK(0.01)).reducer(
            comm, [BucketPart("w", 0, (count,)), BucketPart("b", count, (10,))], key="k"
        )
        sent_values = []
        for step in range(2):
            values = whole_numbers(comm.rank, step, count + 10) + 5
            reducer.reduce(values, np.zeros(flags, np.float32))
            sent_values.append(np.flatnonzero(values[:count]))
        return reducer.sent_bytes, sent_values

    results = run(2, reduce)
    for nbytes, (first, second) in results:
        assert nbytes == 4 * (64 + 10 + flags)  # 2 (P - 1) / P of the buffer, with P = 2
        assert len(first) == len(second) == 64  # nothing is zero: so all ranks chose the same places
        assert len(np.intersect1d(first, second)) < 10  # others in each step: by chance about 1 is the same


def test_sent_bytes_are_those_of_the_messages():
    def reduce(comm):
        reducer = AllGather(TopK(0.01)).reducer(comm, [BucketPart("w", 0, (10000,)), BucketPart("b", 10000, (10,))])
        values = np.zeros(10010, np.float32)
        values[::200] = 1
        reducer.reduce(values, np.zeros(9, np.float32))
        return reducer.sent_bytes

    # Two lengths; 10 values; flags in 2 bytes, filled up to 8; a header of 8 bytes, 50 values and as many gaps of a
    # byte, filled up from 258 to 264. To 2 other ranks.
    assert run(3, reduce) == [2 * (16 + 40 + 8 + 264)] * 3


@pytest.mark.parametrize("codec", [TopK(0.1), RandomK(0.1), TopK(0.1, "float16")])
def test_a_skipped_step_leaves_no_trace(codec):
    def train(comm):
        reducer = AllGather(codec, dense_below=0).reducer(comm, [BucketPart("w", 1, (6, 7))])
        reducer.reduce(whole_numbers(comm.rank, 0, 50), NO_FLAGS)
        reducer.commit()
        before = reducer.state()["w"]["residual"]
        assert before.any()
        for bad in (np.inf, np.nan):
            values = whole_numbers(comm.rank, 1, 50)
            if comm.rank == 1:
                values[5] = bad
            assert not reducer.reduce(values, NO_FLAGS)
            assert np.isfinite(reducer.state()["w"]["residual"]).all()
            reducer.rollback()
            reducer.rollback()  # once is enough
            np.testing.assert_array_equal(reducer.state()["w"]["residual"], before)
        return True

    assert all(run(2, train))


def test_an_overflowing_sum_is_reported_on_all_ranks():
    def train(comm):
        values = np.full(20, 3e38 if comm.rank < 2 else -3e38, np.float32)
        return AllGather(TopK(0.1), dense_below=0).reducer(comm, [BucketPart("w", 0, (20,))]).reduce(values, NO_FLAGS)

    assert run(3, train) == [False] * 3


def test_a_step_without_commit_or_rollback_counts():
    def train(comm):
        residuals = []
        for keeps in (True, False):
            reducer = AllGather(TopK(0.1), dense_below=0).reducer(comm, [BucketPart("w", 0, (50,))])
            for step in range(3):
                reducer.reduce(whole_numbers(comm.rank, step, 50), NO_FLAGS)
                if keeps:
                    reducer.commit()
            residuals.append(reducer.state()["w"]["residual"])
        np.testing.assert_array_equal(residuals[0], residuals[1])

    run(2, train)


def test_state_is_loaded_into_another_bucket_by_name():
    def train(comm):
        first = AllGather(TopK(0.1), dense_below=5).reducer(
            comm, [BucketPart("a", 0, (3, 20)), BucketPart("b", 60, (12,))]
        )
        first.reduce(whole_numbers(comm.rank, 0, 72), NO_FLAGS)
        state = first.state()
        assert state["a"]["residual"].shape == (3, 20)
        parts = [
            BucketPart("b", 2, (12,)),
            BucketPart("small", 14, (4,)),
            BucketPart("new", 18, (6,)),
            BucketPart("a", 30, (3, 20)),
        ]
        second = AllGather(TopK(0.1), dense_below=5).reducer(comm, parts)
        second.reduce(np.zeros(90, np.float32), NO_FLAGS)
        second.load(state)
        second.rollback()  # does not affect loaded state
        again = second.state()
        assert again.keys() == {"a", "b", "new"} and not again["new"]["residual"].any()
        for name in ("a", "b"):
            assert state[name]["residual"].any()
            np.testing.assert_array_equal(again[name]["residual"], state[name]["residual"])

    run(2, train)


@pytest.mark.parametrize("unbiased", [False, True])
def test_draws_continue_from_a_state(unbiased):
    """A reducer with the state of another continues its draws."""

    def train(comm):
        def make():
            return AllGather(RandomK(0.1, unbiased), dense_below=0).reducer(comm, [BucketPart("w", 0, (200,))], key="b")

        first = make()
        for step in range(3):
            first.reduce(whole_numbers(comm.rank, step, 200), NO_FLAGS)
            first.commit()
        second = make()
        second.load(first.state())
        for step in range(3, 6):
            one, other = (whole_numbers(comm.rank, step, 200) for _ in range(2))
            assert first.reduce(one, NO_FLAGS) and second.reduce(other, NO_FLAGS)
            np.testing.assert_array_equal(one, other)

    run(2, train)


def test_without_feedback_there_is_no_state():
    def train(comm):
        reducer = AllGather(TopK(0.1), feedback=False, dense_below=0).reducer(comm, [BucketPart("w", 0, (20,))])
        for _ in range(2):
            values = np.arange(20, dtype=np.float32)
            reducer.reduce(values, NO_FLAGS)
            np.testing.assert_array_equal(values, [*[0] * 18, 36, 38])
        reducer.commit()
        reducer.load({"w": {"residual": np.ones(20, np.float32)}})
        assert reducer.state() == {}

    run(2, train)


def test_names_contain_the_options_that_ranks_must_share():
    assert AllGather(TopK()).name == "topk:ratio=0.01"
    assert AllGather(TopK(), feedback=True).name == "topk:ratio=0.01"
    assert (
        AllGather(TopK(), feedback=False, dense_below=5).name == "topk:ratio=0.01,feedback=false,dense_below=5"
    )  # the form that scheme_of reads
    assert isinstance(AllGather(TopK()), Scheme) and AllGather(TopK()).divisible
