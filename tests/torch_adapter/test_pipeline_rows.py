"""Layers that mix rows of a batch, and losses recorded by layers: they match one process, or all ranks refuse."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.pipeline.pipe import Split
from commlib_torch import pipeline
from commlib_torch.expert.losses import AuxiliaryLossModule, auxiliary_loss

WIDTH = 4
MIXES = "mixes the rows of a batch"


def inputs(rows: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, *shape, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Centred(nn.Module):
    """Subtracts the mean of all rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Negatives(nn.Module):
    """Compares each row with all others."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ x.T).softmax(-1) @ x


class Similar(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.T


class Drawn(nn.Module):
    """Draws random numbers in evaluation, too."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)


class Alternates(nn.Module):
    """Computes something else in each call, and counts calls in every way available to a module."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.count, self.seen = 0, list[int]()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(len(x))
        self.calls += 1
        return x * self.count


class RowsSecond(nn.Module):
    """Attends over the first dimension: rows are in the second."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(0, keepdim=True)


class Flattens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)


class TracedCentred(nn.Module):
    """A model whose mean travels between stages, together with the rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        mean = hidden.mean(0)
        return torch.sub(self.second(hidden.tanh()), mean)


def layers(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *middle, nn.Linear(WIDTH, WIDTH)).double()


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: layers(Centred()), "layer 1 of stage"),
        (lambda: layers(nn.Tanh(), Negatives()), "layer 2 of stage"),
        (lambda: layers(nn.BatchNorm1d(WIDTH, track_running_stats=False)), "layer 1 of stage"),
        (lambda: nn.Sequential(*layers(nn.Tanh()), Similar()), "layer 3 of stage"),
        (lambda: TracedCentred().double(), "stage"),
        (lambda: layers(Centred()).float(), "layer 1 of stage"),
    ],
    ids=["centred", "negatives", "own statistics", "similarities", "traced", "float32"],
)
def test_a_layer_that_mixes_rows(comm: Any, make: Any, names: str) -> None:
    """Regression: it silently saw a microbatch instead of the batch."""
    x = inputs(8).to(next(make().parameters()).dtype)
    loss = lambda output, target: mean_square(output[:, :1], target[:, :1])  # noqa: E731  # of any width
    for way in ("step", "evaluate", "predict") if names == "stage" else ("step",):
        pipe = pipeline(make(), comm, microbatches=4, loss=loss)
        for _ in range(2):
            with pytest.raises(UsageError, match=MIXES) as caught:
                pipe.predict(x) if way == "predict" else getattr(pipe, way)(x, x)
            assert names in str(caught.value) or "the code before layer" in str(caught.value)
        pipe.close()
        if way == "step":
            pipe = pipeline(make(), comm, microbatches=4, loss=loss, weigh="rows")
            pipe.step(x, x)
            pipe.close()
    pipe = pipeline(make(), comm, microbatches=1, loss=loss)
    torch.testing.assert_close(pipe.step(x, x), loss(make()(x), x).detach())
    pipe.close()


@pytest.mark.parametrize(
    ("make", "shape", "options"),
    [
        (lambda: layers(nn.BatchNorm1d(WIDTH), nn.Tanh()), (8,), {}),
        (lambda: layers(RowsSecond(), nn.Tanh(), RowsSecond()), (3, 8), {"x": 1, "y": 1, "output": 1}),
        (lambda: layers(RowsSecond(), nn.Tanh(), RowsSecond()), (2, 8), {"x": 1, "y": 1, "output": 1}),
        (lambda: layers(nn.Tanh(), Flattens(), nn.Tanh()), (8, 3), {}),
        (lambda: layers(nn.MultiheadAttention(WIDTH, 2, batch_first=True)), (8, 3), {}),
    ],
    ids=["batch norm", "rows second", "as many rows", "flattened", "attention"],
)
def test_layers_that_do_not_mix_rows_pass(comm: Any, make: Any, shape: Any, options: Any) -> None:
    def model() -> Any:
        torch.manual_seed(1)  # before the layers are made
        built = make()
        return [Attends(one) if isinstance(one, nn.MultiheadAttention) else one for one in built]

    x, y = inputs(*shape), inputs(*shape, seed=2)
    loss = lambda output, target: mean_square(output, target.reshape(output.shape))  # noqa: E731
    whole = nn.Sequential(*model()).eval()
    pipe = pipeline(model(), comm, microbatches=4, loss=loss, rows=options)
    torch.testing.assert_close(pipe.evaluate(x, y), loss(whole(x), y).detach(), rtol=1e-10, atol=0)
    pipe.step(x, y)
    pipe.close()


class Placed(nn.Module):
    """A model whose second input may be as long as a batch, but has no rows; it is used after some layers."""

    def __init__(self, after: int, number: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.after, self.layers = after, nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(number))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        places = places.cos()
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == self.after:
                x = torch.tanh(x + places[:, None])
        return x


@pytest.mark.parametrize("stage", [0, 1])
def test_an_input_as_long_as_the_batch_without_rows(comm: Any, stage: int) -> None:
    """Regression: it was silently cut into single elements, which broadcast; in later stages, too."""
    x, places = inputs(8, 8), torch.linspace(0, 1, 8, dtype=torch.float64)

    def model() -> nn.Module:
        return Placed(stage, max(comm.size, 2)).double()

    expected, split = mean_square(model()(x, places), x).detach(), [f"layers.{one}" for one in range(1, comm.size)]
    for where in (0, "whole"):
        pipe = pipeline(model(), comm, microbatches=8, loss=mean_square, rows={"x": (0, where)}, split=split)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = pipe.step((x, places), x)
            pipe.step((x, places), x)
        messages = [str(one.message) for one in caught if "not two together" in str(one.message)]
        assert len(messages) == (where == 0 and comm.rank == min(stage, comm.size - 1))
        assert not messages or f"pipeline: stage {comm.rank} (of " in messages[0]
        if where == "whole":
            torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
        pipe.close()


class Attends(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [lambda: Drawn(), lambda: Alternates()], ids=["drawn", "alternates"])
def test_a_check_leaves_no_trace(comm: Any, make: Any) -> None:
    """Random numbers, counters, buffers and hooks match the microbatches alone, even if the check decides nothing."""
    results = []
    for weigh in ("rows", None):  # with "rows" there is no check
        model, calls = layers(make()), list[Tensor]()
        for one in model:
            one.register_forward_hook(lambda module, args, output, calls=calls: calls.append(output.detach().clone()))
        pipe = pipeline(model, comm, microbatches=2, loss=mean_square, weigh=weigh)
        torch.manual_seed(3)
        messages = [float(pipe.step(inputs(4, seed=4), inputs(4, seed=2))) for _ in range(3)]
        state = {name: one.clone() for name, one in pipe.state_dict().items()}
        kept = [(one.count, list(one.seen)) for one in pipe.modules() if isinstance(one, Alternates)]
        results.append(
            (messages, len(calls), sum(float(one.sum()) for one in calls), kept, float(torch.rand(())), state)
        )
        pipe.close()
    (*first, before), (*second, after) = results
    assert first == second
    torch.testing.assert_close(after, before, rtol=0, atol=0)


class Keeps(AuxiliaryLossModule):
    """Records losses of its input."""

    def __init__(self, *kinds: str, in_training: bool = False) -> None:
        super().__init__()
        self.kinds, self.in_training = kinds, in_training

    def forward(self, x: Tensor) -> Tensor:
        square, positive = x.square(), (x > 0).to(x.dtype)
        model = {
            "mean": square.mean(),
            "sum": square.sum(),
            "both": square.mean() + square.sum(),
            "positive": (square * positive).sum() / positive.sum(),
        }
        if self.training or not self.in_training:
            for kind in self.kinds:
                self.keep(0.1 * model[kind])
        return x


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("in_training", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_sums_recorded_by_layers(comm: Any, schedule: Any, in_training: bool, begins: bool) -> None:
    """Regression: a sum over rows counted 1 / microbatches; also if the layer that records it begins a stage."""
    torch.manual_seed(0)  # of the layer between them, which must be equal on all ranks
    first, second = Keeps("sum", "mean", in_training=in_training), Keeps("sum", in_training=in_training)
    model = layers(nn.Tanh(), first, nn.Linear(WIDTH, WIDTH), second)
    whole = copy.deepcopy(model)
    x, y = inputs(7), inputs(7, seed=2)
    split: Split = ["2", "4", "5"][: comm.size - 1] if begins else "auto"
    pipe = pipeline(model, comm, microbatches=3, loss=mean_square, schedule=schedule, split=split)
    for _ in range(2):
        expected = mean_square(whole(x), y) + auxiliary_loss(whole)
        expected.backward()
        torch.testing.assert_close(pipe.step(x, y), expected.detach(), rtol=1e-10, atol=0)
    named = dict(whole.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, named[name].grad, rtol=1e-10, atol=1e-12)
    pipe.close()


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("kind", ["both", "positive"])
def test_recorded_losses_that_are_neither_mean_nor_sum(comm: Any, kind: str, begins: bool) -> None:
    model = layers(Keeps("mean", kind), *(nn.Tanh() for _ in range(comm.size - 2)))
    split: Split = [str(one) for one in range(1, comm.size)] if begins else "auto"
    pipe = pipeline(model, comm, microbatches=2, loss=mean_square, split=split)
    for _ in range(2):
        with pytest.raises(UsageError, match="a loss added by a layer of stage"):
            pipe.step(inputs(4, seed=4), inputs(4, seed=2))
    pipe.close()
