"""Adapters drive 1-bit optimizers by settings, the start, steps and state. The update is in test_one_bit."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest

from commlib.errors import MismatchError, UsageError
from commlib.optim.one_bit_adam import OneBitAdam
from commlib.optim.one_bit_lamb import CoefficientLimits, OneBitLAMB
from commlib.optim.one_bit_moments import Hyperparameters, Moments, check_hyper
from commlib.optim.one_bit_optimizer import OneBitOptimizer, OneBitSettings
from tests.bodies.loopback import run

COUNTS = [5, 3]
HYPERS = [Hyperparameters(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8)] * len(COUNTS)
LIMITS = {"adam": None, "lamb": CoefficientLimits(factor_max=3.0)}
kinds = pytest.mark.parametrize("kind", LIMITS)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile everything here: on a fresh machine it takes longer than ranks are given to end."""
    for kind in LIMITS:
        run(2, partial(warm_up, kind=kind), nodes=[0, 1])


def warm_up(comm: Any, kind: str) -> None:
    train(*begin(comm, kind), comm, 0, 4)


def settings(kind: str, freeze_step: int = 2, **options: Any) -> OneBitSettings:
    return OneBitSettings(f"OneBit {kind}", freeze_step, limits=LIMITS[kind], **options)


def begin(comm: Any, kind: str, **options: Any) -> tuple[OneBitOptimizer, list[Any]]:
    optimizer = OneBitOptimizer(settings(kind, **options))
    optimizer.start(comm, COUNTS)
    return optimizer, [np.linspace(1, 2, count, dtype=np.float32) for count in COUNTS]


def gradient(rank: int, step: int, number: int) -> Any:
    return np.random.default_rng((rank, step, number)).standard_normal(COUNTS[number]).astype(np.float32) + 1


def train(optimizer: OneBitOptimizer, values: list[Any], comm: Any, first: int, last: int) -> list[bytes]:
    for step in range(first, last):
        for number, place in enumerate(optimizer.gradients):
            place[...] = gradient(comm.rank, step, number)
        assert optimizer.step(values, HYPERS, [True, True])
    return [value.tobytes() for value in values]


@kinds
def test_steps_match_the_update_alone(kind):
    """An unused gradient counts as zeros, whatever its memory contains."""

    def check(comm):
        optimizer, values = begin(comm, kind)
        moments = Moments(comm, [(str(n), count) for n, count in enumerate(COUNTS)], 2, what="alone")
        alone = OneBitAdam(moments) if kind == "adam" else OneBitLAMB(moments, CoefficientLimits(factor_max=3.0))
        copies = [value.copy() for value in values]
        for step in range(5):
            used = [True, comm.rank == 0]
            for number in range(2):
                given = gradient(comm.rank, step, number)
                optimizer.gradients[number][...] = given
                moments.parameters[number].gradient[...] = given if used[number] else 0
                moments.used[number] = used[number]
            assert optimizer.step(values, HYPERS, used) and alone.step(copies, HYPERS)
        return [value.tobytes() for value in values], [copy.tobytes() for copy in copies]

    for got, expected in run(2, check, nodes=[0, 1]):
        assert got == expected


@kinds
@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("early", [True, False], ids=["before the start", "after it"])
def test_training_continues_from_state_and_memory(kind, at, early):
    def check(comm):
        first, values = begin(comm, kind)
        train(first, values, comm, 0, at)
        state = first.state()
        assert (state["steps"], state["rank"], state["freeze_step"]) == (at, comm.rank, 2)
        saved = [[array.copy() for array in arrays] for arrays in first.memory]
        copies = [value.copy() for value in values]
        second = OneBitOptimizer(settings(kind))
        assert not second.is_started and second.state() == {}
        if not early:
            second.start(comm, COUNTS)
            train(second, [value.copy() for value in values], comm, 0, 3)
        second.check_state(state)
        second.load(state)
        if early:
            assert second.state() == state
            second.start(comm, COUNTS)
        for arrays, memory_ in zip(second.memory, saved, strict=True):
            for array, keep in zip(arrays, memory_, strict=True):
                array[...] = keep
        assert train(second, copies, comm, at, at + 4) == train(first, values, comm, at, at + 4)

    run(2, check, nodes=[0, 1])


def test_residuals_stay_with_their_rank():
    def check(comm):
        optimizer, values = begin(comm, "adam")
        train(optimizer, values, comm, 0, 4)
        theirs = comm.broadcast_object(optimizer.state(), 1)
        other, _ = begin(comm, "adam")
        other.load(theirs)
        return bool(other.state()["residuals"])

    assert run(2, check, nodes=[0, 1]) == [False, True]


def test_loading_another_step_drops_residuals():
    def check(comm):
        optimizer, values = begin(comm, "adam")
        train(optimizer, values, comm, 0, 4)
        optimizer.seek(4)
        assert optimizer.state()["residuals"]
        optimizer.seek(3)
        return optimizer.state()["steps"], optimizer.state()["residuals"]

    assert run(2, check, nodes=[0, 1]) == [(3, {})] * 2


@kinds
def test_callers_arrays_can_hold_all_state(kind):
    """As in Keras. Each rank reads its own state, and continues without a difference."""
    kept_kinds = 3 if kind == "lamb" else 2

    def check(comm):
        optimizer, values = begin(comm, kind, freeze_step=4)
        other, copies = begin(comm, kind, freeze_step=4)
        memory_ = [np.full((1, count), np.nan, np.float32) for _ in range(kept_kinds) for count in COUNTS]
        if kind == "lamb":
            memory_.append(np.full((2, 4), np.nan))
        optimizer.write(memory_)
        assert not any(array.any() for array in memory_[: 2 * kept_kinds])
        for step in range(4):
            train(optimizer, values, comm, step, step + 1)
            other.read(memory_)
            other.seek(step)
            train(other, copies, comm, step, step + 1)
            other.write(memory_)
        assert [x.tobytes() for x in values] == [x.tobytes() for x in copies]
        if kind == "lamb":
            assert memory_[-1][:, 1].tolist() == pytest.approx([1 - 0.9**4] * 2)  # the weight of the averages
            assert [list(layer.values()) for layer in other.state()["layers"]] == memory_[-1].tolist()
        else:
            assert "layers" not in other.state()

    run(2, check)


def test_late_gradients_warn_once():
    def check(comm):
        optimizer, values = begin(comm, "adam", compress_within_node=True)
        notices = []
        for step in range(6):
            for number, place in enumerate(optimizer.gradients):
                place[...] = gradient(0, step, number)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step(values, HYPERS, [True, step > 3])
            notices.append([str(warning.message) for warning in caught])
        return notices

    (notices,) = run(1, check)
    assert [len(messages) for messages in notices] == [0, 0, 0, 0, 1, 0]
    assert notices[4][0].startswith("OneBit adam: weights without a gradient in the first 2 steps")


def test_a_skipped_step_is_reported():
    def check(comm):
        optimizer, values = begin(comm, "adam")
        for place in optimizer.gradients:
            place[...] = np.nan if comm.rank else 1
        assert not optimizer.step(values, HYPERS, [True, True], skip=True)
        assert optimizer.state()["steps"] == 0

    run(2, check)


def test_mismatched_states_are_refused():
    adam, lamb = OneBitOptimizer(settings("adam")), OneBitOptimizer(settings("lamb"))
    states = [begun.state() for begun in run(1, lambda comm: [begin(comm, kind)[0] for kind in LIMITS])[0]]
    adam.check_state(states[0])
    lamb.check_state(states[1])
    for optimizer, state in ((adam, {}), (adam, states[1]), (lamb, states[0])):
        with pytest.raises(UsageError, match=f"not a state of {optimizer.settings.kind}"):
            optimizer.check_state(state)
    with pytest.raises(UsageError, match="freeze_step=2, but this optimizer has 3: they must be equal"):
        OneBitOptimizer(settings("adam", 3)).check_state(states[0])


def test_different_options_are_an_error():
    def check(comm):
        with pytest.raises(MismatchError, match=r"OneBit adam.*floor"):
            begin(comm, "adam", variance_floor=0.1 * comm.rank)

    run(2, check)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze_step": 0}, "OneBit adam: freeze_step must be at least 1, got 0"),
        ({"variance_floor": 1.0}, "OneBit adam: variance_floor.* got 1.0"),
        ({"variance_floor": float("nan")}, "variance_floor"),
    ],
)
def test_wrong_settings_are_refused_before_communication(options, message):
    with pytest.raises(UsageError, match=message):
        settings("adam", **options)


def test_wrong_dtypes_are_refused():
    settings("adam").check_dtype("float32", "w")
    settings("adam").check_dtype("float16", "w", ("float32", "float16"))
    with pytest.raises(UsageError, match=r"OneBit adam: parameters must be float32, .*; got float16 \(w\)"):
        settings("adam").check_dtype("float16", "w")


@pytest.mark.parametrize(
    "change",
    [{"lr": -1.0}, {"eps": 0.0}, {"beta1": 1.0}, {"beta2": -0.1}, {"weight_decay": -0.1}, {"lr": float("nan")}],
    ids=str,
)
def test_wrong_hyperparameters_of_a_step_are_refused(change):
    right: dict[str, Any] = {"lr": 0.1, "beta1": 0.0, "beta2": 0.9, "eps": 1e-8}
    check_hyper("OneBitAdam", Hyperparameters(**right))
    with pytest.raises(UsageError, match="OneBitAdam: expected lr >= 0, eps > 0"):
        check_hyper("OneBitAdam", Hyperparameters(**{**right, **change}))
