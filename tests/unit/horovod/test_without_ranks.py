"""Horovod's API without other ranks: operations by number, sets, state."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from commlib import horovod as hvd
from commlib.errors import CommlibError, MismatchError, TransportError, UsageError
from commlib.horovod.reductions import reduction_name


def test_operations_have_horovods_numbers():
    ops = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert [int(op) for op in ops] == [0, 1, 2, 3, 4, 5]
    assert [op.core for op in ops] == ["mean", "sum", "adasum", "min", "max", "prod"]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ((), hvd.Average),
        ((None, None, hvd.Sum), hvd.Sum),
        ((hvd.Max,), hvd.Max),
        ((1,), hvd.Sum),
        (("prod",), hvd.Product),
        ((None, True), hvd.Average),
        ((None, False), hvd.Sum),
    ],
)
def test_operations_are_resolved(arguments, expected):
    assert hvd.resolve_op(*arguments) is expected


@pytest.mark.parametrize("op", [7, "average", 1.5])
def test_unknown_operations_are_refused(op):
    with pytest.raises(UsageError, match="expected Average, Sum"):
        hvd.resolve_op(op)


@pytest.mark.parametrize(
    "op, near",
    [
        ("meen", "mean"),
        ("Mean", "mean"),
        ("average", "mean"),
        ("SUM", "sum"),
        ("adasun", "adasum"),
        ("product", "prod"),
    ],
)
def test_a_misspelled_operation_gets_the_nearest_one(op, near):
    with pytest.raises(UsageError, match=f"sum, adasum, min, max, prod; did you mean '{near}'"):
        hvd.resolve_op(op)


def test_an_optimizer_lists_the_operations_that_it_accepts():
    with pytest.raises(UsageError, match=r"one of mean, sum, got 'adasun'$"):
        reduction_name("adasun")
    with pytest.raises(UsageError, match="one of mean, sum, adasum, got 'adasun'; did you mean 'adasum'"):
        reduction_name("adasun", adasum=True)
    with pytest.raises(UsageError, match="one of mean, sum, got 'avrage'; did you mean 'mean'"):
        reduction_name("avrage")


def test_an_unregistered_set_has_only_its_ranks():
    process_set = hvd.ProcessSet([2, 0])
    assert process_set.ranks == [0, 2]
    assert (process_set.process_set_id, process_set.size(), process_set.rank(), process_set.included()) == (None,) * 4
    assert str(process_set) == "ProcessSet(process_set_id=None, ranks=[0, 2], mpi_comm=None)"
    assert process_set == hvd.ProcessSet(range(0, 3, 2)) and process_set != hvd.ProcessSet([0])
    with pytest.raises(UsageError, match="different and not negative"):
        hvd.ProcessSet([1, 1])
    with pytest.raises(UsageError, match="different and not negative"):
        hvd.ProcessSet([-1])


def test_sets_can_be_copied_and_pickled():
    process_set = hvd.ProcessSet([0, 1])
    assert copy.deepcopy([process_set])[0] is process_set
    assert pickle.loads(pickle.dumps(process_set)).ranks == [0, 1]


def test_errors_are_those_that_scripts_catch():
    assert hvd.HorovodInternalError is CommlibError
    assert issubclass(MismatchError, RuntimeError) and issubclass(UsageError, ValueError)


@pytest.mark.parametrize("shape", [(), (3,), (5, 7)])
def test_new_arrays_are_aligned(shape):
    for dtype in ("float32", "int8", "complex64"):
        array = hvd.empty(shape, dtype)
        assert array.ctypes.data % 64 == 0
        assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
        assert array.flags.c_contiguous and array.flags.writeable
    assert hvd.empty((0, 2), "float32").shape == (0, 2)


def state(**values):
    return hvd.elastic.ObjectState(bcast_object=lambda value: value, **values)


def test_state_takes_the_arguments_of_horovod():
    kept = hvd.elastic.ObjectState(lambda value: {**value, "epoch": 5}, lambda: 0, epoch=1)
    assert kept.epoch == 1 and not hasattr(kept, "get_rank")
    kept.sync()
    assert kept.epoch == 5

    class Own(hvd.elastic.State):
        def __init__(self, bcast_object, get_rank):
            super().__init__(bcast_object, get_rank)

    assert Own(None, lambda: 0).commits == 0


def test_a_state_returns_to_the_last_commit():
    state_ = state(epoch=1, order=[1, 2])
    state_.epoch, state_.order[0] = 2, 9
    state_.restore()
    assert (state_.epoch, state_.order) == (1, [1, 2])
    state_.epoch, state_.order[0] = 3, 7
    state_.commit()
    state_.order.append(5)
    state_.restore()
    assert (state_.epoch, state_.order) == (3, [7, 2])


def test_a_loop_restarts_at_the_last_commit():
    state_, tried, resets = state(step=0), [], []
    state_.register_reset_callbacks([lambda: resets.append(state_.step)])

    @hvd.elastic.run
    def train(state_, last):
        while state_.step < last:
            state_.step += 1
            tried.append(state_.step)
            if tried in ([1, 2, 3], [1, 2, 3, 3]):
                raise MismatchError("once more")
            state_.commit()
        return state_.step

    assert train(state_, 4) == 4
    assert tried == [1, 2, 3, 3, 3, 4] and resets == [2, 2]


def test_a_loop_stops_after_its_reset_limit():
    state_, tried = state(step=0), []

    @hvd.elastic.run
    def train(state_):
        tried.append(state_.step)
        raise MismatchError("always")

    with pytest.raises(MismatchError, match="always"):
        train(state_)
    assert tried == [0, 0, 0]


def test_a_loop_does_not_continue_without_its_ranks():
    tried = []

    @hvd.elastic.run
    def train(state_):
        tried.append(1)
        raise TransportError("gone")

    with pytest.raises(TransportError):
        train(state())
    assert tried == [1]
