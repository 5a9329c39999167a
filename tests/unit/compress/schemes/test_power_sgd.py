"""PowerSGD against its definition and its promises: same bits, nothing lost, bounded residuals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.compress.registry import scheme_of
from commlib.compress.scheme import BucketPart
from commlib.compress.schemes.power_sgd import PowerSGD
from commlib.errors import UsageError
from commlib.kernels.host import low_rank
from commlib.kernels.host.orthonormal import orthonormalise
from tests.bodies.loopback import run

ROUND = 2.0**-24  # what rounding to float32 changes at most, as a share
NO_FLAGS = np.zeros(0, np.float32)


class SingleRankComm:
    """A comm of one rank that counts its calls."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.calls = 0

    def watch(self, text: str) -> Any:
        raise AssertionError("memory of the host is not waited for")

    def all_reduce(self, x: Any, op: str = "sum", *, out: Any = None) -> Any:
        self.calls += 1
        return x

    def all_gather(self, x: Any, *, out: Any = None) -> Any:
        raise AssertionError("PowerSGD only adds")

    all_to_all = all_gather

    def all_gather_v(self, x: Any) -> Any:
        raise AssertionError("PowerSGD only adds")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile everything here: on a fresh machine it takes longer than ranks are given to end."""
    matrix_reducer(SingleRankComm(), 8, 10).reduce(np.zeros(80, np.float32), NO_FLAGS.copy())


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def matrix_reducer(comm: Any, rows: int, cols: int, **options: Any) -> Any:
    options = {"rank": 2, "min_compression_rate": 0.01, **options}
    return PowerSGD(**options).reducer(comm, [BucketPart("w", 0, (rows, cols))])


def reduced(reducer: Any, matrix: Any) -> Any:
    values = matrix.reshape(-1).copy()
    reducer.reduce(values, NO_FLAGS.copy())
    return values.reshape(matrix.shape)


# Kernels


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9),
    cols=st.sampled_from([1, 2, 7, 40, 1023, 1024, 1025, 2100]),
    rank=st.integers(1, 9),
    with_residual=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_products_of_small_integers_are_exact(rows, cols, rank, with_residual, seed):
    # |sums| <= 2100 * 14 * 7 * ... < 2^24 in every product below, so float32 holds them exactly in any order.
    rng = np.random.default_rng(seed)
    rank = min(rank, rows, cols)
    shapes = (rows, cols), (rows, cols), (rank, cols), (rank, cols), (rank, rows)
    matrix, before, right, own, left_factor = (rng.integers(-7, 8, shape).astype(np.float32) for shape in shapes)
    residual = before.reshape(-1) if with_residual else NO_FLAGS
    total = matrix + before if with_residual else matrix
    values, p, q = matrix.reshape(-1).copy(), np.empty(rank * rows, np.float32), np.empty(rank * cols, np.float32)
    low_rank.project(values, residual, rows, cols, right.reshape(-1), p, rank)
    np.testing.assert_array_equal(values.reshape(rows, cols), total)
    np.testing.assert_array_equal(p.reshape(rank, rows), right @ total.T)
    low_rank.project_back(values, rows, cols, left_factor.reshape(-1), q, rank)
    np.testing.assert_array_equal(q.reshape(rank, cols), left_factor @ total)
    after = np.full(rows * cols if with_residual else 0, np.nan, np.float32)
    low_rank.expand(values, after, rows, cols, left_factor.reshape(-1), right.reshape(-1), own.reshape(-1), rank)
    np.testing.assert_array_equal(values.reshape(rows, cols), left_factor.T @ right)
    if with_residual:
        np.testing.assert_array_equal(after.reshape(rows, cols), total - left_factor.T @ own)


@settings(max_examples=25, deadline=None)
@given(rank=st.integers(1, 6), extra=st.integers(0, 40), exponent=st.integers(-130, 110), seed=st.integers(0, 2**32))
def test_orthonormal_vectors_span_the_same_space(rank, extra, exponent, seed):
    rng = np.random.default_rng(seed)
    given_ = np.ldexp(rng.integers(-500, 501, (rank, rank + extra)), exponent).astype(np.float32)
    given_[:, :rank] += np.ldexp(1000 * np.eye(rank), exponent).astype(np.float32)  # independent
    vectors = given_.reshape(-1).copy()
    assert orthonormalise(vectors, rank, 1e-6) == 0
    orthonormal = vectors.reshape(rank, -1).astype(np.float64)
    # Float64 until each number is rounded once: products of two vectors of length 1 are off by 2 ROUND, and a bit.
    np.testing.assert_allclose(orthonormal @ orthonormal.T, np.eye(rank), atol=2.1 * ROUND)
    left_over = given_ - given_.astype(np.float64) @ orthonormal.T @ orthonormal
    assert np.linalg.norm(left_over) <= 4 * rank * ROUND * np.linalg.norm(given_.astype(np.float64))


def test_dependent_vectors_are_dropped():
    vectors = np.array([[3, 4, 0], [6, 8, 0], [0, 0, 0], [1, 0, 0]], np.float32).reshape(-1)
    assert orthonormalise(vectors, 4, 1e-6) == 2
    # (1, 0, 0) without its share along (0.6, 0.8, 0) is (0.64, -0.48, 0).
    expected = np.array([[0.6, 0.8, 0], [0, 0, 0], [0, 0, 0], [0.8, -0.6, 0]])
    np.testing.assert_allclose(vectors.reshape(4, 3), expected, atol=ROUND)


@pytest.mark.parametrize("culprit", [np.nan, np.inf, -np.inf])
def test_nonfinite_vectors_are_not_changed(culprit):
    vectors = np.array([1, 2, 3, culprit], np.float32)
    before = vectors.copy()
    assert orthonormalise(vectors, 2, 1e-6) == -1
    np.testing.assert_array_equal(vectors, before)


# The approximation


@settings(max_examples=10, deadline=None)
@given(
    ranks=st.integers(1, 3), rank=st.integers(1, 5), rows=st.integers(8, 40), cols=st.integers(8, 40),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_a_sum_of_low_rank_is_exact(ranks, rank, rows, cols, seed):
    """The ranks' matrices may have any rank: only the sum counts. Two reductions, as the first starts at random."""
    rng = np.random.default_rng(seed)
    basis = [np.linalg.qr(rng.standard_normal((n, rank)))[0] for n in (rows, cols)]
    wanted = (basis[0] * rng.uniform(1, 2, rank)) @ basis[1].T
    noise = rng.standard_normal((ranks, rows, cols))
    noise -= noise.mean(0)
    own = (noise + wanted / ranks).astype(np.float32)

    def reduce(comm):
        reducer = matrix_reducer(comm, rows, cols, rank=rank, feedback=False)
        reduced(reducer, own[comm.rank])
        return reduced(reducer, own[comm.rank])

    expected = own.astype(np.float64).sum(0)
    for result in run(ranks, reduce):
        # P and Q are sums of max(rows, cols) products of own elements and numbers up to 1, and then of the ranks; each
        # addition rounds by a share. Errors of P count by the condition number of `wanted`, 2; 4 for both, and margin.
        tolerance = 4 * (max(rows, cols) + ranks) * ROUND * np.linalg.norm(own.astype(np.float64))
        assert np.linalg.norm(result - expected) <= tolerance


def test_power_iteration_finds_the_best_approximation():
    rng = np.random.default_rng(1)
    u, v = (np.linalg.qr(rng.standard_normal((n, 20)))[0] for n in (40, 30))
    matrix = ((u * 0.5 ** np.arange(20)) @ v.T).astype(np.float32)
    best = (u[:, :3] * 0.5 ** np.arange(3)) @ v[:, :3].T
    reducer = matrix_reducer(SingleRankComm(), 40, 30, rank=3, feedback=False)
    errors = [np.linalg.norm(reduced(reducer, matrix) - best) for _ in range(12)]
    assert errors[0] > 0.05  # after a random start it has not converged
    # Each step shrinks the wrong directions by (4th / 3rd singular value)^2 = 1/4: 12 steps by 6e-8.
    assert errors[-1] < 1e-5


def test_without_warm_start_each_step_starts_anywhere():
    matrix = normal(1, 40, 30)
    reducer = matrix_reducer(SingleRankComm(), 40, 30, feedback=False, warm_start=False)
    first, second = reduced(reducer, matrix), reduced(reducer, matrix)
    assert not np.array_equal(first, second)
    again = matrix_reducer(SingleRankComm(), 40, 30, feedback=False, warm_start=False)
    np.testing.assert_array_equal(reduced(again, matrix), first)
    other = matrix_reducer(SingleRankComm(), 40, 30, feedback=False, warm_start=False, seed=1)
    assert not np.array_equal(reduced(other, matrix), first)
    assert "q" not in reducer.state()["w"]


# State


PARTS = [
    BucketPart("w", 0, (12, 5, 2)), BucketPart("bias", 128, (7,)), BucketPart("v", 140, (9, 16)),
    BucketPart("none", 284, (0, 3)),
    BucketPart("scale", 290, ()),
]  # fmt: skip
COUNT = 300
SCHEME = PowerSGD(rank=2, min_compression_rate=1)


def bucket(rank: int, step: int) -> Any:
    values = np.zeros(COUNT, np.float32)
    for part in PARTS:
        values[part.start : part.stop] = np.random.default_rng((rank, step, part.start)).standard_normal(part.count)
    return values


def test_nothing_is_lost_and_all_ranks_have_the_same_bits():
    ranks, steps = 3, 20

    def train(comm):
        reducer, total, results, largest = SCHEME.reducer(comm, PARTS), np.zeros(COUNT), [], 0.0
        for step in range(steps):
            values = bucket(comm.rank, step)
            flags = np.array([comm.rank == step % 5, 0, step], np.float32)
            assert reducer.reduce(values, flags)
            np.testing.assert_array_equal(flags, [step % 5 < ranks, 0, 3 * step])
            assert reducer.sent_bytes == 2 * 2 * sum(4 * n for n in (2 * 12 + 2 * 9 + 7 + 1 + 3, 2 * 10 + 2 * 16)) // 3
            results.append(values.tobytes())
            total += values
            residuals = {name: state["residual"] for name, state in reducer.state().items()}
            largest = max(largest, *(np.abs(state).max() for state in (values, *residuals.values())))
        return total, results, residuals, largest

    everyone = run(ranks, train)
    given_ = [sum(bucket(rank, step).astype(np.float64) for step in range(steps)) for rank in range(ranks)]
    for total, results, _, _ in everyone:
        assert results == everyone[0][1]
        for part in PARTS:
            place = slice(part.start, part.stop)
            residual = sum(state[2][part.name].reshape(-1) for state in everyone if part.name in state[2])
            # In each step and on each rank: one rounding of value + residual, rank + 1 of what is subtracted (of
            # numbers up to sqrt(rows) times the largest), and `ranks` of own factors. Plain sums: `ranks` roundings.
            size = (everyone[0][3] + 5) * part.shape[0] ** 0.5 if part.shape else 5
            tolerance = steps * ranks * (SCHEME.rank + 2 + ranks) * ROUND * size
            np.testing.assert_allclose(total[place] + residual, sum(given_)[place], rtol=0, atol=tolerance)
    assert set(everyone[0][2]) == {"w", "v"}


def test_two_messages_for_any_number_of_parameters():
    comm = SingleRankComm()
    reducer = SCHEME.reducer(comm, PARTS)
    reducer.reduce(bucket(0, 0), np.zeros(3, np.float32))
    assert comm.calls == 2
    comm.calls = 0
    small = SCHEME.reducer(comm, PARTS[1:2])
    values = bucket(0, 0)
    small.reduce(values, np.zeros(3, np.float32))
    assert comm.calls == 1
    np.testing.assert_array_equal(values, bucket(0, 0))
    assert small.state() == {}


def test_residuals_stay_bounded_where_ranks_differ():
    """torch's hook stores value - result of all, not value - own share: that grows by the bias in every step.

    The gradient common to both ranks has 2 of 16 rows in turn. Its sum is of rank 2, the biases cancel in it, so P is
    those two rows: each step sends exactly them, of each rank's bias too. A row waits for 8 steps, so of its bias at
    most 7 gather: |residual| <= 7 |bias|, and what rounding adds.
    """
    common = 64 * np.array([np.ones(24), np.resize([1, -1], 24)], np.float32)
    steps, rows, cols = 600, 16, 24
    bias = np.random.default_rng(0).integers(-8, 9, (rows, cols)).astype(np.float32)

    def train(comm):
        reducer = matrix_reducer(comm, rows, cols)
        sign, norms = 1 - 2 * comm.rank, []
        for step in range(steps):
            matrix = np.zeros((rows, cols), np.float32)
            at = 2 * (step % 8)
            matrix[at : at + 2] = common
            reduced(reducer, matrix + sign * bias)
            norms.append(np.linalg.norm(reducer.state()["w"]["residual"]))
        return norms

    for norms in run(2, train):
        assert max(norms) <= 7 * np.linalg.norm(bias) * 1.001
        assert norms[-1] > np.linalg.norm(bias)  # there is something to bound


def test_the_first_reductions_are_exact():
    def train(comm):
        reducer = PowerSGD(rank=1, min_compression_rate=1, start=2).reducer(comm, PARTS)
        results = []
        for step in range(3):
            values, flags = bucket(comm.rank, step), np.array([comm.rank], np.float32)
            reducer.reduce(values, flags)
            assert flags == 1
            results.append(values)
            if step == 0:
                reducer.rollback()  # does not count
                reducer.reduce(bucket(comm.rank, step), flags)
            assert reducer.state()["w"]["step"] == step + 1
            assert reducer.state()["w"]["residual"].any() == (step == 2)
        return results

    for results in run(2, train):
        for step, values in enumerate(results):
            expected = bucket(0, step) + bucket(1, step)
            assert np.array_equal(values, expected) == (step < 2)
            np.testing.assert_array_equal(values[128:135], expected[128:135])


def test_discard_leaves_no_trace():
    def train(comm, skipped):
        reducer = SCHEME.reducer(comm, PARTS)
        results = []
        for step in range(4):
            if skipped:
                reducer.reduce(bucket(comm.rank, 100 + step), NO_FLAGS.copy())
                reducer.rollback()
                reducer.commit()  # too late
            values = bucket(comm.rank, step)
            reducer.reduce(values, NO_FLAGS.copy())
            if step % 2:
                reducer.commit()
            results.append(values.tobytes())
        return results

    assert run(2, lambda comm: train(comm, True)) == run(2, lambda comm: train(comm, False))


@pytest.mark.parametrize("culprit", [np.nan, np.inf])
@pytest.mark.parametrize("where", [3, 130])  # in a matrix, in a bias
def test_nonfinite_values_reach_all_ranks_and_no_state(culprit, where):
    def train(comm):
        reducer, clean = SCHEME.reducer(comm, PARTS), SCHEME.reducer(comm, PARTS)
        for step in range(2):
            for one in (reducer, clean):
                assert one.reduce(bucket(comm.rank, step), NO_FLAGS.copy())
        values = bucket(comm.rank, 2)
        if comm.rank == 1:
            values[where] = culprit
        assert not reducer.reduce(values, NO_FLAGS.copy())
        part = next(part for part in PARTS if part.start <= where < part.stop)
        spoiled = values[part.start : part.stop]
        assert not np.isfinite(spoiled).all() and (len(part.shape) == 1 or np.isnan(spoiled).all())
        assert np.isfinite(values).sum() == COUNT - (~np.isfinite(spoiled)).sum()
        for step in (3, 4):
            results = [bucket(comm.rank, step) for _ in range(2)]
            assert all(
                one.reduce(values, NO_FLAGS.copy()) for one, values in zip((reducer, clean), results, strict=True)
            )
            np.testing.assert_array_equal(*results)

    run(2, train)


@pytest.mark.parametrize("exponent", [-140, -60, 60, 110])
def test_any_magnitude_is_reduced(exponent):
    """Factors are normalised: their products would be beyond float32 otherwise."""
    matrix = np.ldexp(np.outer(np.arange(1, 9), np.arange(1, 11)), exponent).astype(np.float32)
    reducer = matrix_reducer(SingleRankComm(), 8, 10, feedback=False)
    for _ in range(3):
        result = reduced(reducer, matrix)
    # The matrix has rank 1, and its products with vectors of length 1 are rounded to the least denormal.
    np.testing.assert_allclose(result, matrix, rtol=20 * ROUND, atol=20 * 2.0**-149)


def test_zeros_stay_zeros_only_while_gradients_are_zero():
    """torch's hook keeps a factor of zeros, and a layer whose gradient was zero once is never sent again."""
    reducer = matrix_reducer(SingleRankComm(), 8, 10)
    zeros, matrix = np.zeros((8, 10), np.float32), np.outer(np.arange(1, 9), np.ones(10)).astype(np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(reduced(reducer, zeros), zeros)
        np.testing.assert_array_equal(reducer.state()["w"]["residual"], zeros)
        np.testing.assert_allclose(reduced(reducer, matrix), matrix, rtol=20 * ROUND)
        reducer = matrix_reducer(SingleRankComm(), 8, 10)


def test_state_is_loaded_into_another_bucket():
    other = [BucketPart(part.name, part.start + 17, part.shape) for part in reversed(PARTS)]

    def train(comm):
        reducer = SCHEME.reducer(comm, PARTS, key="b")
        for step in range(3):
            reducer.reduce(bucket(comm.rank, step), NO_FLAGS.copy())
        successor = SCHEME.reducer(comm, other, key="b")
        state = reducer.state()
        successor.load({**state, "unknown": {"residual": np.ones(3, np.float32)}})
        assert successor.state().keys() == state.keys() == {"w", "v"}
        assert state["w"]["residual"].shape == (12, 5, 2) and state["w"]["q"].shape == (2, 10)
        for name, state_ in successor.state().items():
            for what, array in state_.items():
                np.testing.assert_array_equal(array, state[name][what])
        values, moved = bucket(comm.rank, 3), np.zeros(COUNT + 17, np.float32)
        moved[17:] = values
        state["w"]["residual"][...] = np.nan  # it is a copy
        reducer.reduce(values, NO_FLAGS.copy())
        successor.reduce(moved, NO_FLAGS.copy())
        np.testing.assert_array_equal(values, moved[17:])

    run(2, train)


@pytest.mark.parametrize(
    ("shape", "options", "rank"),
    [
        ((100, 50), {}, 4),
        ((100, 5, 10), {}, 4),
        ((100,), {}, 0),
        ((), {}, 0),
        ((0, 50), {}, 0),
        ((16, 16), {}, 0),  # (16 + 16) * 4 * 2 = 256 is not less than 256
        ((16, 17), {}, 4),  # (16 + 17) * 4 * 2 = 264 < 272
        ((16, 17), {"min_compression_rate": 3}, 0),
        ((100, 2), {"min_compression_rate": 0.1}, 2),
        ((100, 50), {"rank": 9}, 9),
    ],
)
def test_only_larger_matrices_are_compressed(shape, options, rank):
    assert PowerSGD(**options).rank_of(shape) == rank


def test_names_differ_with_options():
    assert PowerSGD().name == "powersgd:rank=4"
    scheme = PowerSGD(2, start=10, feedback=False)
    assert scheme.name == "powersgd:rank=2,start=10,feedback=False"
    assert scheme_of(scheme.name) == scheme


@pytest.mark.parametrize("options", [{"rank": 0}, {"min_compression_rate": 0}, {"start": -1}, {"epsilon": 1}])
def test_wrong_options_are_refused(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        PowerSGD(**options)
