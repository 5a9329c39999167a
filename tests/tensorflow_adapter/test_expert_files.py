"""Files of experts contain the state of any optimizer: after loading, training continues unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from commlib import Communicator
from commlib.errors import MismatchError, UsageError
from commlib.expert import Experts
from commlib_tensorflow.expert import MoE, load_experts, rebalance_experts, save_experts

O = keras.optimizers  # noqa: E741
WIDTH = 4

MAKERS: dict[str, Callable[[], Any]] = {
    "momentum under a schedule": lambda: O.SGD(O.schedules.CosineDecay(0.1, 10), momentum=0.9),
    "warm-up from 0": lambda: O.SGD(O.schedules.PolynomialDecay(0.0, 10, 0.1), momentum=0.9, nesterov=True),
    "a schedule that has ended at 0": lambda: O.SGD(O.schedules.CosineDecay(0.1, 3), momentum=0.9),
    "passes": lambda: O.SGD(O.schedules.CosineDecay(0.1, 20), momentum=0.9, gradient_accumulation_steps=2),
    "amsgrad": lambda: O.AdamW(0.01, amsgrad=True),
    "RMSprop": lambda: O.RMSprop(0.01, momentum=0.9, centered=True),
    "Nadam": lambda: O.Nadam(0.01),
    "Adamax": lambda: O.Adamax(0.01),
    "Adagrad": lambda: O.Adagrad(0.01),
    "Adadelta": lambda: O.Adadelta(0.01),
    "Ftrl": lambda: O.Ftrl(0.01),
    "Lion": lambda: O.Lion(0.01),
    "averages": lambda: O.Adam(0.01, use_ema=True, ema_momentum=0.9),
    "loss scale": lambda: O.LossScaleOptimizer(O.Adam(0.01)),
    "two": lambda: O.MultiOptimizer(O.OptimizerMap(O.Adam(0.01), {".*router": O.SGD(0.05, momentum=0.9)})),
}


def build_model(comm: Communicator, make: Callable[[], Any] | None = None) -> Any:
    layer = MoE(Experts(4, hidden=3, shared=1, bias_rate=0.1), comm, name="mixture")
    model = keras.Sequential([keras.Input((WIDTH,)), layer])
    optimizer = None if make is None else make()
    if optimizer is not None:
        optimizer.build(model.trainable_variables)
    return model, optimizer


def step(model: Any, optimizer: Any, numbers: Any) -> None:
    """Update with random gradients: those of experts differ among ranks, as their values do."""
    layer = model.layers[0]
    for number in numbers:
        draw, own = np.random.default_rng(number), np.random.default_rng([number, layer.ranks.axis.rank])
        stacks = set(map(id, layer.stacks))
        variables = model.trainable_variables
        gradients = [(own if id(v) in stacks else draw).normal(size=v.shape).astype(np.float32) for v in variables]
        optimizer.apply([keras.ops.convert_to_tensor(one) for one in gradients], variables)


def kept(optimizer: Any) -> dict[str, Any]:
    left_out = ("learning_rate", "step_counter", "dynamic_scale")
    return {
        f"{place} {variable.path}": variable.numpy()
        for place, variable in enumerate(optimizer.variables)
        if variable.name not in left_out
    }


def same(comm: Communicator, path: Path) -> str:
    return str(comm.broadcast_object(str(path)))


@pytest.mark.parametrize("name", MAKERS)
def test_a_loaded_file_continues_training(comm: Communicator, tmp_path: Path, name: str) -> None:
    """Regression: the first momentum returned with step 0's rate, at a rate of 0 as NaN; most other state was lost."""
    if comm.size == 3:
        pytest.skip("4 experts")
    make, path = MAKERS[name], same(comm, tmp_path / "experts")
    model, optimizer = build_model(comm, make)
    step(model, optimizer, range(6))
    save_experts(path, model, optimizer)
    comm.barrier()
    other, loaded = build_model(comm, make)
    step(other, loaded, [100])  # its state so far is discarded
    load_experts(path, other, loaded)
    for one, got in zip(kept(optimizer).items(), kept(loaded).values(), strict=True):
        np.testing.assert_array_equal(got, one[1], err_msg=one[0])
    for each in ((model, optimizer), (other, loaded)):
        step(*each, range(6, 10))
    for expected, weight in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(weight, expected, err_msg=expected.path)


def test_state_of_another_optimizer_is_refused(comm: Communicator, tmp_path: Path) -> None:
    """Regression: it was ignored or misread: RMSprop's squares became Adam's second moments."""
    if comm.size == 3:
        pytest.skip("4 experts")
    path = same(comm, tmp_path / "experts")
    model, optimizer = build_model(comm, lambda: O.RMSprop(0.01, momentum=0.9))
    step(model, optimizer, range(1))
    save_experts(path, model, optimizer)
    comm.barrier()
    other, adam = build_model(comm, lambda: O.Adam(0.01))
    before = [weight.numpy() for weight in (*other.weights, *adam.variables)]
    text = r"layer 0 \(.*\): the .* router in the file is keras.RMSprop.momentums.* Adam keeps first, second\..* no opt"
    with pytest.raises(UsageError, match=text):
        load_experts(path, other, adam)
    with pytest.raises(UsageError, match="has not been built"):
        load_experts(path, other, O.RMSprop(0.01, momentum=0.9))
    for weight, value in zip((*other.weights, *adam.variables), before, strict=True):
        np.testing.assert_array_equal(weight, value, err_msg=weight.path)
    load_experts(path, other)
    np.testing.assert_array_equal(other.layers[0].stacks[0], model.layers[0].stacks[0])


def test_saving_between_passes_is_refused(comm: Communicator, tmp_path: Path) -> None:
    """Regression: the accumulated gradients are local to each rank, and were missing from the file."""
    model, optimizer = build_model(comm, MAKERS["passes"])
    step(model, optimizer, range(3))
    with pytest.raises(UsageError, match=r"has added up 1 of 2 passes .* save after the last pass of a step"):
        save_experts(same(comm, tmp_path / "experts"), model, optimizer)


@pytest.mark.ranks(min=2)
def test_ranks_with_different_optimizers_are_refused(comm: Communicator, tmp_path: Path) -> None:
    """Regression: one rank's momentum and another's first moments were gathered into one array."""
    model, optimizer = build_model(comm, (lambda: O.Adam(0.01)) if comm.rank else (lambda: O.SGD(0.1, momentum=0.9)))
    with pytest.raises(MismatchError, match=r"save_experts: .*router/update"):
        save_experts(same(comm, tmp_path / "experts"), model, optimizer)


def test_a_model_without_mixtures_is_refused(comm: Communicator, tmp_path: Path) -> None:
    plain: Any = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    path: Any = same(comm, tmp_path / "experts")
    calls: dict[str, Any] = {
        "save_experts": lambda model: save_experts(path, model),
        "load_experts": lambda model: load_experts(path, model),
        "rebalance_experts": rebalance_experts,
    }
    for verb, call in calls.items():
        with pytest.raises(UsageError, match=f"{verb}: Sequential has no mixture of experts"):
            call(plain)
        with pytest.raises(UsageError, match=f"{verb}: model must be a keras Layer, got '.*experts'"):
            call(path)
