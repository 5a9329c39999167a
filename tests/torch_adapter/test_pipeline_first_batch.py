"""First batch: a model traced without an example is compared on it with the whole model."""

from __future__ import annotations

import copy
import gc
import random
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib_torch import pipeline
from tests.inputs.torch_pipelines import WIDTH, batch, in_float64

__all__ = ["in_float64"]  # a fixture


class Chain(nn.Module):
    """A traced model of at least two layers, with something between them."""

    def __init__(self, between: nn.Module, more: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between, self.last = nn.Linear(WIDTH, WIDTH), between, nn.Linear(WIDTH, WIDTH)
        self.more = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(more))

    def forward(self, x: Tensor) -> Any:
        for layer in self.more:
            x = layer(x)
        return self.last(self.between(self.first(x)))


class Exact(nn.Module):
    """A layer that doubles only values of exact type Tensor, which no trace notices."""

    def __init__(self, *, in_training: bool) -> None:
        super().__init__()
        self.in_training = in_training

    def forward(self, x: Tensor) -> Any:
        asks = not hasattr(x, "node")
        if self.in_training:
            return x * 2 if asks else x
        return x.cos() if asks else x.sin()


class Noted(nn.Module):
    """A layer that counts, draws random numbers and normalises."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.generator = nn.BatchNorm1d(WIDTH), torch.Generator().manual_seed(3)
        self.calls, self.seen = 0, list[Any]()

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.seen.append(x)
        noise = torch.rand(WIDTH, generator=self.generator) + random.random() + float(np.random.rand())
        return F.dropout(self.norm(x) + noise, 0.5, self.training)


@pytest.mark.parametrize("verb", ["step", "evaluate", "predict"])
def test_a_difference_is_refused_on_all_ranks(comm: Any, verb: str) -> None:
    """Regression: without example= a forward that cannot be traced silently trained a different model."""
    x, y = batch()
    pipe = pipeline(Chain(Exact(in_training=True), more=comm.size - 2), comm, microbatches=2, loss=F.mse_loss)
    before = copy.deepcopy(pipe.state_dict())
    for _ in range(2):  # the refusal is permanent
        with pytest.raises(
            UsageError, match=r"the cut model differs from the original, in training: the output of last"
        ):
            pipe.predict(x) if verb == "predict" else getattr(pipe, verb)(x, y)
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
    assert all(parameter.grad is None for parameter in pipe.parameters())
    pipe.close()


class OnlyInEvaluation(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x if torch.is_grad_enabled() or hasattr(x, "node") else x * 2


def test_the_other_mode_is_compared(comm: Any) -> None:
    """Regression: a difference in evaluation mode appeared only after hours of training."""
    x, y = batch()
    pipe = pipeline(Chain(OnlyInEvaluation(), more=comm.size - 2), comm, microbatches=2, loss=F.mse_loss)
    with pytest.raises(UsageError, match="the cut model differs from the original, in evaluation"):
        pipe.step(x, y)
    pipe.close()


def test_the_comparison_changes_nothing(comm: Any) -> None:
    """Buffers, counters, lists, random numbers and the mode match one process that trains on the same microbatches."""
    x, y = batch()
    model = Chain(Noted())
    alone: Any = Chain(Noted())
    called: list[str] = []
    model.between.register_forward_hook(lambda *_: called.append("between"))
    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = pipe.step(x, y)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    losses = [F.mse_loss(alone(x[part]), y[part]) / 2 for part in (slice(4), slice(4, 8))]
    whole: Any = sum(losses)
    whole.backward()
    stage = [part for part in pipe.parts if any("between" in name for name, _ in part.named_modules())]
    assert len(called) == (2 if stage else 0)
    if stage:
        between: Any = stage[0].get_submodule("between")
        assert between.calls == len(between.seen) == 2 and between.training
        assert torch.equal(between.generator.get_state(), alone.between.generator.get_state())
        torch.testing.assert_close(dict(between.named_buffers()), dict(alone.between.named_buffers()))
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-10, atol=0)
    pipe.close()


def test_the_comparison_uses_current_weights(comm: Any) -> None:
    """The stage's weights may be replaced or cast before the first batch, which is not a difference."""

    class Rooted(Chain):
        def __init__(self) -> None:
            super().__init__(nn.Tanh())
            self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Buffer(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Any:
            return super().forward(x * self.scale + self.shift) * self.scale

    x, y = batch()
    model, other = Rooted(), Rooted()
    with torch.no_grad():
        for value in (*other.parameters(), *other.buffers()):
            value.mul_(1.5)
    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss)
    pipe.load_state_dict(other.state_dict(), assign=True)
    torch.testing.assert_close(pipe.evaluate(x, y), F.mse_loss(other(x), y).detach(), rtol=1e-10, atol=0)
    pipe.close()
    pipe = pipeline(Rooted(), comm, microbatches=2, loss=F.mse_loss)
    pipe.to(torch.float32)
    pipe.step(x.float(), y.float())
    pipe.close()


def test_the_whole_model_is_freed(comm: Any) -> None:
    """The first stage's rank keeps it only until the first batch."""
    x, y = batch()
    model = Chain(nn.Tanh())
    kept = weakref.ref(model)
    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss)
    del model
    gc.collect()
    assert (kept() is not None) == (comm.rank == 0)
    pipe.step(x, y)
    gc.collect()
    assert kept() is None
    pipe.close()


def test_a_failed_first_batch_is_not_the_first(comm: Any) -> None:
    """Ranks that raise before communication must stay in step afterwards."""
    x, y = batch()
    pipe = pipeline(Chain(nn.Tanh()), comm, microbatches=2, loss=F.mse_loss)
    with pytest.raises(Exception):  # noqa: B017  UsageError there, PeerError elsewhere
        pipe.step(x, y[:3] if comm.rank == comm.size - 1 else y)
    model = Chain(nn.Tanh())
    torch.testing.assert_close(pipe.step(x, y), F.mse_loss(model(x), y).detach(), rtol=1e-10, atol=0)
    pipe.close()


def test_a_model_that_cannot_be_compared_is_reported(comm: Any) -> None:
    """In a copy of a model with a patched forward, that may call the original."""
    x, y = batch()
    model = Chain(nn.Tanh())
    forward = model.first.forward
    setattr(model.first, "forward", lambda x: forward(x))  # noqa: B010
    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss)
    with warnings.catch_warnings(record=True) as result:
        warnings.simplefilter("always")
        pipe.step(x, y)
        pipe.step(x, y)
    messages = [str(one.message) for one in result if "is not compared" in str(one.message)]
    assert len(messages) == (comm.rank == 0)
    pipe.close()
