"""State of a pipeline and of its optimizer matches one process: names, settings of groups, tied weights."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commlib_torch as ct
from commlib.errors import UsageError
from commlib_torch import pipeline

WIDTH = 4


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, y


NAMES = ("stage0", "stage1", "stage2", "stage3", "model", "0", "module", "loss")


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_v"])
def test_layers_may_have_names_of_stages(comm: Any, schedule: Any) -> None:
    """Regression: a layer named `stage2` lost its name in a state, because the prefix was removed twice."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict((name, nn.Sequential(OrderedDict([(name, linear())]))) for name in NAMES))
    whole = copy.deepcopy(model)
    pipe = pipeline(model, comm, schedule=schedule, microbatches=2, loss=F.mse_loss)
    names = [name for name, _ in whole.named_parameters()]
    state = pipe.gather_state_dict()
    assert sorted(state) == sorted(names)
    twice = {name: value * 2 for name, value in whole.state_dict().items()}
    pipe.load_state_dict(twice)
    holder = nn.ModuleDict({"stage0": pipe})
    assert {name.removeprefix("stage0.") for name in holder.state_dict()} <= set(names)
    for name, value in pipe.gather_state_dict().items():
        assert torch.equal(value, twice[name])
    holder.load_state_dict({f"stage0.{name}": value for name, value in whole.state_dict().items()})
    for name, value in pipe.gather_state_dict().items():
        assert torch.equal(value, whole.state_dict()[name])
    lacking = dict(twice)
    own = next(iter(pipe.state_dict()))
    del lacking[own]
    lacking["stage1.stage0.stage0.weight"] = torch.zeros(WIDTH, WIDTH)
    result = pipe.load_state_dict(lacking, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == ([own], ["stage1.stage0.stage0.weight"])
    pipe.close()


def rated(named: Any) -> torch.optim.SGD:
    """Return an optimizer with a different learning rate for each layer."""
    groups = [{"params": [p], "lr": 0.1 * 0.5 ** int(n.split(".")[0])} for n, p in named]
    return torch.optim.SGD(groups, momentum=0.9)


def test_each_parameter_keeps_the_settings_of_its_group(comm: Any) -> None:
    """Regression: ranks got rank 0's learning rates, and failed if their numbers of groups differed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(linear() for _ in range(5)))
    whole = copy.deepcopy(model)
    split = [5 - comm.size + 1] + [1] * (comm.size - 1)
    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss, split=split)
    ours, theirs = rated(pipe.named_parameters()), rated(whole.named_parameters())
    for step in range(4):
        x, y = batch(step)
        pipe.step(x, y)
        F.mse_loss(whole(x), y).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:  # other numbers of stages, and one process, accept it
            state, moments = pipe.gather_state_dict(), pipe.gather_optimizer_state(ours)
            pipe.close()
            torch.manual_seed(1)
            fresh = nn.Sequential(*(linear() for _ in range(5)))
            fresh.load_state_dict(state)
            pipe = pipeline(fresh, comm, microbatches=2, loss=F.mse_loss)
            ours = torch.optim.SGD([{"params": [p]} for p in pipe.parameters()], lr=7.0, momentum=0.1)
            pipe.load_optimizer_state(ours, moments)
            single = torch.optim.SGD([{"params": [p]} for p in fresh.parameters()], lr=7.0)
            ct.load_optimizer_state(single, fresh.named_parameters(), moments)
            assert [g["lr"] for g in single.param_groups] == [g["lr"] for g in theirs.param_groups]
    for name, value in pipe.gather_state_dict().items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-10, atol=1e-12)
    one_group = torch.optim.SGD(fresh.parameters(), lr=1.0)
    with pytest.raises(
        UsageError, match=r"0.weight and 1.weight in one group.*lr 0.1 and 0.05.*groups of the saved optimizer"
    ):
        ct.load_optimizer_state(one_group, fresh.named_parameters(), moments)
    pipe.close()


def test_names_in_an_optimizer_do_not_change(comm: Any) -> None:
    """torch's optimizers accept named parameters, and then store the names in their groups."""
    torch.manual_seed(0)
    pipe = pipeline(nn.Sequential(*(linear() for _ in range(4))), comm, microbatches=2, loss=F.mse_loss)
    optimizer = torch.optim.SGD(pipe.named_parameters(), lr=0.1, momentum=0.9)
    pipe.step(*batch())
    optimizer.step()
    state = pipe.gather_optimizer_state(optimizer)
    assert len(state["param_groups"]) == 1 and len(state["param_groups"][0]["params"]) == 8
    pipe.load_optimizer_state(optimizer, state)
    if "param_names" in optimizer.param_groups[0]:
        assert optimizer.param_groups[0]["param_names"] == [name for name, _ in pipe.named_parameters()]
    pipe.close()


class Tied(nn.Module):
    """A model whose head uses the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x: Tensor = self.embed(words)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize("schedules", [("zb_v", "gpipe"), ("gpipe", "zb_v"), ("", "gpipe"), ("zb_v", "")])
def test_a_tied_weight_stores_its_state_under_each_name(comm: Any, schedules: Any) -> None:
    """Regression: if both stages were on one rank, the state had one name, which the other rank did not find."""
    torch.manual_seed(0)
    whole = Tied().double()
    words = torch.arange(8) % 7
    theirs = torch.optim.Adam(whole.parameters(), lr=0.1)
    model: Any = copy.deepcopy(whole)
    state: Any = None
    moments: Any = None
    for schedule in schedules:
        fresh: Any = copy.deepcopy(model) if state is None else Tied().double()
        if state is not None:
            fresh.load_state_dict(state)
        pipe = pipeline(fresh, comm, schedule=schedule, microbatches=2, loss=F.cross_entropy) if schedule else None
        ours = torch.optim.Adam((pipe or fresh).parameters(), lr=0.1)
        if state is not None and pipe is not None:
            pipe.load_optimizer_state(ours, moments)
        elif state is not None:
            ct.load_optimizer_state(ours, fresh.named_parameters(), moments)
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        F.cross_entropy(whole(words), words).backward()
        if pipe is None:
            F.cross_entropy(fresh(words), words).backward()
        else:
            pipe.step(words, words)
        for optimizer in (ours, theirs):
            optimizer.step()
        if pipe is None:
            state, moments = fresh.state_dict(), ct.gather_optimizer_state(ours, fresh.named_parameters())
        else:
            state, moments = pipe.gather_state_dict(), pipe.gather_optimizer_state(ours)
            pipe.close()
    for name, value in state.items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-10, atol=1e-10)


def test_errors_use_names_of_the_model(comm: Any) -> None:
    """Regression: the message included the number of the stage: stage1.2.bias."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(comm.size)))
    wrong = {name: torch.ones(5) if name.endswith("bias") else value for name, value in model.state_dict().items()}
    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss)
    with pytest.raises(RuntimeError, match=rf"size mismatch for {comm.rank}\.bias: "):
        pipe.load_state_dict(wrong)
    pipe.close()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("is_traced", [False, True])
def test_a_state_that_does_not_fit_one_stage_is_refused_by_all_before_a_weight_changes(
    comm: Any, is_traced: bool
) -> None:
    """Regression: the rank of the stage raised; the others loaded, and later waited for it."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(linear(), nn.BatchNorm1d(WIDTH).double()) for _ in range(comm.size)))
    model = Skipping(layers) if is_traced else layers
    loss = Scaled()
    state = {**{name: value + 1 for name, value in model.state_dict().items()}, "loss.scale": torch.full((2,), 2.0)}
    pipe = pipeline(model, comm, microbatches=2, loss=loss)
    before = copy.deepcopy(pipe.state_dict())
    last = f"{'layers.' if is_traced else ''}{comm.size - 1}"
    of_last = rf"\(of stage {comm.size - 1}, on rank {comm.size - 1}\)"
    lacking = {name: value for name, value in state.items() if name != f"{last}.0.bias"}
    wrong = {**state, f"{last}.1.running_var": torch.zeros(3), "loss.scale": torch.zeros(5)}
    sizes = rf"\[3\]\).*\[{WIDTH}\]\) {of_last}"
    for strict, given, text in (
        (True, lacking, rf"Missing key.*{last}\.0\.bias {of_last}"),
        (True, {**state, "other": torch.zeros(1)}, r"Unexpected key.*other"),
        (False, wrong, rf"(?s)size mismatch for {last}\.1\.running_var: .*{sizes}.*loss\.scale"),
    ):
        message = ""
        try:
            pipe.load_state_dict(given, strict=strict)
        except UsageError as error:
            message = str(error)
        assert len(set(comm.all_gather_object(message))) == 1
        assert re.search(text, message)
        assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
    result = pipe.load_state_dict(lacking, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == ([f"{last}.0.bias"], [])
    assert not any(pipe.load_state_dict(pipe.state_dict()))  # the state of this rank's stages
    pipe.load_state_dict(state)
    for name, value in pipe.gather_state_dict().items():
        assert torch.equal(value, state[name])
    pipe.close()


class Skipping(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x) + x
        return out


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(output, y) * self.scale.sum()
