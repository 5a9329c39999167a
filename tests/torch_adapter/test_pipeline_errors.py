"""Errors on one rank of a pipeline reach all ranks; ranks that catch them can continue."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import commlib
import commlib_torch
from commlib.errors import MismatchError, PeerError, UsageError
from commlib_torch import DistributedOptimizer, GradScaler, SyncBatchNorm, pipeline

WIDTH = 4


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, y


class Broken:
    """Raises from the given call on: in a gradient's hook, in the loss, or in a layer."""

    def __init__(self) -> None:
        self.left = -1

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError("on purpose")


def in_a_gradient(pipe: Any, broken: Broken) -> None:
    next(iter(pipe.parameters())).register_hook(lambda gradient: broken())


def in_a_layer(pipe: Any, broken: Broken) -> None:
    next(iter(pipe.parts[0].children())).register_forward_pre_hook(lambda layer, given: broken())


PLACES = [
    ("1f1b", in_a_gradient, 2),  # the last one: all messages have been sent
    ("zb_h1", in_a_gradient, 1),
    ("zb_v", in_a_layer, 2),
]


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(("schedule", "place", "call"), PLACES)
@pytest.mark.parametrize("culprit", [0, -1], ids=["first", "last"])
def test_an_error_caught_on_all_ranks(
    comm: Any, schedule: Any, place: Callable[[Any, Broken], None], call: int, culprit: int
) -> None:
    """Regression: after an error in the last gradients the others waited for ever, and no rank could continue."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2 * comm.size)))
    whole = copy.deepcopy(model)
    pipe = pipeline(model, comm, schedule=schedule, microbatches=2, loss=F.mse_loss)
    theirs, ours = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (whole, pipe))
    broken = Broken()
    if comm.rank == culprit % comm.size:
        place(pipe, broken)
    for step in range(3):
        x, y = batch(step)
        if step == 1:
            for _ in range(2):
                broken.left = call
                with pytest.raises((ZeroDivisionError, PeerError)) as caught:
                    pipe.step(x, y)
                is_culprit = comm.rank == culprit % comm.size
                assert caught.type is (ZeroDivisionError if is_culprit else PeerError)
                if not is_culprit and comm.size == 2:
                    assert "ZeroDivisionError: on purpose" in str(caught.value)
                broken.left = -1
                ours.zero_grad()
        loss = F.mse_loss(whole(x), y)
        torch.testing.assert_close(pipe.step(x, y), loss.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(pipe.evaluate(x, y), loss.detach(), rtol=1e-12, atol=0)
        loss.backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in pipe.gather_state_dict().items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-10, atol=1e-10)
    pipe.close()


@pytest.mark.ranks(min=2)
def test_an_error_before_and_after_the_schedule(comm: Any) -> None:
    """Regression: an invalid batch on one rank made the others wait in the middle of the schedule."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(comm.size)))
    whole = copy.deepcopy(model)
    x, y = batch()
    asked: list[float] = []

    def weigh(target: Tensor) -> float:
        asked.append(1.0)
        if len(asked) == 2:
            raise ZeroDivisionError("on purpose")
        return float(len(target))

    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss, weigh=weigh)
    last = comm.rank == comm.size - 1
    # On a distant rank the message ends before its cause.
    with pytest.raises(ZeroDivisionError if last else PeerError, match="on purpose" if comm.size == 2 else None):
        pipe.step(x, y)
    pipe.zero_grad()
    text = "rank 0 has the first stage: pass x on it" if comm.rank == 0 or comm.size == 2 else None
    with pytest.raises(UsageError if comm.rank == 0 else PeerError, match=text):
        pipe.predict(None if comm.rank == 0 else x)
    expected = F.mse_loss(whole(x), y)
    torch.testing.assert_close(pipe.step(x, y), expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(pipe.predict(x), whole(x).detach(), rtol=1e-12, atol=1e-12)
    expected.backward()
    theirs = dict(whole.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-10, atol=1e-12)
    pipe.close()
    with pytest.raises(UsageError, match="the pipeline is closed: create a new one on all ranks"):
        pipe.step(x, y)


class Several(nn.Module):
    """A layer that also returns values that are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x), None, {"name": "several", "sums": self.linear(x).sum(1)}


@pytest.mark.parametrize("rows", [8, 1, 0])
def test_predictions_without_rows_and_with_other_values(comm: Any, rows: int) -> None:
    """Regression: None among the outputs raised AttributeError, and a batch without rows TypeError."""
    layers = [*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(comm.size)), Several()]
    pipe = pipeline(layers, comm, microbatches=3)
    x = batch()[0][:rows]
    expected = nn.Sequential(*layers)(x) if comm.size == 1 else None
    got, nothing, more = pipe.predict(x)
    assert got.shape == (rows, 3) and nothing is None and more["name"] == "several" and more["sums"].shape == (rows,)
    torch.testing.assert_close(got.sum(1), more["sums"])
    if expected is not None:
        torch.testing.assert_close(got, expected[0].detach())
    pipe.close()


class Forward(nn.Module):
    def __init__(self, function: Any, chance: float = 0.1) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function, self.chance = function, chance

    def forward(self, x: Tensor) -> Any:
        return self.second(F.dropout(self.function(self.first(x)), self.chance, self.training))


def layers_with(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4))


OTHERS: dict[str, tuple[nn.Module, nn.Module, str]] = {
    "option": (layers_with(nn.Dropout(0.1)), layers_with(nn.Dropout(0.9)), r"layer 1 of stage .: .*p=0\.1.*p=0\.9"),
    "kind": (layers_with(nn.ReLU()), layers_with(nn.GELU()), r"layer 1 of stage .: ReLU\(.*: GELU\(approximate='none'"),
    "function": (Forward(F.relu), Forward(F.gelu), "relu.*gelu"),
    "number": (Forward(F.relu), Forward(F.relu, 0.9), r"dropout.*0\.1.*0\.9"),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", OTHERS)
def test_layers_with_different_options_are_refused(comm: Any, name: str) -> None:
    """Regression: each rank silently ran the stage of its own model."""
    one, other, text = OTHERS[name]
    with pytest.raises(MismatchError, match=text):
        pipeline(copy.deepcopy(other if comm.rank else one), comm, microbatches=2, loss=F.mse_loss)


LOSSES: dict[str, tuple[Any, Any, str]] = {
    "kind": (nn.MSELoss(), nn.L1Loss(), "loss: MSELoss.*loss: L1Loss"),
    "option": (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1), r"smoothing=0\.0.*smoothing=0\.1"),
    "function": (F.mse_loss, F.l1_loss, "loss: .*mse_loss.*loss: .*l1_loss"),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", LOSSES)
def test_different_losses_are_refused(comm: Any, name: str) -> None:
    """Regression: the loss of the last stage's rank was silently used."""
    one, other, text = LOSSES[name]
    with pytest.raises(MismatchError, match=text):
        pipeline(layers_with(nn.ReLU()), comm, microbatches=2, loss=other if comm.rank else one)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_line_search_optimizer_is_refused(comm: Any, is_wrapped: bool) -> None:
    """Regression: each rank silently searched by the gradients of its own stages."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(comm.size)))
    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss)
    optimizer: Any = torch.optim.LBFGS(pipe.parameters(), line_search_fn="strong_wolfe")
    if is_wrapped:
        mesh = commlib.Mesh(pp=comm.size, dp=1)
        optimizer = DistributedOptimizer(optimizer, pipe.named_parameters(), mesh=mesh)

    def closure() -> Tensor:
        raise AssertionError("it was called")

    with pytest.raises(UsageError, match="LBFGS needs the gradients of all weights"):
        optimizer.step(closure)
    other = nn.Linear(2, 2)
    torch.optim.LBFGS(other.parameters(), max_iter=1).step(lambda: other(torch.ones(2)).sum())  # of another model
    pipe.close()


@pytest.mark.ranks(min=2)
def test_a_loss_scale_of_one_rank_is_refused(comm: Any) -> None:
    """Regression: with an infinity in one stage's gradients that rank silently skipped the step alone."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(comm.size)))
    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    before = pipe.gather_state_dict()
    first = next(pipe.parameters())
    for overflows in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        pipe.step(*batch(), scale=scaler.get_scale())
        if overflows and comm.rank == 0:
            first.grad[0, 0] = float("inf")  # type: ignore[index]
            scaler.step(optimizer)
        else:
            with pytest.raises(UsageError, match=r"looks for infinities.*different stages.*GradScaler\(ranks="):
                scaler.step(optimizer)
        optimizer.zero_grad()
    pipe.step(*batch())
    alone = GradScaler(ranks=commlib.Mesh(pp=comm.size, dp=1)["dp"])
    alone.scale(torch.zeros(()))
    with pytest.raises(UsageError, match=r"it queries global ranks \[\d\] .*ranks \[\d.*other stages.*ranks="):
        alone.step(optimizer)
    for name, value in pipe.gather_state_dict().items():
        assert torch.equal(value, before[name])
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    other = nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(other(torch.ones(2)).sum()).backward()
    scaler.step(torch.optim.SGD(other.parameters(), 0.1))  # of another model
    pipe.close()


@pytest.mark.ranks(min=2)
def test_a_common_loss_scale_matches_one_process(comm: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(comm.size)))
    whole = copy.deepcopy(model)
    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss)
    optimizer, single = (torch.optim.SGD(one.parameters(), 0.1) for one in (pipe, whole))
    ours, theirs = GradScaler(ranks=comm, init_scale=4.0), torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        x, y = batch(step)
        pipe.step(x, y, scale=ours.get_scale())
        ours.scale(torch.zeros(()))
        theirs.scale(F.mse_loss(whole(x), y)).backward()
        if step == 1:
            next(whole.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
            if comm.rank == 0:
                pipe.get_parameter("stage0.0.weight").grad[0, 0] = float("inf")  # type: ignore[index]
        for scaler, stepping in ((ours, optimizer), (theirs, single)):
            scaler.step(stepping)
            scaler.update()
            stepping.zero_grad()
        assert ours.get_scale() == theirs.get_scale()
    for name, value in pipe.gather_state_dict().items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-10, atol=1e-12)
    pipe.close()


def normed(comm: Any, norm: Callable[..., nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH)) for _ in range(comm.size))).double()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", ["commlib", "torch"])
def test_batch_norm_across_stages_is_refused(comm: Any, kind: str, tmp_path: Path) -> None:
    """Regression: with its default group of all ranks, the first step never ended."""
    path = comm.broadcast_object(str(tmp_path / "store"))
    if kind == "torch":
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=comm.rank, world_size=comm.size)
    try:
        model = normed(comm, SyncBatchNorm if kind == "commlib" else nn.SyncBatchNorm)
        with pytest.raises(
            UsageError, match=r"layer '0\.1' \(SyncBatchNorm\) computes statistics over ranks \[0, 1.*process_set="
        ):
            pipeline(model, comm, microbatches=2, loss=F.mse_loss)
    finally:
        if kind == "torch":
            dist.destroy_process_group()


@pytest.mark.ranks(min=2)
def test_batch_norm_within_a_stage_is_accepted(comm: Any) -> None:
    sets = [commlib_torch.add_process_set([rank]) for rank in range(comm.size)]
    losses = []
    for norm in (lambda width: SyncBatchNorm(width, process_set=sets[comm.rank]), nn.BatchNorm1d, nn.SyncBatchNorm):
        pipe = pipeline(normed(comm, norm), comm, microbatches=2, loss=F.mse_loss)
        if norm is not nn.SyncBatchNorm:  # which has no CPU kernel
            losses.append(pipe.step(*batch()))
        pipe.close()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-10, atol=0)
    for one in sets:
        commlib_torch.remove_process_set(one)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel])
def test_copies_are_refused_with_advice(comm: Any, copied: Callable[[Any], Any]) -> None:
    """Regression: mpi4py raised an error about a communicator that cannot be serialised."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(comm.size)))
    pipe = pipeline(model, comm, microbatches=2, loss=F.mse_loss)
    with pytest.raises(UsageError, match=r"cannot be copied or pickled.*gather_state_dict\(\)"):
        copied(pipe)
    pipe.close()


def refused(comm: Any, model: Any, text: str, *, loss: Any = F.mse_loss) -> None:
    """Check that all ranks raise the same error, in pipeline() or at the first batch."""
    with pytest.raises(UsageError, match=text):
        pipe = pipeline(model, comm, microbatches=2, loss=loss)
        try:
            pipe.step(*batch())
        finally:
            pipe.close()


class Twice(nn.Module):
    """A model that uses the weight of an embedding with sparse gradients on the first and the last rank."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.last = (nn.Embedding(8, WIDTH, sparse=True) for _ in range(2))
        self.last.weight = self.first.weight
        self.middle = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2 * size))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0], device=x.device)
        value = self.first(rows)
        for layer in self.middle:
            value = layer(value).tanh()
        product: Tensor = value * self.last(rows)
        return product


@pytest.mark.ranks(min=2)
def test_models_that_are_not_ready_are_refused_with_what_to_do(comm: Any) -> None:
    """Regression: torch's error on uninitialised parameters named no layer, that on compiled models its `__call__`."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(comm.size)]
    text = r"layer 1\.lazy \(LazyLinear\) is lazy: its weight and bias .*run the model once"
    refused(comm, [nn.Identity(), nn.Sequential(OrderedDict(lazy=nn.LazyLinear(WIDTH))), *layers], text)
    refused(comm, nn.Sequential(*layers, nn.LazyBatchNorm1d()), rf"layer {comm.size} \(LazyBatchNorm1d\) is lazy")
    text = r"the model is a compiled Sequential .*pass the original Sequential.*layer\.compile\(\)"
    refused(comm, torch.compile(nn.Sequential(*layers), backend="eager"), text)
    script = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    refused(
        comm,
        torch.jit.script(nn.Sequential(*layers)),
        r"the model is a script of a Sequential .*pass the original Sequ",
    )
    refused(comm, nn.Sequential(*layers, nn.Sequential(script)), rf"layer {comm.size}\.0 is a script of a Linear")
    refused(comm, [torch.jit.trace(layers[0], torch.ones(2, WIDTH)), *layers], r"layer 0 is a script of a Linear")
    refused(comm, Twice(comm.size), r"layer first \(Embedding\) has sparse gradients.* set sparse=False")


class LazyLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(1)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.head(output), target[:, :1])


UNREADY: dict[str, tuple[Any, str]] = {
    "name": ("mse", r"loss= is 'mse' \(str\): pass a function of \(output, target\), such as torch\.nn\.func"),
    "class": (nn.MSELoss, r"loss= is the class MSELoss: pass an instance of it, MSELoss\(\.\.\.\)"),
    "number": (0.5, r"loss= is 0\.5 \(float\)"),
    "lazy": (LazyLoss(), r"layer head of the loss \(LazyLinear\) is lazy: its weight and bias .*call the loss once"),
    "its method": (LazyLoss().forward, r"layer head of the loss \(LazyLinear\) is lazy"),
}


@pytest.mark.parametrize("name", UNREADY)
def test_losses_that_are_not_ready_are_refused_with_what_to_do(comm: Any, name: str) -> None:
    """Regression: a step failed within torch on the last rank, and others only reported that it had left."""
    loss, text = UNREADY[name]
    with pytest.raises(UsageError, match=text):
        pipeline([nn.Linear(WIDTH, WIDTH) for _ in range(comm.size)], comm, microbatches=2, loss=loss)


class Wrapper(nn.Module):
    """Calls its module by the attribute that torch.compile uses."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, x: Tensor, *target: Tensor) -> Tensor:
        result: Tensor = self._orig_mod(x, *target) * 2
        return result


@pytest.mark.ranks(min=2)
def test_a_wrapper_with_the_attribute_of_compiled_modules_is_accepted(comm: Any) -> None:
    """Regression: it was refused as a compiled model, and as a loss its inner module was called instead."""
    torch.manual_seed(0)
    model = Wrapper(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(comm.size))))
    whole = copy.deepcopy(model)
    x, y = batch()
    pipe = pipeline(model, comm, microbatches=2, loss=Wrapper(nn.MSELoss()))
    torch.testing.assert_close(pipe.step(x, y), 2 * F.mse_loss(whole(x), y).detach(), rtol=1e-12, atol=0)
    pipe.close()


@pytest.mark.ranks(min=2)
def test_a_step_without_a_loss_is_refused_on_all_ranks(comm: Any) -> None:
    """Regression: all ranks but the last one only reported a channel and a rank that had left."""
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(comm.size)]
    pipe = pipeline(nn.Sequential(*layers), comm, microbatches=2)
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(UsageError, match="there is no loss: pass loss= to pipeline"):
            call(*batch())
    assert pipe.predict(batch()[0]).shape == (8, WIDTH)
    pipe.close()


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, x.to(torch.float8_e5m2)


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"rows": [x.to_sparse()]}


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nested.nested_tensor(list(x))


UNSENT = [
    (Narrow, r"a tensor of torch\.float8_e5m2, .*return tensor\.view\(torch\.uint8\)"),
    (Sparse, r"a tensor of layout torch\.sparse_coo, .*return tensor\.to_dense\(\)"),
    (Nested, r"a nested tensor, .*return tensor\.to_padded_tensor"),
]


@pytest.mark.ranks(min=2)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("kind", "text"), UNSENT)
def test_unsendable_tensors_are_refused_with_the_layer(comm: Any, kind: Any, text: str) -> None:
    """Regression: the error was about an array over a tensor, and named no layer."""
    layers = [kind(), *(nn.Identity() for _ in range(comm.size - 1))]
    pipe = pipeline(layers, comm, microbatches=2, loss=F.mse_loss, split=[1] * comm.size)
    is_first = comm.rank == 0
    match = f"layer 0 gives stage 1 {text}" if is_first else None
    with pytest.raises(UsageError if is_first else PeerError, match=match):
        pipe.predict(batch()[0])
    pipe.close()


@pytest.mark.parametrize("given", [3, "x", (1, 2.0), {}, np.ones((8, WIDTH))])
@pytest.mark.parametrize("name", ["verify", "example"])
def test_batches_without_tensors_are_refused(comm: Any, name: str, given: Any) -> None:
    """Regression: the model was run with them, and raised its own error."""
    with pytest.raises(UsageError, match=f"pipeline: {name}= has no tensor, expected .*, got"):
        pipeline(layers(comm), comm, microbatches=2, loss=nn.MSELoss(), **{name: given})


def test_a_batch_without_its_target_is_refused(comm: Any) -> None:
    x, _ = batch()
    with pytest.raises(UsageError, match=r"verify= has no target.*pass verify=\(x, y\), the arguments of step"):
        pipeline(layers(comm), comm, microbatches=2, loss=nn.MSELoss(), verify=x)


def test_microbatches_are_a_whole_number(comm: Any) -> None:
    for wrong in ("2", 2.5):
        with pytest.raises(UsageError, match=f"and {wrong!r} microbatches; expected at least 1 of each"):
            pipeline(layers(comm), comm, microbatches=cast("Any", wrong), loss=nn.MSELoss())


def layers(comm: Any) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(comm.size)))
