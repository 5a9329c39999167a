"""Gradients in program order: which calls reduce in it, joined ranks, several reducers, and failed runs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as hvd
from commlib.data_parallel.reducer_ranks import OrderedRanks
from commlib.errors import MismatchError, UsageError
from commlib_tensorflow.gradients import TensorReducer

from .oracle import MODES, assert_close, in_mode

pytestmark = pytest.mark.ranks(min=2)
both = pytest.mark.parametrize("mode", MODES)


def orders(reducer: Any) -> list[bool]:
    """Return for each kind of call whether it reduces in program order."""
    return [isinstance(one.ranks, OrderedRanks) for one in reducer.reducers]


def stepping(reducer: TensorReducer, mode: str) -> Any:
    """Return a function that reduces gradients of several sizes, all of the same value."""
    names = ["a", "b"]
    return in_mode(mode, lambda x: reducer([tf.fill([3], x), tf.fill([400], x)], names))


def check(results: Any, value: float) -> None:
    assert_close(results, [np.full(3, value, np.float32), np.full(400, value, np.float32)], 1e-6)


@both
def test_all_ranks_and_communicators_reduce_in_order(comm: Any, mode: str) -> None:
    for options in ({}, {"ranks": comm.split(comm.rank // 2)}):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        variable = keras.Variable(np.zeros(3, np.float32))
        optimizer.build([variable])
        in_mode(mode, lambda: optimizer.apply([tf.ones(3)], [variable]))()  # noqa: B023
        np.testing.assert_array_equal(variable.numpy(), -np.ones(3))
        assert orders(optimizer.reducer) == ([] if optimizer.reducer.alone else [True])


@pytest.mark.ranks(min=3)
@both
def test_process_sets_reduce_by_name(comm: Any, mode: str) -> None:
    pair = hvd.add_process_set([0, 1])
    try:
        reducer = TensorReducer(f"pair {mode}", process_set=pair)
        check(stepping(reducer, mode)(tf.constant(comm.rank + 1.0)), 1.5 if pair.included() else comm.rank + 1.0)
        assert orders(reducer) == ([False] if pair.included() else [])
    finally:
        hvd.remove_process_set(pair)


@both
def test_a_rank_may_join_at_any_time(comm: Any, mode: str) -> None:
    """It stands in for reducers that it has; others, first used while it is absent, reduce by name until it is back."""
    known, other, new = (TensorReducer(f"{kind} {mode}") for kind in ("known", "other", "new"))
    steps = [stepping(reducer, mode) for reducer in (known, other, new)]
    one, total = tf.constant(comm.rank + 1.0), sum(range(1, comm.size + 1))
    for step in steps[:2]:
        check(step(one), total / comm.size)
    if comm.rank:
        for _ in range(2):
            for step in (*steps, steps[0]):
                check(step(one), (total - 1) / comm.size)
        assert [orders(reducer) for reducer in (known, other, new)] == [[True], [True], [False]]
    assert int(hvd.join()) != 0
    for step in steps:
        check(step(one), total / comm.size)
    assert [orders(reducer) for reducer in (known, other, new)] == [[True], [True], [True]]


@both
def test_reducers_in_different_orders_are_refused(comm: Any, mode: str) -> None:
    """Regression: by name both ranks waited for ever."""
    pair = [stepping(TensorReducer(f"turn {number} {mode}"), mode) for number in range(2)]
    for step in pair:
        check(step(tf.constant(1.0)), 1.0)
    with pytest.raises((MismatchError, tf.errors.OpError), match="different optimizers at the same time"):
        pair[comm.rank != 0](tf.constant(1.0))
    for step in pair:
        check(step(tf.constant(2.0)), 2.0)


def test_a_run_that_failed_ends_before_another_reducer_runs(comm: Any) -> None:
    """The other ranks wait for its end, and get an error instead of the gradients of the other reducer."""
    first, step = TensorReducer("fails", overlap=True), stepping(TensorReducer("continues"), "eager")
    variables = [tf.Variable(tf.ones(3)), tf.Variable(tf.ones(400))]

    def run(*, fails: bool = False) -> Any:
        call = first.by_parts(["a", "b"], variables, [1, 0])
        for number in (1, 0):
            call.put(number, tf.ones(variables[number].shape))
            if fails:
                raise UsageError("on this rank only")
        return call.finish()

    run()
    check(step(tf.constant(1.0)), 1.0)
    with pytest.raises(UsageError if comm.rank == 0 else MismatchError):
        run(fails=comm.rank == 0)
    check(step(tf.constant(3.0)), 3.0)
    assert sorted(run()) == [0, 1]
