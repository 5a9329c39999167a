"""Cuts preserve a model: behaviour that tracing would freeze is handled, or refused by name."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
import random
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import PeerError, UsageError
from commlib_torch import pipeline
from tests.inputs.torch_pipelines import WIDTH, batch, in_float64

__all__ = ["in_float64"]  # a fixture

EXACT = 1e-12  # gradients of microbatches are summed in another order: some ulps of float64


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def assert_as_one_process(
    comm: Any, make: Callable[[], nn.Module], x: Any = None, *, microbatches: int = 2, **options: Any
) -> None:
    """Train twice, evaluate, predict and train again; losses, gradients, outputs and state match one process."""
    whole, model = build(make), build(make)
    pipe = pipeline(model, comm, loss=F.mse_loss, microbatches=microbatches, **options)
    given, y = batch()
    x = given if x is None else x
    args = x if isinstance(x, tuple) else (x,)
    for is_training in (True, True, False, True):
        if is_training:
            loss = F.mse_loss(whole(*copy.deepcopy(args)), y)
            loss.backward()
            torch.testing.assert_close(pipe.step(x, y), loss.detach(), rtol=EXACT, atol=0)
            continue
        whole.eval()
        with torch.no_grad():
            torch.testing.assert_close(
                pipe.evaluate(x, y), F.mse_loss(whole(*copy.deepcopy(args)), y), rtol=EXACT, atol=0
            )
            torch.testing.assert_close(pipe.predict(x), whole(*copy.deepcopy(args)), rtol=EXACT, atol=EXACT)
        whole.train()
    gradients = {name: weight.grad for name, weight in whole.named_parameters(remove_duplicate=False)}
    for name, weight in pipe.named_parameters(remove_duplicate=False):
        if gradients[name] is None:
            assert weight.grad is None or not weight.grad.any(), name
        else:
            torch.testing.assert_close(weight.grad, gradients[name], rtol=EXACT, atol=EXACT, msg=name)
    state = pipe.gather_state_dict()
    assert set(state) == set(whole.state_dict())
    if microbatches == 1:  # a counter of forwards counts microbatches
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=EXACT, atol=EXACT, msg=name)
    pipe.close()


class Two(nn.Module):
    """Two layers, and a function between them."""

    def __init__(self, between: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.a, self.b, self.between = linear(), linear(), between
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.tanh(self.between(self, self.a(x)))) * 1.5 + 0.5


class Chain(nn.Module):
    """Submodules that behave like `Two`: as many as there may be ranks."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


# Dependence on the mode


def test_the_mode_is_read_at_run_time(comm: Any) -> None:
    """Regression: `self.training` was a constant of the trace, so that dropout stayed on in evaluation."""

    def between(self: Any, x: Tensor) -> Any:
        x = F.dropout(x, 0.0 if self.training else 0.5, training=not self.training and x is None)
        return x * (2.0 if self.training else 3.0)

    assert_as_one_process(comm, lambda: Two(between))
    x, y = batch()
    model = build(lambda: Two(lambda self, x: F.dropout(x, 0.5, training=self.training)))
    whole = copy.deepcopy(model).eval()
    pipe = pipeline(model, comm, loss=F.mse_loss, microbatches=2)
    torch.testing.assert_close(pipe.evaluate(x, y), F.mse_loss(whole(x), y).detach(), rtol=EXACT, atol=0)
    torch.manual_seed(3)
    assert pipe.step(x, y) != pipe.step(x, y)
    pipe.close()


def test_a_submodule_that_depends_on_training_is_not_traced(comm: Any) -> None:
    def between(self: Any, x: Tensor) -> Any:
        if self.training:
            x = torch.tanh(x)
        return x

    assert_as_one_process(comm, lambda: Chain(lambda: Two(between)))
    with pytest.raises(UsageError, match="Two behaves differently in training and in evaluation"):
        pipeline(Two(between), comm, microbatches=2)


def test_a_model_traced_in_evaluation_mode_trains(comm: Any) -> None:
    def make() -> nn.Module:
        return Two(lambda self, x: x * (2.0 if self.training else 3.0)).eval()

    x, y = batch()
    whole, pipe = build(make), pipeline(build(make), comm, loss=F.mse_loss, microbatches=2)
    torch.testing.assert_close(pipe.step(x, y), F.mse_loss(whole(x), y).detach(), rtol=EXACT, atol=0)
    pipe.train()
    torch.testing.assert_close(pipe.step(x, y), F.mse_loss(whole.train()(x), y).detach(), rtol=EXACT, atol=0)
    pipe.close()


# State


def test_state_matches_the_model(comm: Any) -> None:
    """Regression: constants and non-persistent buffers were saved, unused weights not; new buffers were ignored."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.unused = linear(), linear(), nn.Sequential(linear(), nn.BatchNorm1d(WIDTH))
            self.mask: Tensor
            self.scale: Tensor
            self.register_buffer("mask", torch.ones(WIDTH), persistent=False)
            self.register_buffer("scale", torch.full((WIDTH,), 2.0))
            self.register_buffer("unused_too", torch.ones(1))

        def forward(self, x: Tensor) -> Any:
            x = self.a(x) * self.mask + torch.ones(WIDTH) * self.scale
            return self.b(x) * (self.scale / 2)

    assert_as_one_process(comm, Model, microbatches=1)
    model = build(Model)
    names = set(vars(model))
    whole = copy.deepcopy(model)
    pipe = pipeline(model.float(), comm, loss=F.mse_loss, microbatches=2).double()
    assert set(vars(model)) == names
    state = {**whole.state_dict(), "scale": torch.full((WIDTH,), 3.0)}
    whole.load_state_dict(state)
    pipe.load_state_dict(state)
    x, y = batch()
    torch.testing.assert_close(pipe.step(x, y), F.mse_loss(whole(x), y).detach(), rtol=EXACT, atol=0)
    pipe.close()


def test_forward_may_change_buffers(comm: Any) -> None:
    """Regression: a forward's update of a buffer was applied once, by the trace."""

    def between(self: Any, x: Tensor) -> Any:
        self.count += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + self.mean

    def make() -> nn.Module:
        return Two(between, count=torch.zeros((), dtype=torch.int64), mean=torch.zeros(WIDTH))

    assert_as_one_process(comm, make, microbatches=1)
    assert_as_one_process(comm, lambda: Chain(make), microbatches=1)

    def assigned(self: Any, x: Tensor) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x + self.mean

    assert_as_one_process(comm, lambda: Chain(lambda: Two(assigned, mean=torch.zeros(WIDTH))), microbatches=1)
    with pytest.raises(UsageError, match="Two assigns to the buffer 'mean'"):
        pipeline(Two(assigned, mean=torch.zeros(WIDTH)), comm, microbatches=1)


def test_tensors_may_be_created_from_input_shapes(comm: Any) -> None:
    """Regression: torch.fx could not trace `torch.arange(x.shape[0])`."""

    def between(self: Any, x: Tensor) -> Any:
        rows, width = x.shape
        noise = torch.rand(rows, width) * torch.zeros(width, dtype=x.dtype)
        return x + torch.arange(width, device=x.device) + torch.ones(rows, 1) + noise

    assert_as_one_process(comm, lambda: Two(between), microbatches=3)


def test_a_constant_changed_by_forward_is_recreated(comm: Any) -> None:
    def between(self: Any, x: Tensor) -> Any:
        total = torch.zeros(WIDTH)
        total += x.sum(0)
        return x + total

    assert_as_one_process(comm, lambda: Two(between), microbatches=1)


LISTS: list[list[Any]] = []


def counting(self: Any, x: Tensor) -> Any:
    self.calls += 1
    return x


def keeping(self: Any, x: Tensor) -> Any:
    LISTS[-1].append(x.detach())
    return x


@functools.lru_cache
def columns(width: Any) -> Tensor:
    return torch.arange(width) * 1.0


def remembering(self: Any, x: Tensor) -> Any:
    return x + columns(x.shape[1])


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (lambda self, x: x + random.random(), "draws random numbers"),
        (lambda self, x: x + torch.rand(WIDTH), "draws random numbers"),
        (counting, "sets self.calls"),
        (lambda self, x: self.cache.append(x) or x, "changes self.cache"),
        (keeping, "changes the global LISTS"),
        (remembering, "stores a value"),
        (lambda self, x: x * 2 if x.sum() > 1e9 else x, "cannot be traced"),
        (lambda self, x: x * 2 if isinstance(x, Tensor) else x, "tests the type of a value"),
        (lambda self, x: x * 2 if torch.is_tensor(x) else x, "tests the type of a value"),
    ],
)
def test_side_effects_are_left_to_a_submodule_or_refused(comm: Any, between: Any, message: str) -> None:
    """Regression: counters counted only the trace, random numbers never changed, and lists contained proxies."""

    def make() -> nn.Module:
        return Two(between, calls=0, cache=[])

    kept: list[Any] = []
    LISTS.append(kept)
    model: Any = build(lambda: Chain(make))
    whole = copy.deepcopy(model)
    pipe = pipeline(model, comm, loss=F.mse_loss, microbatches=2)
    assert not kept and all(part.calls == 0 and not part.cache for part in model.layers)
    state = random.getstate(), torch.get_rng_state()
    x, y = batch()
    loss = pipe.step(x, y)
    if "random" not in message:
        torch.testing.assert_close(loss, F.mse_loss(whole(x), y).detach(), rtol=EXACT, atol=0)
    if "random" in message:
        assert random.getstate() != state[0] or not torch.equal(torch.get_rng_state(), state[1])
    if "self.calls" in message:
        own = [part for part in model.layers if part.calls]
        assert all(part.calls == 2 for part in own) and own
    if "LISTS" in message:
        assert kept and all(isinstance(value, Tensor) for value in kept)
    pipe.close()
    alone: Any = make()
    with pytest.raises(UsageError, match=f"Two {message}"):
        pipeline(alone, comm, microbatches=2)
    assert alone.calls == 0 and not alone.cache


def test_disabled_gradients_stay_disabled(comm: Any) -> None:
    def between(self: Any, x: Tensor) -> Any:
        with torch.no_grad():
            y = torch.tanh(x)
        return y + self.b(x)

    assert_as_one_process(comm, lambda: Two(between))
    assert_as_one_process(comm, lambda: Two(torch.no_grad()(lambda self, x: x * 2)))


# Arguments of a call


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        x = self.layer(x)
        return x if mask is None else x * mask


class WithMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Any:
        for layer in self.layers:
            x = layer(x, mask)
        return x * scale


def test_a_submodule_that_tests_for_none_is_not_traced(comm: Any) -> None:
    """torch.fx passes a proxy, for which `mask is None` is never true."""
    x, mask = batch(seed=5)
    for given in ((x,), (x, mask), (x, mask, 3.0), (x, None, 2.0)):
        assert_as_one_process(comm, WithMask, given)


def test_a_model_that_tests_for_none_is_cut_for_one_case(comm: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x: Tensor, mask: Tensor | None = None, times: int = 1) -> Any:
            x = torch.tanh(self.a(x))
            if mask is not None:
                x = x * mask
            for _ in range(times):
                x = self.b(x)
            return x * 2.0

    x, mask = batch(seed=5)
    assert_as_one_process(comm, Model, (x,))
    assert_as_one_process(comm, Model, (x, mask, 2), example=(x[:2], mask[:2], 2) if comm.rank == 0 else None)
    pipe = pipeline(build(Model), comm, loss=F.mse_loss, microbatches=2)
    if comm.rank == 0 and comm.size == 1:
        with pytest.raises(UsageError, match="forward's mask is a tensor; the model was split for mask = None"):
            pipe.step((x, mask), x)
        with pytest.raises(UsageError, match="forward's times is 2; the model was split for times = 1"):
            pipe.step((x, None, 2), x)
    pipe.close()


def test_arguments_in_containers(comm: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, inputs: dict[str, Any]) -> Any:
            return sum(self.b(self.a(inputs["x"])) * one for one in inputs["by"])

    x, by = batch(seed=5)
    given = ({"x": x, "by": [by, by * 2]},)
    example = ({"x": x[:2], "by": [by[:2], by[:2]]},)
    assert_as_one_process(comm, Model, given, example=example)


# In place


def test_an_in_place_operation_affects_all_users(comm: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = linear(), linear(), linear(), linear()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Any:
            h = self.a(x)
            z = self.b(h * 2.0)
            r = self.relu(h)
            z = self.c(z) + r
            z[:, 0] = 1.0
            return self.d(z) + h + z

    stages = 4 if comm.size in (1, 2, 4) else 3
    split = ["b", "c", "d"][: stages - 1]
    schedule = "interleaved" if stages > comm.size else "1f1b"
    assert_as_one_process(comm, Model, schedule=schedule, split=split, stages=stages)


def test_a_view_changed_in_place_changes_its_base(comm: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = linear(), linear(), linear()

        def forward(self, x: Tensor) -> Any:
            h = self.a(x) * 1.0
            first = h[:, :3]
            z = self.b(x)
            first.mul_(2.0)
            return self.c(z + h)

    assert_as_one_process(comm, Model)
    if comm.size == 2:
        with pytest.raises(UsageError, match="cannot be split before 'b': a value used on both sides is changed"):
            pipeline(Model(), comm, microbatches=2, split=["b"])


class Doubled(nn.Module):
    """A module that begins with an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Any:
        return self.layer(x.mul_(2.0).add_(1.0))


@pytest.mark.parametrize("checkpoint", ["none", "full"])
@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_a_stage_that_begins_in_place(comm: Any, name: str, checkpoint: str) -> None:
    """Regression: it failed at a leaf of autograd; when recomputed, it changed its inputs twice."""
    count = 2 * comm.size

    def make() -> nn.Module:
        return nn.Sequential(Doubled(), *(layer for _ in range(count) for layer in (linear(), Doubled())))

    assert_as_one_process(comm, make, schedule=name, checkpoint=checkpoint)


# Values between stages


@dataclasses.dataclass
class State:
    hidden: Tensor
    layer: int
    more: dict[str, Any]


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, state: Any) -> State:
        if isinstance(state, Tensor):
            state = State(state, 0, {"last": [state.detach()]})
        hidden = self.layer(state.hidden) + state.more["last"][0]
        return State(hidden, state.layer + 1, {"last": [state.hidden]})


class Output(nn.Module):
    def forward(self, state: State) -> Any:
        return state.hidden * state.layer


def test_tensors_in_objects_have_gradients(comm: Any) -> None:
    """Regression: a dataclass unknown to torch was sent whole, which ended its gradient."""
    assert_as_one_process(comm, lambda: nn.Sequential(*(Steps() for _ in range(2 * comm.size)), Output()))


@dataclasses.dataclass
class Outputs(OrderedDict[str, Any]):
    """An output class like those of Hugging Face's models."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


class Pairs(dict[str, Any]):
    pass


@pytest.mark.parametrize("kind", [Outputs, OrderedDict, Pairs])
def test_a_model_s_output_keeps_its_class(comm: Any, kind: Any) -> None:
    """Regression: a subclass of dict became a dict."""
    model = build(lambda: Two(lambda self, x: x))

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Any:
            return kind(logits=self.model(x))

    whole = copy.deepcopy(Wrapped())
    seen: list[Any] = []
    x, y = batch()

    def loss_of(output: Any, y: Tensor) -> Tensor:
        seen.append(output)
        return F.mse_loss(output["logits"], y)

    pipe = pipeline(Wrapped(), comm, microbatches=2, example=x, loss=loss_of)
    loss = F.mse_loss(whole(x)["logits"], y)
    torch.testing.assert_close(pipe.step(x, y), loss.detach(), rtol=EXACT, atol=0)
    assert all(type(output) is kind for output in seen)
    pipe.close()


@pytest.mark.ranks(min=2)
def test_an_unsendable_value_is_named(comm: Any) -> None:
    class Local(nn.Module):
        def forward(self, x: Any) -> Any:
            return lambda: x

    pipe = pipeline([Local()] * comm.size, comm, microbatches=1, loss=F.mse_loss)
    with pytest.raises((UsageError, PeerError)) as caught:
        pipe.step(*batch())
    if comm.rank == 0:
        assert "the values that one stage sends to another (function) cannot be pickled" in str(caught.value)
    pipe.close()


# Containers


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return x + super().forward(x)


class Called(nn.Sequential):
    def __call__(self, x: Tensor) -> Any:
        return x + super().__call__(x)


class Looped(nn.ModuleList):
    def forward(self, x: Tensor) -> Any:
        for layer in self:
            x = layer(x) + x
        return x


class Scaled(nn.Sequential):
    """A sequence with unused state of its own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(1))


class Pair(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, x.tanh()


class OfPair(nn.Module):
    def forward(self, pair: Any, scale: float = 2.0) -> Any:
        return pair[0] * scale + pair[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Residual(linear(), linear()),
        lambda: Looped([linear(), linear()]),
        lambda: Scaled(linear(), linear()),
        lambda: nn.Sequential(linear(), Pair(), OfPair(), linear()),
        lambda: nn.Sequential(Residual(linear(), linear()), nn.Sequential(linear(), Residual(linear()))),
        lambda: nn.Sequential(*[Called(linear()), Called(linear())]),
        lambda: Chain(lambda: Called(linear(), linear())),
        lambda: nn.Sequential(*[linear()] * 3),
        lambda: nn.Sequential(OrderedDict(takes=linear(), gives=linear(), forward_=linear())),
        lambda: Residual(*[nn.utils.parametrizations.weight_norm(linear()) for _ in range(2)]),
    ],
    ids=["forward", "list", "state", "tuple", "nested", "call", "call_within", "twice", "names", "parametrized"],
)
def test_containers(comm: Any, make: Any) -> None:
    """Regression: a sequence with its own forward was cut between layers; a nested tuple became several arguments."""
    if comm.size > 2:
        pytest.skip("two layers")
    assert_as_one_process(comm, make)


def test_a_forward_patched_on_one_module_is_used(comm: Any) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(linear(), linear(), linear(), linear())
        forward = model.forward
        model.forward = lambda x: forward(x) + x  # type: ignore[method-assign]
        return model

    assert_as_one_process(comm, make)


def test_hooks_of_layers_run_and_those_of_dissolved_containers_are_refused(comm: Any) -> None:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2

    def make() -> nn.Module:
        model: Any = Chain(lambda: Two(lambda self, x: x))
        model.layers[0].register_forward_hook(hook)
        model.layers[1].a.register_forward_hook(hook)
        return model  # type: ignore[no-any-return]

    assert_as_one_process(comm, make)
    model: nn.Module
    for model in (nn.Sequential(linear(), linear()), Two(lambda self, x: x)):
        model.register_forward_hook(hook)
        with pytest.raises(UsageError, match=rf"{type(model).__name__} has a hook \(hook\)"):
            pipeline(model, comm, microbatches=2)
    with pytest.raises(UsageError, match="Called has a custom __call__"):
        pipeline(Called(linear(), linear()), comm, microbatches=2)


class Reversed(nn.Sequential):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


def test_a_sequence_that_iterates_in_another_order(comm: Any) -> None:
    """Regression: it was cut in the order of the names."""
    assert_as_one_process(comm, lambda: Reversed(*(layer for _ in range(comm.size) for layer in (linear(), nn.Tanh()))))


# State of a model besides weights and buffers


@dataclasses.dataclass
class Configuration:
    scale: float = 1.0
    calls: int = 0

    @functools.cached_property
    def half(self) -> float:
        return self.scale / 2


class Kept(nn.Module):
    """A module with all kinds of state."""

    calls = 0

    def __init__(self, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.use = linear(), linear(), use
        self.configuration = Configuration()
        self.plain = SimpleNamespace(calls=0)
        self.nested: dict[str, Any] = {"a": {"calls": 0}, "random": random.Random(3), "memory": torch.zeros(WIDTH)}
        self.array = np.zeros(2)
        self.count = itertools.count(1)
        self.numpy, self.random = np.random.default_rng(3), random.Random(3)
        self.memory, self.table = torch.zeros(WIDTH), torch.ones(WIDTH)
        self.number = torch.tensor(2.0)
        self.lazy: Any = None

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.tanh(self.a(x)) * self.use(self, x))


def in_configuration(self: Any, x: Tensor) -> Any:
    self.configuration.calls += 1
    return self.configuration.calls


def in_plain(self: Any, x: Tensor) -> Any:
    self.plain.calls += 1
    return self.plain.calls


def in_nested(self: Any, x: Tensor) -> Any:
    self.nested["a"]["calls"] += 1
    return self.nested["a"]["calls"]


def in_array(self: Any, x: Tensor) -> Any:
    self.array[0] += 1
    return float(self.array[0])


def in_vars(self: Any, x: Tensor) -> Any:
    vars(self)["scale"] = vars(self).get("scale", 0) + 1
    return self.scale


def in_memory(self: Any, x: Tensor) -> Any:
    self.memory[:3].add_(x.detach().mean())
    return self.memory


def in_nested_memory(self: Any, x: Tensor) -> Any:
    self.nested["memory"].add_(x.detach().mean(0))
    return self.nested["memory"]


def lazily(self: Any, x: Tensor) -> Any:
    if self.lazy is None or self.lazy.shape[0] < x.shape[1]:
        self.lazy = torch.arange(x.shape[1]) * 1.0
    return self.lazy


def trying(self: Any, x: Tensor) -> Any:
    try:
        return float(x.detach().sum())
    except Exception:
        return 0.0


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (in_configuration, "changes self.configuration"),
        (in_plain, "changes self.plain"),
        (in_nested, "changes self.nested"),
        (in_array, "changes self.array"),
        (in_vars, "changes its attributes"),
        (in_memory, "changes the tensor memory in place"),
        (in_nested_memory, "changes a tensor in an attribute in place"),
        (lambda self, x: next(self.count), "takes from Kept.count"),
        (lambda self, x: self.numpy.random(), "draws random numbers of its own"),
        (lambda self, x: self.random.random(), "draws random numbers of its own"),
        (lambda self, x: self.nested["random"].random(), "changes self.nested"),
        (lambda self, x: float(self.number), "cannot be traced"),
        (lazily, "sets self.lazy"),
        (trying, "catches the error of a trace"),
    ],
)
def test_python_state_matches_one_process(comm: Any, use: Any, message: str) -> None:
    """Regression: only the trace advanced it, and an error caught in forward led the trace into the wrong branch."""
    assert_as_one_process(comm, lambda: Chain(lambda: Kept(use)), microbatches=1)
    model = Kept(use)
    with pytest.raises(UsageError, match=f"Kept {message}"):
        pipeline(model, comm, microbatches=1)
    assert model.configuration == Configuration() and model.plain.calls == 0 and model.nested["a"] == {"calls": 0}
    assert not model.array.any() and not model.memory.any() and not model.nested["memory"].any()
    assert next(model.count) == 1 and model.lazy is None and not hasattr(model, "scale")
    assert model.random.random() == model.nested["random"].random() == random.Random(3).random()
    assert model.numpy.random() == np.random.default_rng(3).random()


TEMPERATURE = 1.0


def set_global(model: Any) -> None:
    global TEMPERATURE
    TEMPERATURE = 0.5


def set_scale(model: Any) -> None:
    model.configuration.scale = 0.5


@pytest.mark.parametrize(
    ("use", "change", "message"),
    [
        (lambda self, x: self.configuration.scale, set_scale, "Kept.configuration.scale was 1.0 .* is 0.5 now"),
        (lambda self, x: len(self.nested), lambda model: model.nested.pop("a"), "Kept.nested was "),
        (
            lambda self, x: 1.0 if self.lazy is None else 2.0,
            lambda model: setattr(model, "lazy", 1),
            "Kept.lazy was None",
        ),
        (
            lambda self, x: 2.0 if hasattr(self, "more") else 1.0,
            lambda model: setattr(model, "more", 1),
            "Kept.more was missing .* is 1 now",
        ),
        (
            lambda self, x: self.table * 2,
            lambda model: setattr(model, "table", torch.zeros(WIDTH)),
            "Kept.table was a tensor",
        ),
        (
            lambda self, x: self.nested["memory"] + 1.0,
            lambda model: model.nested["memory"].add_(1.0),
            "Kept.nested was ",
        ),
        (lambda self, x: self.calls + 1.0, lambda model: setattr(model, "calls", 1), "Kept.calls was 0"),
        (lambda self, x: TEMPERATURE, set_global, "the global TEMPERATURE was 1.0"),
    ],
)  # fmt: skip
def test_values_read_by_forward_must_not_change(
    comm: Any, use: Any, change: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a temperature, rate or flag set after `pipeline()` silently had no effect."""
    model: Any = build(lambda: Kept(use))
    monkeypatch.setitem(globals(), "TEMPERATURE", 1.0)
    pipe = pipeline(model, comm, loss=F.mse_loss, microbatches=2)
    x, y = batch()
    model.configuration.calls, model.unread = 7, 3
    pipe.step(x, y)
    change(model)
    for call in (lambda: pipe.step(x, y), lambda: pipe.evaluate(x, y), lambda: pipe.predict(x)):
        with pytest.raises((UsageError, PeerError), match=message):
            call()
    pipe.close()


class Elsewhere:
    calls = 0


def test_state_outside_the_model_that_changes_is_refused(comm: Any) -> None:
    """Regression: it cannot be restored, and kept the value of the trace for ever."""

    def use(self: Any, x: Tensor) -> Any:
        Elsewhere.calls += 1
        return Elsewhere.calls

    for make in (lambda: Kept(use), lambda: Chain(lambda: Kept(use))):
        with pytest.raises(UsageError, match="behaves differently in each call"):
            pipeline(make(), comm, microbatches=2)


def test_values_not_read_by_forward_may_change(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A global with the name of an attribute is not read by forward; a property may cache its result."""
    monkeypatch.setitem(globals(), "calls", 1)

    def use(self: Any, x: Tensor) -> Any:
        return self.calls + self.configuration.half

    model: Any = build(lambda: Kept(use))
    whole = copy.deepcopy(model)
    pipe = pipeline(model, comm, loss=F.mse_loss, microbatches=2)
    monkeypatch.setitem(globals(), "calls", 2)
    model.configuration.calls, model.more = 7, 3
    x, y = batch()
    torch.testing.assert_close(pipe.step(x, y), F.mse_loss(whole(x), y).detach(), rtol=EXACT, atol=0)
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None
    pipe.evaluate(x, y)
    pipe.close()


def test_a_change_on_one_rank_is_reported_on_all(comm: Any) -> None:
    model: Any = build(lambda: Kept(lambda self, x: self.configuration.scale))
    pipe = pipeline(model, comm, loss=F.mse_loss, microbatches=2)
    x, y = batch()
    loss = pipe.step(x, y)
    if comm.rank == comm.size - 1:
        model.configuration.scale = 0.5
    with pytest.raises((UsageError, PeerError)):
        pipe.step(x, y)
    model.configuration.scale = 1.0
    pipe.zero_grad()
    torch.testing.assert_close(pipe.step(x, y), loss, rtol=0, atol=0)
    pipe.close()


def test_a_plain_tensor_is_read_when_used(comm: Any) -> None:
    """Regression: values computed from it in forward were constants."""
    model: Any = build(lambda: Kept(lambda self, x: self.table * 2.0))
    whole = copy.deepcopy(model)
    pipe = pipeline(model, comm, loss=F.mse_loss, microbatches=2)
    x, y = batch()
    for one in (model, whole):
        one.table.fill_(3.0)
    torch.testing.assert_close(pipe.step(x, y), F.mse_loss(whole(x), y).detach(), rtol=EXACT, atol=0)
    pipe.close()


def test_shapes_and_dtypes_may_be_computed_with_and_asserted(comm: Any) -> None:
    """Regression: torch.fx could not trace them."""

    names: dict[str, Any] = {}
    exec(
        "def check(x):\n    assert x.dim() == 2 and x.shape[-1] == 6, 'other'", names
    )  # pytest rewrites other assertions

    def between(self: Any, x: Tensor) -> Any:
        names["check"](x)
        small = torch.finfo(x.dtype).eps
        small *= 2
        return x.masked_fill(x > 0.5, small) * len(x) + torch.tensor(torch.finfo(x.dtype).tiny)

    assert_as_one_process(comm, lambda: Two(between), microbatches=1)
    pipe = pipeline(Two(between), comm, loss=F.mse_loss, microbatches=2)
    with pytest.raises((AssertionError, PeerError), match="an assert in a forward"):
        pipe.step(torch.ones(4, 2, WIDTH), torch.ones(4, WIDTH))
    pipe.close()


def test_iterating_over_an_argument_needs_an_example(comm: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([linear(), linear()])

        def forward(self, pair: tuple[Tensor, Tensor]) -> Any:
            return sum(torch.tanh(layer(x)) for layer, x in zip(self.layers, pair, strict=True))

    x, other = batch(seed=5)
    with pytest.raises(UsageError, match=r"iterates over pair, and .*: pass example="):
        pipeline(Model(), comm, microbatches=2)
    assert_as_one_process(comm, Model, ((x, other),), example=((x[:2], other[:2]),))


class Skipping(nn.Module):
    """A module that compares shapes in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        if h.shape != x.shape:
            h = h[:, :1]
        return h + x


@pytest.mark.ranks(min=2)
def test_untraceable_code_is_refused_with_its_line(comm: Any) -> None:
    """Regression: torch's message about control flow did not give its place."""
    text = (
        r"Skipping cannot be traced \(.*, in test_pipeline_cutting\.py, line \d+: if h\.shape != x\.shape:\): do that"
    )
    with pytest.raises(UsageError, match=text):
        pipeline(Skipping(), comm, microbatches=2)
