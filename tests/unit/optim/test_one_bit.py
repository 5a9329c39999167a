"""1-bit Adam and 1-bit LAMB against plain models of them, without and with the loss of signs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from commlib.compress.schemes.all_to_all import AllToAll
from commlib.errors import MismatchError, UsageError
from commlib.optim.one_bit_adam import OneBitAdam
from commlib.optim.one_bit_lamb import CoefficientLimits, OneBitLAMB
from commlib.optim.one_bit_moments import Hyperparameters, Moments
from tests.bodies.loopback import run
from tests.late import LATE
from tests.unit.compress.known_codecs import Exact

SHAPES = {"w": 30, "b": 7, "none": 0, "late": 12}
HYPER = Hyperparameters(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8)
LAYOUTS = [[0], [0, 1], [0, 0, 1, 1], [0, 1, 2]]
layouts = pytest.mark.parametrize("nodes", LAYOUTS, ids=lambda nodes: "".join(map(str, nodes)))


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile everything here: on a fresh machine it takes longer than ranks are given to end."""
    for kind in ("adam", "lamb"):
        run(2, partial(train, kind=kind, steps=5), nodes=[0, 1])


def make(comm: Any, kind: str = "adam", freeze_step: int = 3, **options: Any) -> Any:
    moments = Moments(comm, list(SHAPES.items()), freeze_step, **options)
    return OneBitAdam(moments) if kind == "adam" else OneBitLAMB(moments, CoefficientLimits())


def start() -> list[Any]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal(count).astype(np.float32) for count in SHAPES.values()]


def gradients(rank: int, step: int) -> list[Any]:
    """Gradients that are as large as their parameter's number + 1; the last parameter's second half has none."""
    rng = np.random.default_rng((rank, step))
    gradients_ = [(n + 1) * (1 + rng.standard_normal(count)) for n, count in enumerate(SHAPES.values())]
    gradients_[3][6:] = 0
    return [values.astype(np.float32) for values in gradients_]


def step_once(optimizer: Any, values: Any, given: Any, hyper: Hyperparameters = HYPER, **options: Any) -> bool:
    for number, (parameter, gradient) in enumerate(zip(optimizer.moments.parameters, given, strict=True)):
        optimizer.moments.used[number] = gradient is not None
        parameter.gradient[...] = 0 if gradient is None else gradient
    is_taken: bool = optimizer.step(values, [hyper] * len(values), **options)
    return is_taken


def train(comm: Any, kind: str, steps: int, hyper: Hyperparameters = HYPER, **options: Any) -> list[Any]:
    optimizer, values = make(comm, kind, **options), start()
    for step in range(steps):
        assert step_once(optimizer, values, gradients(comm.rank, step), hyper)
    return values


# Models in float64. `mean` of gradients, because they are compared with lossless runs.


def raised(second: Any, floor: float) -> Any:
    least = floor**2 * second.sum() / max(1, np.count_nonzero(second))
    return np.where(second > 0, np.maximum(second, least), 0)


def adam(ranks: int, steps: int, hyper: Hyperparameters, freeze_step: int = 3, floor: float = 0.03) -> list[Any]:
    values = [x.astype(np.float64) for x in start()]
    firsts, seconds = ([np.zeros(len(x)) for x in values] for _ in range(2))
    for step in range(steps):
        means = [np.mean(own, 0) for own in zip(*(gradients(rank, step) for rank in range(ranks)), strict=True)]
        for value, first, second, g in zip(values, firsts, seconds, means, strict=True):
            if not hyper.decoupled:
                g = g + hyper.weight_decay * value
            first += (1 - hyper.beta1) * (g - first)
            if step < freeze_step:
                second += (1 - hyper.beta2) * (g * g - second)
            corrected = second / (1 - hyper.beta2 ** min(step + 1, freeze_step))
            if hyper.decoupled:
                value *= 1 - hyper.lr * hyper.weight_decay
            value -= hyper.lr * first / (1 - hyper.beta1 ** (step + 1)) / (np.sqrt(corrected) + hyper.eps)
            if step == freeze_step - 1:
                second[:] = raised(second, floor)
    return values


def lamb(ranks: int, steps: int, hyper: Hyperparameters, freeze_step: int = 3, floor: float = 0.03) -> list[Any]:
    values, limits = [x.astype(np.float64) for x in start()], CoefficientLimits()
    memory: list[dict[str, Any]] = [
        {"m": np.zeros(len(x)), "v": np.zeros(len(x)), "average": 0.0, "weight": 0.0, "last": 1.0} for x in values
    ]
    for step in range(steps):
        means = [np.mean(own, 0) for own in zip(*(gradients(rank, step) for rank in range(ranks)), strict=True)]
        for value, of, g in zip(values, memory, means, strict=True):
            of["m"] = of["m"] + (1 - hyper.beta1) * (g - of["m"])
            if step <= freeze_step - 1:
                of["v"] = of["fresh"] = of["v"] + (1 - hyper.beta2) * (g * g - of["v"])
            else:
                of["fresh"] = of["fresh"] + (1 - hyper.beta2) * (g * g - of["fresh"])
            first = of["m"] / (1 - hyper.beta1 ** (step + 1))
            root = np.sqrt(of["v"] / (1 - hyper.beta2 ** min(step + 1, freeze_step))) + hyper.eps
            fresh = np.sqrt(of["fresh"] / (1 - hyper.beta2 ** (step + 1))) + hyper.eps
            plain = first / root
            update = plain + hyper.weight_decay * value
            norms = np.linalg.norm(value), np.linalg.norm(update)
            if step < freeze_step:
                coefficient = 1.0
                if min(norms) > 0:
                    coefficient = np.clip(norms[0] / norms[1], limits.min_coeff, limits.max_coeff)
                    of["average"] = 0.9 * of["average"] + 0.1 * coefficient
                    of["weight"] = 0.9 * of["weight"] + 0.1
            else:
                factor = (root / fresh)[of["v"] > 0].max(initial=0)
                share = min(1, np.linalg.norm(plain) / norms[1]) if norms[1] else 1
                factor = np.clip(factor * share + 1 - share, limits.factor_min, limits.factor_max)
                of["last"] = np.clip(factor, 0.9 * of["last"], 1.1 * of["last"])
                coefficient = of["last"] * (of["average"] / of["weight"] if of["weight"] else 1)
            value -= hyper.lr * coefficient * update
            if step == freeze_step - 1:
                of["v"] = of["fresh"] = raised(of["v"], floor)
    return values


@pytest.mark.parametrize("kind", ["adam", "lamb"])
@pytest.mark.parametrize(
    "hyper",
    [HYPER, Hyperparameters(0.02, 0.8, 0.95, 1e-6, 0.1), Hyperparameters(0.02, 0.8, 0.95, 1e-6, 0.1, decoupled=True)],
    ids=["plain", "decay", "decoupled"],
)
@pytest.mark.parametrize("floor", [0.0, 0.5])
@layouts
def test_a_lossless_codec_gives_the_definition(kind, hyper, nodes, floor):
    expected = {"adam": adam, "lamb": lamb}[kind](len(nodes), 9, hyper, floor=floor)
    options = {"scheme": AllToAll(Exact()), "floor": floor}
    for values in run(len(nodes), lambda comm: train(comm, kind, 9, hyper, **options), nodes=nodes):
        for got, wanted in zip(values, expected, strict=True):
            # A step has about 20 roundings of what it adds, up to 10 lr, and one of the value, below 4; 9 steps. Where
            # the mean gradient is near 0, its own rounding (2^-24 of 8, in a root of 0.1) counts for more: 100 of both.
            np.testing.assert_allclose(got, wanted, rtol=0, atol=100 * 9 * 2.0**-24 * (10 * hyper.lr + 4 / 100))


@pytest.mark.parametrize("kind", ["adam", "lamb"])
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("nodes", [[0, 1, 2], [0, 0, 1, 1], [0, 0]], ids=lambda nodes: "".join(map(str, nodes)))
def test_signs_leave_all_ranks_with_the_same_bits(kind, within, nodes):
    results = run(len(nodes), lambda comm: train(comm, kind, 12, within_node=within), nodes=nodes)
    for values in results:
        assert [x.tobytes() for x in values] == [x.tobytes() for x in results[0]]
        assert all(np.isfinite(x).all() for x in values)
    compressed = within or len(set(nodes)) > 1
    expected = {"adam": adam, "lamb": lamb}[kind](len(nodes), 12, HYPER)[0]
    assert (np.abs(results[0][0] - expected).max() > 1e-3) == compressed  # signs do lose something


def test_one_bit_adam_converges_like_adam():
    """Least squares on data that is split among 3 ranks: the final loss is near Adam's, and far below the start."""
    rng = np.random.default_rng(5)
    inputs = rng.standard_normal((96, 30)).astype(np.float32)
    truth = rng.standard_normal(30).astype(np.float32)
    targets = inputs @ truth + 0.5 * rng.standard_normal(96).astype(np.float32)

    def loss(w):
        return float(np.mean((inputs @ w - targets) ** 2))

    def fit(comm, freeze_step):
        moments = Moments(comm, [("w", 30)], freeze_step)
        optimizer, w = OneBitAdam(moments), np.zeros(30, np.float32)
        rows = slice(comm.rank, None, comm.size)
        for step in range(400):
            error = inputs[rows] @ w - targets[rows]
            moments.parameters[0].gradient[...] = 2 * inputs[rows].T @ error / len(error)
            moments.used[:] = 1
            optimizer.step([w], [Hyperparameters(0.1 * 0.99**step, 0.9, 0.999, 1e-8)])
        return w

    plain, signs = (run(3, partial(fit, freeze_step=freeze), nodes=[0, 1, 2])[0] for freeze in (1000, 60))
    best = loss(np.linalg.lstsq(inputs, targets)[0])
    assert loss(np.zeros(30)) > 50 * best
    # Seeds 0 to 5 ended, in shares of the best loss: Adam at 1.000, signs after 60 of 400 steps at 1.000 to 1.023.
    assert loss(plain) < 1.005 * best
    assert loss(signs) < 1.1 * best


def test_small_second_moments_do_not_cause_divergence():
    """Gradients of an element grow late: divided by the root of the earlier small ones, steps of momentum diverge.

    With a gradient w they do beyond lr / root = 2 (1 + beta1) / (1 - beta1) = 38. Here that is 0.01 / 1e-4 = 100, or
    0.01 / 0.03 with the floor: the other elements' root is about 1.
    """

    def fit(comm, floor):
        moments = Moments(comm, [("w", 8)], 10, floor=floor)
        optimizer, w = OneBitAdam(moments), np.ones(8, np.float32)
        for step in range(60):
            moments.parameters[0].gradient[...] = w
            if step < 10:
                moments.parameters[0].gradient[3] *= 1e-4
            moments.used[:] = 1
            optimizer.step([w], [Hyperparameters(0.01, 0.9, 0.999, 1e-8)])
        return np.abs(w).max()

    bounded, diverged = (run(2, partial(fit, floor=floor), nodes=[0, 1])[0] for floor in (0.03, 0.0))
    assert bounded < 1 and diverged > 100


@pytest.mark.parametrize("kind", ["adam", "lamb"])
def test_parameters_without_a_gradient_before_the_freeze_do_not_change(kind):
    def check(comm):
        optimizer, values = make(comm, kind), start()
        for step in range(6):
            given = gradients(comm.rank, step)
            step_once(optimizer, values, given)
        np.testing.assert_array_equal(values[3][6:], start()[3][6:])
        assert (values[3][:6] != start()[3][:6]).all()
        assert not optimizer.moments.has_late_gradients
        given[3][8] = 1
        before = values[3].copy()
        step_once(optimizer, values, given)
        np.testing.assert_array_equal(values[3][6:], before[6:])
        assert optimizer.moments.has_late_gradients

    run(2, check, nodes=[0, 1])


@pytest.mark.parametrize("kind", ["adam", "lamb"])
@pytest.mark.parametrize("nodes", [[0, 1], [0, 0]], ids=["01", "00"])
def test_parameters_without_a_gradient_on_any_rank_do_not_change(kind, nodes):
    """In both phases; with a gradient on one rank they are trained on all ranks."""

    def check(comm):
        optimizer, values = make(comm, kind, freeze_step=2), start()
        hyper = Hyperparameters(0.01, 0.9, 0.99, 1e-8, weight_decay=0.1)
        for step in range(5):
            given: list[Any] = gradients(comm.rank, step)
            before = [x.copy() for x in values]
            given[0] = None if step in (1, 3) else given[0]
            given[1] = None if comm.rank == 0 else given[1]
            step_once(optimizer, values, given, hyper)
            assert np.array_equal(values[0], before[0]) == (step in (1, 3))
            assert (values[1] != before[1]).all()
        return [x.tobytes() for x in values]

    one, other = run(2, check, nodes=nodes)
    assert one == other


@pytest.mark.parametrize("kind", ["adam", "lamb"])
@pytest.mark.parametrize("nodes", [[0, 1], [0, 0]], ids=["01", "00"])
def test_a_skipped_step_leaves_no_trace(kind, nodes):
    def check(comm, spoiled):
        optimizer, values = make(comm, kind), start()
        for step in range(8):
            if spoiled and step % 2:
                before, bad = [x.copy() for x in values], gradients(comm.rank, 100 + step)
                if comm.rank == 1:
                    bad[0][3] = np.inf
                assert not step_once(optimizer, values, bad, skip=True)
                for one, other in zip(values, before, strict=True):
                    np.testing.assert_array_equal(one, other)
            assert step_once(optimizer, values, gradients(comm.rank, step), skip=True)
        return [x.tobytes() for x in values]

    results = [run(2, partial(check, spoiled=spoiled), nodes=nodes) for spoiled in (False, True)]
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", ["adam", "lamb"])
@pytest.mark.parametrize("nodes", [[0, 1], [0, 0]], ids=["01", "00"])
def test_nonfinite_gradients_are_visible_unless_steps_are_skipped(kind, nodes):
    def check(comm):
        optimizer, values = make(comm, kind), start()
        for step in range(5):
            given = gradients(comm.rank, step)
            if comm.rank == 1 and step == 4:
                given[0][3] = np.nan
            assert step_once(optimizer, values, given)
        assert np.isnan(values[0][3])

    run(2, check, nodes=nodes)


@pytest.mark.parametrize("at", [2, 5])
def test_training_continues_from_a_state(at):
    def check(comm):
        first, values = make(comm), start()
        for step in range(at):
            step_once(first, values, gradients(comm.rank, step))
        second, copies = make(comm), [x.copy() for x in values]
        for one, other in zip(first.moments.parameters, second.moments.parameters, strict=True):
            other.first[...], other.second[...] = one.first, one.second
        state = first.moments.state()
        assert bool(state) == (at == 5)
        second.moments.load(first.moments.steps, state)
        for step in range(at, at + 4):
            for optimizer, of in ((first, values), (second, copies)):
                step_once(optimizer, of, gradients(comm.rank, step))
        assert [x.tobytes() for x in values] == [x.tobytes() for x in copies]

    run(2, check, nodes=[0, 1])


def test_different_options_are_an_error():
    def check(comm):
        with pytest.raises(MismatchError, match="freeze_step"):
            make(comm, freeze_step=3 + comm.rank)

    run(2, check)


def test_wrong_options_are_refused():
    def check(comm):
        with pytest.raises(UsageError, match="freeze_step must be at least 1"):
            make(comm, freeze_step=0)
        with pytest.raises(UsageError, match="floor"):
            make(comm, floor=1)

    run(1, check)
    for options in ({"min_coeff": 0}, {"factor_min": 5}, {"coeff_beta": 1}, {"factor_threshold": 0}):
        with pytest.raises(UsageError, match="OneBitLAMB"):
            CoefficientLimits(**options)


@pytest.mark.parametrize("kind", ["adam", "lamb"])
def test_device_parameters_are_refused_before_anything_is_sent(kind):
    def refuse(comm):
        optimizer, values = make(comm, kind), start()
        there = [LATE.put(value) if number == 1 and comm.rank else value for number, value in enumerate(values)]
        if comm.rank:
            with pytest.raises(UsageError, match="on the host only, but b is on late"):
                optimizer.step(there, [HYPER] * len(values))
        assert step_once(optimizer, values, gradients(comm.rank, 0))

    run(2, refuse)
