"""Verification compares a cut model with the whole one on copies: the model and random numbers do not change."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import MismatchError, UsageError
from commlib_torch import pipeline
from commlib_torch.pipelines._parts import Layers
from tests.inputs.torch_pipelines import WIDTH, batch, in_float64

__all__ = ["in_float64"]  # a fixture


class Busy(nn.Module):
    """A layer that counts, keeps values, draws random numbers and normalises."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.calls, self.seen, self.cache = 0, list[Any](), dict[str, Any]()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.seen.append(x)
        self.cache["last"] = x
        self.count += 1
        return F.dropout(self.norm(self.linear(x)), 0.5, self.training)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Busy(), Busy(), Busy()
        self.head = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.third(self.second(self.first(x)))) + self.bias


def busy(*, traced: bool) -> nn.Module:
    torch.manual_seed(0)
    return Model() if traced else nn.Sequential(Busy(), Busy(), Busy(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("what", ["verify", "example", "split", "schedule"])
def test_verification_changes_nothing(comm: Any, traced: bool, what: str) -> None:
    """Regression: measuring layers called hooks, counted calls and filled lists."""
    torch.manual_seed(0)
    model, called = busy(traced=traced), list[str]()
    for name, module in model.named_modules():
        if name:
            module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
            module.register_forward_hook(lambda *_, name=name: called.append(name))
            module.register_full_backward_hook(lambda *_, name=name: called.append(name))
    for name, weight in model.named_parameters():
        weight.grad = torch.ones_like(weight)
        weight.register_hook(lambda gradient, name=name: called.append(name))
    x, y = batch()
    options: dict[str, Any] = {"verify": (x, y)} if what == "verify" else {"example": x[:4]}
    options |= {"split": {"split": "time"}, "schedule": {"schedule": "auto"}}.get(what, {})
    before, inputs = copy.deepcopy(model.state_dict()), (x.clone(), y.clone())
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss, **options)
    assert not called
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[2])
    np.testing.assert_equal(np.random.get_state(legacy=False), states[1])
    assert torch.equal(x, inputs[0]) and torch.equal(y, inputs[1])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for weight in model.parameters():
        assert weight.grad is not None and (weight.grad == 1).all()
    for module in model.modules():
        assert module.training
        if isinstance(module, Busy):
            assert module.calls == 0 and not module.seen and not module.cache
    pipe.step(x, y)
    assert called
    pipe.close()


def _with_two(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)


class Centred(nn.Module):
    """A layer that mixes rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x - x.mean(0))


class Asking(nn.Module):
    """A layer with a condition that torch.fx evaluates differently."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        if type(x) is Tensor:
            x = x * 2
        return self.b(torch.tanh(x) * 3.0 + 1.0)


@pytest.mark.ranks(min=2)
def test_a_difference_is_named_on_all_ranks(comm: Any) -> None:
    x, y = batch()
    stage = r"the output of b \(stage \d\) differs"
    several: tuple[dict[str, Any], ...] = {"verify": (x, y)}, {"example": x if comm.rank == 0 else None}
    torch.manual_seed(0)
    model = Asking()
    for options in several:
        with pytest.raises(UsageError, match=f"the cut model differs from the original, in training: {stage}"):
            pipeline(model, comm, microbatches=2, loss=F.mse_loss, **options)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(comm.size)]
    with pytest.raises(
        UsageError, match="the cut model differs from the original, in a step in evaluation mode: the loss differs"
    ):
        pipeline([*layers, Centred()], comm, microbatches=2, loss=F.mse_loss, verify=(x, y), weigh="rows")
    with pytest.raises(MismatchError, match=r"verify.*a value of the batch"):
        pipeline(layers, comm, microbatches=2, loss=F.mse_loss, verify=(x + comm.rank, y))
    layers[1].weight.data += comm.rank
    with pytest.raises(MismatchError, match=r"verify.*1\.weight"):
        pipeline(layers, comm, microbatches=2, loss=F.mse_loss, verify=(x, y))


def test_a_lost_gradient_is_named(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage may lose it in any way."""
    cut = Layers.cut

    def detached(forward: Any) -> Any:
        return lambda values: {name: value.detach() for name, value in forward(values).items()}

    def broken(self: Any, counts: Any) -> Any:
        result = cut(self, counts)
        for part in result.parts:
            part.forward = detached(part.forward)
        return result

    monkeypatch.setattr(Layers, "cut", broken)
    x, y = batch()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(comm.size + 1)))
    with pytest.raises(UsageError, match=r"the gradient of input 0 is missing"):
        pipeline(model, comm, microbatches=2, loss=F.mse_loss, verify=(x, y))


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "pipedream"])
def test_valid_models_pass(comm: Any, name: str) -> None:
    """Models with random numbers, with several inputs or none, and with tied weights."""
    x, y = batch()
    options: dict[str, Any] = {"schedule": name, "microbatches": 4, "loss": F.mse_loss}
    if name == "pipedream":
        options["optimizer"] = lambda named: torch.optim.SGD([weight for _, weight in named], lr=0.1)

    class Several(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
            if name != "pipedream":
                self.layers[-1].weight = self.layers[0].weight

        def forward(self, x: Tensor, by: Any = None, places: Any = None) -> Any:
            for layer in self.layers:
                x = F.dropout(torch.tanh(layer(x)), 0.3, self.training) + x
            return x if by is None else x * by + places

    count = 2 * comm.size + 1
    torch.manual_seed(0)
    for given in (x, (x, x + 1, x.double())):
        pipeline(Several(count), comm, verify=(given, y), **options).close()
    pipeline(
        [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(count)], comm, verify=(x, y), **options
    ).close()
    with pytest.raises(UsageError, match="verify= has 3 values"):
        pipeline(Several(count), comm, verify=(x, y, x), **options)


def test_an_example_that_runs_in_one_mode_is_enough(comm: Any) -> None:
    """Batch norm does not train on one row; a failure in both modes is reported."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(comm.size)))
    pipeline(model, comm, microbatches=8, loss=F.mse_loss, example=batch(1)[0]).close()
    if comm.rank == 0:
        with pytest.warns(UserWarning, match="the split model is not compared with the whole model"):
            pipeline(model, comm, microbatches=8, loss=F.mse_loss, example=torch.ones(2, 2)).close()
    else:
        pipeline(model, comm, microbatches=8, loss=F.mse_loss, example=torch.ones(2, 2)).close()


class Owner:
    """An object with a hook and an attribute that cannot be copied."""

    def __init__(self) -> None:
        self.lock, self.calls = threading.Lock(), 0

    def hook(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls += 1


def test_uncopyable_objects_are_shared(comm: Any) -> None:
    """A lock in a module, or in the owner of a hook, does not prevent measuring and comparing."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(comm.size + 1)))
    vars(model[0])["lock"] = threading.Lock()
    owner = Owner()
    model[0].register_forward_hook(owner.hook)
    x, y = batch()
    pipeline(model, comm, microbatches=2, loss=F.mse_loss, example=x, split="time").close()
    pipeline(model, comm, microbatches=2, loss=F.mse_loss, verify=(x, y)).close()
    assert owner.calls == 0


def test_a_forward_that_may_call_the_original_is_not_compared(comm: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(comm.size + 1)))
    forward = model.forward
    model.forward = lambda x: forward(x) + x  # type: ignore[method-assign]
    x, y = batch()
    options: dict[str, Any] = {"microbatches": 2, "loss": F.mse_loss}
    with pytest.raises(UsageError, match="Sequential has a forward set on the object"):
        pipeline(model, comm, verify=(x, y), **options)
    assert all(weight.grad is None for weight in model.parameters())


def test_a_list_with_a_forward_is_compared_as_it_is(comm: Any) -> None:
    """Regression: with an example its layers were called in sequence, so that a valid model was refused."""

    class Looped(nn.ModuleList):
        def forward(self, x: Tensor) -> Any:
            for layer in self:
                x = layer(x) + x
            return x

    x, y = batch()
    model = Looped(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.25)
    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss, example=x[:4])
    torch.testing.assert_close(pipe.evaluate(x, y), F.mse_loss(model(x), y).detach(), rtol=1e-10, atol=0)
    pipe.close()
