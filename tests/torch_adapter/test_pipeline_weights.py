"""Weights of a pipeline include those of a loss and those from the meta device."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commlib
import commlib_torch as ct
from commlib.errors import PeerError, UsageError
from commlib_torch import pipeline

WIDTH = 4


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, WIDTH, generator=generator, dtype=torch.float64), torch.arange(8) % WIDTH


class Heated(nn.Module):
    """A loss with a temperature, learned classes, a buffer and a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.head = linear()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        smoothing = 0.1 if self.training else 0.0
        return F.cross_entropy(self.head(output) / self.temperature, target, label_smoothing=smoothing)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_a_loss_with_parameters_is_trained_and_saved(comm: Any, schedule: Any) -> None:
    """Regression: they were missing from state and optimizers, and were not trained."""
    torch.manual_seed(0)
    model, loss = nn.Sequential(*(linear() for _ in range(2 * comm.size))), Heated()
    whole, theirs = copy.deepcopy(model), copy.deepcopy(loss)
    pipe = pipeline(model, comm, schedule=schedule, microbatches=2, loss=loss)
    ours = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    optimizer = torch.optim.AdamW([*whole.parameters(), *theirs.parameters()], lr=0.1)
    for step in range(3):
        x, y = batch(step)
        expected = theirs(whole(x), y)
        torch.testing.assert_close(pipe.step(x, y), expected.detach(), rtol=1e-12, atol=0)
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_([*whole.parameters(), *theirs.parameters()], 0.1)
        torch.testing.assert_close(pipe.clip_grad_norm(0.1).double(), norm, rtol=1e-6, atol=0)
        for one in (ours, optimizer):
            one.step()
            one.zero_grad()
    theirs.eval()
    torch.testing.assert_close(pipe.evaluate(x, y), theirs(whole(x), y).detach(), rtol=1e-6, atol=0)
    state = pipe.gather_state_dict()
    expected_state = {**whole.state_dict(), **{f"loss.{name}": value for name, value in theirs.state_dict().items()}}
    assert state.keys() == expected_state.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, expected_state[name], rtol=1e-6, atol=1e-9)
    doubled = {name: value * 2 for name, value in state.items()}
    pipe.load_state_dict(doubled)
    for name, value in pipe.gather_state_dict().items():
        assert torch.equal(value, doubled[name])
    moments = pipe.gather_optimizer_state(ours)
    assert "loss.temperature" in moments["state"]
    pipe.load_optimizer_state(ours, moments)
    pipe.close()


def test_a_loss_with_a_weight_of_the_model(comm: Any) -> None:
    """It is the same weight as the first layer's, wherever that is."""

    class Other(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight, self.scale = weight, nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(output @ self.weight * self.scale, target)

    torch.manual_seed(0)
    model = nn.Sequential(*(linear() for _ in range(comm.size + 1)))
    whole = copy.deepcopy(model)
    pipe = pipeline(model, comm, microbatches=2, loss=Other(model[0].weight))  # type: ignore[arg-type]
    x, y = batch()
    expected = Other(whole[0].weight)(whole(x), y)  # type: ignore[arg-type]
    expected.backward()
    torch.testing.assert_close(pipe.step(x, y), expected.detach(), rtol=1e-12, atol=0)
    theirs = dict(whole.named_parameters())
    for name, parameter in pipe.named_parameters():
        if not name.startswith("loss."):
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-10, atol=1e-12)
    pipe.close()


@pytest.mark.ranks(min=2)
def test_a_loss_with_an_untrained_weight_is_reported(comm: Any) -> None:
    """A function hides its weights, and the first loss reveals them."""
    hidden = nn.Parameter(torch.ones((), dtype=torch.float64))
    x, y = batch()
    is_last = comm.rank == comm.size - 1
    pipe = pipeline([linear() for _ in range(comm.size)], comm, microbatches=2,
                    loss=lambda output, target: F.cross_entropy(output * hidden, target))  # fmt: skip
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            pipe.step(x, y)
    texts = [str(one.message) for one in seen if "not in pipe.parameters()" in str(one.message)]
    assert len(texts) == (1 if is_last else 0)
    pipe.close()
    layers = [linear() for _ in range(comm.size)]
    first = layers[0].weight
    pipe = pipeline(layers, comm, microbatches=2, loss=lambda output, target: F.cross_entropy(output @ first, target))
    text = r"the loss uses 0\.weight, which stages on other" if is_last else None
    with pytest.raises(UsageError if is_last else PeerError, match=text):
        pipe.step(x, y)
    pipe.close()
    with pytest.raises(UsageError, match="names would begin with 'loss'"):
        pipeline(Named(), comm, microbatches=2, loss=Heated())


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_x_and_y_computed_from_untrained_weights(comm: Any, schedule: Any) -> None:
    """Regression: the error blamed a layer; and also the loss, if one rank had the first and the last stage."""
    torch.manual_seed(0)
    x, y = torch.ones(8, WIDTH, dtype=torch.float64), torch.zeros(8, WIDTH, dtype=torch.float64)
    encoder, texts = linear(), list[list[str]]()
    layers = [linear() for _ in range(2 * comm.size)]
    for given in ((encoder(x), y), (x, encoder(y))):
        pipe = pipeline(layers, comm, microbatches=2, loss=F.mse_loss, schedule=schedule)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            pipe.step(*given)
        texts.append([str(one.message) for one in seen if "not in pipe.parameters()" in str(one.message)])
        pipe.close()
    assert [len(own) for own in texts] == [comm.rank == pipe.pipe.first, comm.rank == pipe.pipe.last], texts
    assert all("x was computed of a parameter of shape" in text for text in texts[0])
    assert all("y was computed of a parameter of shape" in text for text in texts[1])


class Named(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        for name in ("loss", "b", "c", "d"):
            self.add_module(name, linear())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x: Tensor = self.embed(words)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
def test_a_model_on_the_meta_device(comm: Any, assign: bool) -> None:
    """Regression: it failed in the first batch, because values were traced while weights had no memory."""
    torch.manual_seed(0)
    whole = Tied().double()
    with torch.device("meta"):
        model = Tied().double()
    pipe = pipeline(model, comm, microbatches=2, loss=F.cross_entropy)
    words = torch.arange(8) % WIDTH
    with pytest.raises(UsageError, match="is on device meta: call to_empty"):
        pipe.step(words, words)
    if not assign:
        pipe.to_empty(device="cpu")
    pipe.load_state_dict(copy.deepcopy(whole.state_dict()), assign=assign)
    expected = F.cross_entropy(whole(words), words)
    expected.backward()
    torch.testing.assert_close(pipe.step(words, words), expected.detach(), rtol=1e-12, atol=0)
    theirs = dict(whole.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-10, atol=1e-12)
    pipe.close()


@pytest.mark.ranks(min=2)
def test_a_rank_without_parameters(comm: Any) -> None:
    """Regression: torch's optimizers refuse an empty list, so that the same program failed on one rank."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [linear(), *(nn.Tanh() for _ in range(comm.size - 1))]
    whole = copy.deepcopy(nn.Sequential(*layers))
    pipe = pipeline(layers, comm, microbatches=2, loss=F.cross_entropy, split=[1] * comm.size)
    alone = commlib.Mesh(pp=comm.size, dp=1)
    theirs = torch.optim.AdamW(whole.parameters(), lr=0.1)
    plain = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    ours = ct.DistributedOptimizer(plain, pipe.named_parameters(), mesh=alone)
    x, y = batch()
    for _ in range(2):
        expected = F.cross_entropy(whole(x), y)
        expected.backward()
        torch.testing.assert_close(pipe.step(x, y), expected.detach(), rtol=1e-10, atol=0)
        pipe.clip_grad_norm(10.0)
        for one in (ours, theirs):
            one.step()
            one.zero_grad()
    state = pipe.gather_optimizer_state(ours)
    pipe.load_optimizer_state(ours, state)
    assert state["param_groups"][0]["params"] == ["0.weight", "0.bias"] and len(state["state"]) == 2
    for name, value in pipe.gather_state_dict().items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-10, atol=1e-12)
    pipe.close()


@pytest.mark.ranks(min=2)
def test_a_stage_without_parameters_that_updates_itself(comm: Any) -> None:
    layers: list[nn.Module] = [linear(), *(nn.Tanh() for _ in range(comm.size - 1))]
    pipe = pipeline(
        layers, comm, schedule="pipedream", microbatches=2, loss=F.cross_entropy, split=[1] * comm.size,
        optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
    )  # fmt: skip
    before = pipe.gather_state_dict()["0.weight"]
    pipe.step(*batch())
    assert not torch.equal(before, pipe.gather_state_dict()["0.weight"])
    pipe.close()


class Calls(nn.Module):
    """Calls a layer that is not its submodule."""

    def __init__(self, hidden: nn.Module) -> None:
        super().__init__()
        self.hidden = [hidden]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.hidden[0](x)
        return result


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("place", [0, 1])
def test_a_layer_that_uses_a_weight_of_another_stage(comm: Any, place: int) -> None:
    """Regression: in a first stage it was not noticed or trained; in a last one the error blamed the loss."""
    own, end = linear(), comm.size - 1
    between = [nn.Tanh() for _ in range(end - 1)]
    layers = [Calls(own), *between, own] if place == 0 else [own, *between, Calls(own)]
    pipe = pipeline(layers, comm, microbatches=2, loss=F.cross_entropy)
    with pytest.raises((UsageError, PeerError)) as caught:
        pipe.step(*batch())
    user, owner = (0, end) if place == 0 else (end, 0)
    assert f"a layer of stage {user} uses {owner}.weight, which stages on other ranks have" in str(caught.value)
    pipe.close()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_sparse_gradients_stay_sparse(comm: Any, schedule: Any) -> None:
    """Regression: an embedding with sparse gradients failed in the first backward."""
    torch.manual_seed(0)
    embedding = nn.Embedding(WIDTH, WIDTH, sparse=True, dtype=torch.float64)
    layers = nn.Sequential(embedding, *(linear() for _ in range(comm.size)))
    whole = copy.deepcopy(layers)
    pipe = pipeline(layers, comm, microbatches=2, loss=F.mse_loss, schedule=schedule, split=[1] * (comm.size - 1) + [2])
    numbers = torch.arange(8) % 3
    for seed in range(2):
        target, _ = batch(seed)
        expected = F.mse_loss(whole(numbers), target)
        expected.backward()
        torch.testing.assert_close(pipe.step(numbers, target), expected.detach(), rtol=1e-12, atol=0)
    for name, parameter in pipe.named_parameters():
        theirs = whole.get_parameter(name).grad
        assert parameter.grad is not None and theirs is not None and parameter.grad.layout == theirs.layout
        torch.testing.assert_close(parameter.grad.to_dense(), theirs.to_dense(), rtol=1e-10, atol=1e-14)
    pipe.close()
