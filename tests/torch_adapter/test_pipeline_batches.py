"""Inputs and outputs of a pipeline's step: places of rows, microbatches of own lengths, details, clipped norms."""

from __future__ import annotations

import copy
import gc
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib import Mesh
from commlib.errors import CommlibError, PeerError, UsageError
from commlib_torch import DataParallel, DistributedOptimizer, clip_grad_norm_, pipeline

WIDTH = 6
EXACT = 1e-11  # microbatches are summed in another order than in one process: some ulps of float64


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=EXACT, atol=EXACT)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_gradients(pipe: Any, whole: nn.Module) -> None:
    named = dict(whole.named_parameters())
    for name, parameter in pipe.named_parameters():
        close(parameter.grad, named[name].grad)


class Places(nn.Module):
    """A layer with an input that applies to all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x) + places[:, None]))
        return out


class Recurrent(nn.Module):
    """A layer with rows in the second dimension of an output and of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, state = self.layer(x)
        return torch.tanh(self.head(out)), state


def build(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = kind().double()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("named", [False, True])
def test_an_input_for_all_microbatches_is_not_cut(comm: Any, named: bool) -> None:
    """Regression: it was cut if it was as long as the batch, which silently changed the loss."""
    model, whole = build(Places)
    x, places, y = random(8, 8, WIDTH), random(8), random(8, 8, WIDTH, seed=2)
    where = {"places": "whole"} if named else (0, "whole")
    pipe = pipeline(model, comm, loss=F.mse_loss, microbatches=4, rows={"x": where})
    expected = F.mse_loss(whole(x, places), y)
    expected.backward()
    close(pipe.step({"x": x, "places": places} if named else (x, places), y), expected.detach())
    assert_gradients(pipe, whole)
    close(pipe.predict({"x": x, "places": places} if named else (x, places)), whole(x, places).detach())
    pipe.close()
    pipe = pipeline(build(Places)[0], comm, loss=F.mse_loss, microbatches=4)
    ends = comm.rank in (pipe.pipe.first, pipe.pipe.last)  # these inform the ranks between them
    with pytest.raises(UsageError if ends else PeerError, match="got 2 different numbers: 5, 8; if rows are in"):
        pipe.step((x[:, :5], places[:5]), y[:, :5])
    pipe.close()


def test_rows_in_another_dimension(comm: Any) -> None:
    """Regression: outputs were joined along the first dimension: (1, rows, width) became (microbatches, ...)."""
    model, whole = build(Recurrent)
    x, y = random(3, 7, WIDTH), random(3, 7, WIDTH, seed=2)
    rows = {"x": 1, "y": 1, "output": (1, 1)}

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return F.mse_loss(output[0], target) + output[1].square().mean()

    pipe = pipeline(model, comm, loss=loss, microbatches=4, rows=rows)
    expected = loss(whole(x), y)
    expected.backward()
    for _ in range(2):
        close(pipe.step(x, y), expected.detach())
    for parameter in pipe.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad / 2
    assert_gradients(pipe, whole)
    for got, output in zip(pipe.predict(x), whole(x), strict=True):
        close(got, output.detach())
    pipe.close()
    pipe = pipeline(build(Recurrent)[0], comm, microbatches=4, rows={"x": 1, "output": (1, 0)})
    with pytest.raises(CommlibError, match="a microbatch of 2 rows has output of shape"):
        pipe.predict(x)
    pipe.close()


def test_invalid_rows_are_refused(comm: Any) -> None:
    for rows, text in (
        ({"z": 0}, "rows has 'z', expected x, y or output"),
        ({"x": (0, "all")}, "rows has 'all' for x, expected a dimension"),
        ({"y": -1}, "rows has -1 for y"),
    ):
        with pytest.raises(UsageError, match=text):
            pipeline(build(Places)[0], comm, loss=F.mse_loss, microbatches=2, rows=rows)


@pytest.mark.ranks(min=2)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_values_whose_rows_cannot_be_cut_are_refused(comm: Any) -> None:
    """Regression: each microbatch got a whole numpy array, which torch may have broadcast. A number applies to all."""
    x, y = random(8, WIDTH), random(8, WIDTH, seed=2)
    weights = torch.arange(WIDTH).numpy()

    def loss(output: Tensor, y: tuple[Tensor, Any, float]) -> Tensor:
        return ((output - y[0]).square() * torch.as_tensor(y[1])).mean() * y[2]

    whole = copy.deepcopy(layers())
    pipe = pipeline(layers(), comm, microbatches=2, loss=loss)
    for x_given, y_given, what, text in (
        (x, (y, weights, 0.5), "y", r"a numpy array of shape \(6,\), .*pass torch\.as_tensor\(array\)"),
        (x.numpy(), (y, 1, 0.5), "x", r"a numpy array of shape \(8, 6\)"),
        (x.to_sparse(), (y, 1, 0.5), "x", r"a tensor of layout torch\.sparse_coo, .*pass tensor\.to_dense\(\)"),
        (torch.nested.nested_tensor(list(x)), (y, 1, 0.5), "x", "a nested tensor"),
    ):
        where = pipe.pipe.first if what == "x" else pipe.pipe.last
        is_here = comm.rank == where
        with pytest.raises(UsageError if is_here else CommlibError, match=f"{what} has {text}" if is_here else None):
            pipe.step(x_given if what == "y" or is_here else None, y_given)
    close(pipe.step(x, (y, torch.tensor(1), 0.5)), loss(whole(x), (y, 1, 0.5)).detach())
    pipe.close()
    pipe = pipeline(layers(), comm, microbatches=2, loss=loss, rows={"y": (0, "whole", "whole")})
    close(pipe.step(x, (y, weights, 0.5)), loss(whole(x), (y, weights, 0.5)).detach())
    pipe.close()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).double()  # two stages on each of 4 ranks


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_details_of_a_step(comm: Any, name: Any) -> None:
    def loss(output: Tensor, target: Tensor) -> Any:
        value = F.cross_entropy(output, target)
        return value, {"right": (output.argmax(-1) == target).double().mean(), "mean": output.mean(0)}

    x, y, whole = random(8, WIDTH), torch.arange(8) % WIDTH, layers()
    y[3:6] = -100  # one microbatch without terms, and one with a single term
    pipe = pipeline(layers(), comm, loss=loss, microbatches=4, schedule=name)
    output = whole(x)
    expected, parts = F.cross_entropy(output, y), [slice(start, start + 2) for start in range(0, 8, 2)]
    expected.backward()
    for call in (pipe.step, pipe.evaluate):
        result = call(x, y, outputs=True)
        close(result.loss, expected.detach())
        for got, part in zip(result.losses, parts, strict=True):
            own = F.cross_entropy(output[part], y[part]).item()
            assert got == pytest.approx(own, rel=1e-12, nan_ok=True)
        weights = torch.tensor([0.4, 0.2, 0.0, 0.4], dtype=torch.float64)
        close(
            result.metrics["mean"],
            sum(w * output[p].mean(0) for w, p in zip(weights, parts, strict=True)).detach(),
        )
        assert set(result.metrics) == {"right", "mean"}
        if comm.rank == pipe.pipe.last:
            close(result.outputs, output.detach())
        else:
            assert result.outputs is None
    assert_gradients(pipe, whole)
    assert pipe.step(x, y, details=True).outputs is None
    assert isinstance(pipe.step(x, y), Tensor)
    pipe.close()


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.MSELoss(reduction="sum"), lambda o, t: ((o - t) ** 2).mean()])
def test_microbatches_of_their_own_lengths(comm: Any, loss: Any) -> None:
    """Sequences of 3, 5 and 2 words: a mean over words weighs them by these lengths, not by rows."""
    shapes = [(2, 3), (1, 5), (3, 2)]
    xs = [random(*shape, WIDTH, seed=number) for number, shape in enumerate(shapes)]
    ys = [random(*shape, WIDTH, seed=number + 9) for number, shape in enumerate(shapes)]
    by_hand = not isinstance(loss, nn.Module)
    weigh = (lambda y: y.numel()) if by_hand else None
    pipe = pipeline(layers(), comm, loss=loss, microbatches=4, weigh=weigh)
    whole = layers()
    outputs = torch.cat([whole(x).reshape(-1, WIDTH) for x in xs])
    expected = loss(outputs, torch.cat([y.reshape(-1, WIDTH) for y in ys]))
    expected.backward()
    first, last = comm.rank == pipe.pipe.first, comm.rank == pipe.pipe.last
    close(pipe.step(xs if first else None, ys if last else None, cut=False), expected.detach())
    assert_gradients(pipe, whole)
    close(pipe.evaluate(xs, ys, cut=False), expected.detach())
    with pytest.raises(UsageError if first or last else PeerError, match="at most 4 microbatches, got 5 microbatches"):
        pipe.step(xs[:1] * 5, ys[:1] * 5, cut=False)
    pipe.close()
    if by_hand:
        pipe = pipeline(layers(), comm, loss=loss, microbatches=4)
        with pytest.raises(UsageError, match="weigh="):
            pipe.step(xs, ys, cut=False)
        pipe.close()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
def test_gradients_are_clipped_by_each_norm(comm: Any, norm_type: float) -> None:
    x, y, whole = random(8, WIDTH), random(8, WIDTH, seed=2), layers()
    pipe = pipeline(layers(), comm, loss=F.mse_loss, microbatches=2)
    pipe.step(x, y)
    F.mse_loss(whole(x), y).backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01, norm_type=norm_type)
    got = pipe.clip_grad_norm(0.01, norm_type=norm_type)
    close(got.double(), norm)
    assert_gradients(pipe, whole)
    assert len(set(comm.all_gather_object(got.item()))) == 1
    for parameter in pipe.parameters():
        parameter.grad[0] = math.nan  # type: ignore[index]
    with pytest.raises(RuntimeError, match="is nan"):
        pipe.clip_grad_norm(1.0, norm_type=norm_type, error_if_nonfinite=True)
    assert math.isnan(pipe.clip_grad_norm(1.0, norm_type=norm_type))
    with pytest.raises(UsageError, match="norm_type"):
        pipe.clip_grad_norm(1.0, norm_type=0)
    pipe.close()


@pytest.mark.parametrize("by", ["an optimizer", "clip_grad_norm_", "torch"])
def test_clipping_includes_other_stages(comm: Any, by: str) -> None:
    """Regression: all methods but the pipeline's own clipped by the norm of this rank's stages only."""
    if comm.size == 1:
        return
    x, y, whole = random(8, WIDTH), random(8, WIDTH, seed=2), layers()
    mesh = Mesh(dp=1, pp=-1)
    pipe = pipeline(layers(), mesh["pp"], loss=F.mse_loss, microbatches=2)
    plain = torch.optim.SGD(pipe.parameters(), 0.1)
    optimizer: Any = DistributedOptimizer(plain, pipe.named_parameters(), mesh=mesh)
    pipe.step(x, y)
    F.mse_loss(whole(x), y).backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
    if by == "torch":
        with pytest.raises(UsageError, match=rf"rank {comm.rank} of .* only, which has some stages of a pipeline"):
            torch.nn.utils.clip_grad_norm_(pipe.parameters(), 0.01)
        one = next(parameter for parameter in pipe.parameters() if parameter.grad is not None)
        assert one.grad is not None
        close(torch.nn.utils.get_total_norm([one.grad]), one.grad.norm())  # it belongs to one layer, not to stages
        pipe.clip_grad_norm(0.01)
    else:
        close(
            (optimizer.clip_grad_norm(0.01) if by == "an optimizer" else clip_grad_norm_(pipe.parameters(), 0.01)), norm
        )
    assert_gradients(pipe, whole)
    optimizer.close()
    pipe.close()
    mesh.close()


def test_outputs_of_other_lengths_are_refused(comm: Any) -> None:
    """Regression: torch raised its own error of mismatched sizes."""
    pipe = pipeline(nn.Sequential(*(nn.Linear(4, 4) for _ in range(comm.size))), comm, microbatches=2)
    with pytest.raises((UsageError, PeerError), match="outputs of microbatches have different lengths"):
        pipe.predict([torch.ones(2, 3, 4), torch.ones(2, 5, 4)], cut=False)
    pipe.close()


class Outside(nn.Module):
    """Computes a pipeline's inputs outside of it: x, together with an argument without gradients, and y."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.of_target = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, numbers: Tensor, target: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x = self.embedding(numbers).tanh()
        return (x, numbers), self.of_target(target).tanh() + x.mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_gradients_flow_through_x_and_y(comm: Any, schedule: Any) -> None:
    """Regression: the second microbatch differentiated a graph that the first one had freed."""
    torch.manual_seed(0)
    outside = Outside().double()
    first = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))).double()
    layers = [Scaled(first), *(nn.Linear(WIDTH, WIDTH).double() for _ in range(comm.size))]
    whole, theirs = copy.deepcopy((nn.ModuleList(layers), outside))
    pipe = pipeline(layers, comm, microbatches=3, loss=F.mse_loss, schedule=schedule)
    called: list[int] = []
    for seed in range(2):
        numbers, target = torch.arange(8) % 5, random(8, WIDTH, seed=seed)
        x, y = theirs(numbers, target)
        expected = F.mse_loss(through(whole, x), y)
        expected.backward()
        x, y = outside(numbers, target)
        x[0].register_hook(lambda gradient: called.append(len(gradient)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that ranks have their own gradients
            close(pipe.step(x, y), expected.detach())
    assert_gradients(pipe, whole)
    assert set(called) <= {8} and len(called) == (2 if comm.rank in (pipe.pipe.first, pipe.pipe.last) else 0)
    for name, weight in outside.named_parameters():
        own = torch.zeros_like(weight) if weight.grad is None else weight.grad
        close(torch.from_numpy(comm.all_reduce(own.numpy())), theirs.get_parameter(name).grad)
    pipe.close()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("wrap", ["optimizer", "layer"])
def test_outer_layers_can_be_reduced_by_all_ranks(comm: Any, op: Any, wrap: str) -> None:
    """Regression: the rank that used them waited within `step` for ranks that do not, until COMMLIB_TIMEOUT."""
    torch.manual_seed(0)
    outside: Any = nn.Linear(WIDTH, WIDTH).double()
    layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(comm.size)]
    whole = copy.deepcopy((nn.Sequential(*layers), outside))
    pipe = pipeline(layers, comm, microbatches=2, loss=F.mse_loss)
    if wrap == "optimizer":
        optimizer: Any = DistributedOptimizer(torch.optim.SGD(outside.parameters(), 0.1), op=op)
    else:
        outside = DataParallel(outside, op=op)
        optimizer = torch.optim.SGD(outside.parameters(), 0.1)
    theirs = torch.optim.SGD(whole[1].parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that ranks have their own gradients
        for seed in range(2):
            optimizer.zero_grad()
            theirs.zero_grad()
            x, y = random(6, WIDTH, seed=seed), random(6, WIDTH, seed=9)
            F.mse_loss(whole[0](whole[1](x)), y).backward()
            if seed and op == "sum":  # all ranks run a backward of their own, too
                for rank in range(comm.size):
                    whole[1](x * rank).sum().backward()
                outside(x * comm.rank).sum().backward()
            if op == "mean":
                with pytest.raises(UsageError if comm.rank == pipe.pipe.first else PeerError, match="pipeline"):
                    pipe.step(outside(x), y)
                break
            pipe.step(outside(x), y)
            for parameters in (outside.parameters(), whole[1].parameters()):
                nn.utils.clip_grad_norm_(parameters, 0.01)  # gradients are final; once ranks clipped their own
            optimizer.step()
            theirs.step()
    if op == "sum":
        for ours, other in zip(outside.parameters(), whole[1].parameters(), strict=True):
            close(ours.detach(), other.detach())
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))
    if wrap == "optimizer":
        optimizer.close()
    pipe.close()
    del outside, optimizer, whole, pipe
    gc.collect()  # the error of a step keeps a DataParallel alive, whose gradients would take turns with others'


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved"])
@pytest.mark.parametrize("loss", [F.mse_loss, nn.MSELoss(reduction="sum"), lambda out, y: (out - y).square().mean()])
def test_a_batch_without_rows(comm: Any, schedule: Any, loss: Any) -> None:
    """Regression: the loss was 0 without gradients. One process has 0/0, but zero gradients, so that momentum acts."""
    layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2 * comm.size)]
    whole = copy.deepcopy(nn.Sequential(*layers))
    pipe = pipeline(layers, comm, schedule=schedule, microbatches=2 * comm.size, loss=loss)
    for rows in (8, 0):
        x = torch.ones(rows, WIDTH, dtype=torch.float64)
        expected = loss(whole(x), x)
        expected.backward()
        torch.testing.assert_close(pipe.step(x, x), expected.detach(), equal_nan=True, rtol=EXACT, atol=EXACT)
        assert_gradients(pipe, whole)
        for model in (whole, pipe):
            model.zero_grad()
    torch.testing.assert_close(pipe.evaluate(x, x), expected.detach(), equal_nan=True)
    pipe.close()


@pytest.mark.ranks(min=2)
def test_an_optimizer_of_outer_layers_closed_on_one_rank_is_refused(comm: Any) -> None:
    """Otherwise the others would wait for its part until COMMLIB_TIMEOUT."""
    outside = nn.Linear(WIDTH, WIDTH)
    pipe = pipeline([nn.Linear(WIDTH, WIDTH) for _ in range(comm.size)], comm, microbatches=2, loss=F.mse_loss)
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(outside.parameters(), 0.1), op="sum")
    if comm.rank == comm.size - 1:
        optimizer.close()
    with pytest.raises(UsageError, match=rf"but ranks \[{comm.size - 1}\] have closed"):
        pipe.step(outside(torch.ones(4, WIDTH)), torch.ones(4, WIDTH))
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))
    optimizer.close()
    pipe.close()


@pytest.mark.ranks(min=2)
def test_gradients_of_different_stages_are_not_mixed(comm: Any) -> None:
    """Regression: those of stages with equal shapes were summed if parameters were given without names."""
    pipe = pipeline([nn.Linear(WIDTH, WIDTH) for _ in range(comm.size)], comm, microbatches=2, loss=F.mse_loss)
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(pipe.parameters(), 0.1), op="sum")
    with pytest.raises((UsageError, PeerError), match="they have different stages"):
        pipe.step(torch.ones(4, WIDTH), torch.ones(4, WIDTH))
    optimizer.close()
    pipe.close()


class Scaled(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        return self.layer(x) * numbers[:, None]  # type: ignore[no-any-return]


def through(layers: Any, x: Any) -> Any:
    value = layers[0](*x)
    for layer in layers[1:]:
        value = layer(value)
    return value


@pytest.mark.ranks(min=2)
def test_mismatched_batches_are_refused(comm: Any) -> None:
    """Regression: loaders with different seeds silently paired x of one rank with y of another."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH).double() for _ in range(comm.size)))
    whole = copy.deepcopy(model)
    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss)
    x, y, is_first = random(8, WIDTH), random(8, WIDTH, seed=2), comm.rank == 0
    with pytest.raises(UsageError, match="got different y, so x and y are not of the same rows"):
        pipe.step(x, y if is_first else y.flip(0))
    with pytest.raises(UsageError, match="got different x, so x and y are not of the same rows"):
        pipe.step(x if is_first else x.flip(0), None if is_first else y)
    pipe.zero_grad()
    # x that is augmented on each rank has the same rows
    got = pipe.step(x if is_first else x + 1, y)
    expected = F.mse_loss(whole(x), y)
    expected.backward()
    close(got, expected.detach())
    assert_gradients(pipe, whole)
    pipe.close()


@pytest.mark.ranks(min=2)
def test_dicts_are_compared_by_their_keys(comm: Any) -> None:
    """Regression: a rank that filled a dict of targets in another order had its batch refused."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH).double() for _ in range(comm.size)))
    whole = copy.deepcopy(model)

    def loss(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(output, target["near"]) + 0.5 * F.mse_loss(output, target["far"])

    pipe = pipeline(model, comm, microbatches=2, loss=loss)
    x, pairs = random(8, WIDTH), [("near", random(8, WIDTH, seed=2)), ("far", random(8, WIDTH, seed=3))]
    close(pipe.step(x, dict(pairs[:: -1 if comm.rank else 1])), loss(whole(x), dict(pairs)).detach())
    others = [("near", pairs[1][1]), ("far", pairs[0][1])]
    with pytest.raises(UsageError, match="got different y"):
        pipe.step(x, dict(others if comm.rank else pairs))
    pipe.close()
