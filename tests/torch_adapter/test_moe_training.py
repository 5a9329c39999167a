"""Models with experts, trained over replicas, stages and divided layers, match one process with the whole batch."""

from __future__ import annotations

import contextlib
import gc
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from commlib import Communicator, Mesh
from commlib.errors import MismatchError, UsageError
from commlib.expert import Experts
from commlib.tensor_parallel import Column, Row
from commlib_torch import (
    DistributedOptimizer,
    allreduce,
    broadcast_optimizer_state,
    broadcast_parameters,
    clip_grad_norm_,
    gather_optimizer_state,
    gather_state_dict,
    load_optimizer_state,
    parallelize,
    pipeline,
)
from commlib_torch.expert import (
    MoE,
    auxiliary_loss,
    expertize,
    load_experts,
    rebalance_experts,
    save_experts,
)
from tests.torch_adapter.expert_oracle import near, single

WIDTH, EXPERTS = 8, Experts(4, top_k=2, hidden=6, balance_weight=0.1)


class Block(nn.Module):
    def __init__(self, ranks: Any, options: Experts = EXPERTS, again: bool = False) -> None:
        super().__init__()
        self.norm, self.mlp, self.again = nn.LayerNorm(WIDTH), MoE(WIDTH, options, ranks), again

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)
        return out


def model(ranks: Any, options: Experts = EXPERTS, layers: int = 2, again: bool = False) -> Any:
    torch.manual_seed(0)
    blocks = [Block(ranks, options, again) for _ in range(layers)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, WIDTH)).double()


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, 3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y) + auxiliary_loss(model)


def train(model: nn.Module, optimizer: Any, part: Any, rows: int, steps: Any, passes: int = 1) -> list[Tensor]:
    """Train and return the losses. part: selects this rank's part of a tensor."""
    losses = []
    for number in steps:
        x, y = (part(each) for each in batch(rows, number))
        total = torch.zeros((), dtype=torch.float64)
        for own_x, own_y in zip(x.chunk(passes), y.chunk(passes), strict=True):
            loss = loss_of(model, own_x, own_y) / passes
            loss.backward()
            total += loss.detach()
        losses.append(total)
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def alone(comm: Communicator, rows: int, steps: Any, options: Experts = EXPERTS) -> tuple[nn.Module, list[Tensor]]:
    whole = model(single(comm), options)
    return whole, train(whole, sgd(whole), lambda each: each, rows, steps)


def compare(comm: Communicator, got: dict[str, Tensor], whole: nn.Module) -> None:
    expected = whole.state_dict()
    assert set(got) == set(expected)
    for name, value in got.items():
        near(value, expected[name], name)


def own_rows(comm: Communicator) -> Any:
    return lambda each: each.chunk(comm.size)[comm.rank]


def meshes(size: int) -> list[dict[str, int]]:
    return [{"edp": 1, "ep": size}] + [{"edp": size // 2, "ep": 2}] * (size == 4) + [{"edp": size, "ep": 1}]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("again", [False, True])
def test_as_one_process(comm: Communicator, which: int, again: bool) -> None:
    """Experts, copies of experts, and both; also with activations recomputed in backward."""
    result = meshes(comm.size)
    if which >= len(result) or comm.size == 3:
        pytest.skip("not on so many ranks")
    mesh = Mesh(dp=comm.size).refactor({"dp": result[which]})
    rows = 2 * comm.size
    whole, expected = alone(comm, rows, range(3))
    own = model(mesh, again=again)
    optimizer = DistributedOptimizer(sgd(own), own.named_parameters(), mesh=mesh)
    losses = train(own, optimizer, own_rows(comm), rows, range(3))
    for got, one in zip(losses, expected, strict=True):
        mean = comm.all_reduce(got.reshape(1).numpy(), "mean")
        near(torch.from_numpy(mean), one.reshape(1), "loss")
    compare(comm, gather_state_dict(own), whole)
    mesh.close()


def test_accumulation_steps_change_nothing(comm: Communicator) -> None:
    """The balance loss of a sequence does not depend on the number of passes per step."""
    if comm.size == 3:
        pytest.skip("4 experts")
    rows = 4 * comm.size
    whole, _ = alone(comm, rows, range(2))
    own = model(comm)
    optimizer = DistributedOptimizer(sgd(own), own.named_parameters(), ranks=comm, backward_passes_per_step=2)
    train(own, optimizer, own_rows(comm), rows, range(2), passes=2)
    compare(comm, gather_state_dict(own), whole)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "way", ["plain", "sum", "predivide", "no_sync between", "never cleared", "pipeline", "stages", "copies"]
)
def test_two_backwards_before_a_step_add_up(comm: Communicator, way: str) -> None:
    """Regression: each reduction scaled experts' gradients again, so that earlier ones counted too little."""
    if comm.size == 3:
        pytest.skip("4 experts")
    rows, passes = 2 * comm.size, 3 if way == "no_sync between" else 2
    mesh = Mesh(pp=1, dp=comm.size) if way != "stages" else Mesh(pp=2, dp=comm.size // 2)
    if way == "copies":
        mesh = Mesh(dp=comm.size).refactor({"dp": {"edp": comm.size // 2, "ep": 2}})
    whole = model(single(comm))
    own: Any = model(mesh)
    is_pipeline = way in ("pipeline", "stages")
    if is_pipeline:
        own = pipeline(own, mesh["pp"], schedule="1f1b", microbatches=2, loss=F.mse_loss)
    options: dict[str, Any] = {"op": "sum" if way == "sum" else "mean"}
    if way == "predivide":
        options["gradient_predivide_factor"] = 2.0
    optimizer: Any = DistributedOptimizer(sgd(own), own.named_parameters(), mesh=mesh, **options)
    plain = sgd(whole)
    for step in range(2):
        for number in range(passes):
            data = batch(rows, 10 * step + number)
            (loss_of(whole, *data) * (comm.size if way == "sum" else 1)).backward()
            x, y = (own_rows(mesh["dp"])(each) for each in data)
            if is_pipeline:
                own.step(x, y)
            elif way == "no_sync between" and number == 1:
                with optimizer.no_sync():
                    loss_of(own, x, y).backward()
            else:
                loss_of(own, x, y).backward()
        for each in (plain, optimizer):
            for group in each.param_groups:
                group["lr"] = 0.1 / passes / (comm.size if way == "sum" else 1)
            each.step()
            if way != "never cleared":
                each.zero_grad(set_to_none=step == 0)
    compare(comm, own.gather_state_dict() if is_pipeline else gather_state_dict(own), whole)
    mesh.close()


def test_saved_state_continues_on_other_numbers_of_ranks(comm: Communicator) -> None:
    """State covers all experts, moments included."""
    if comm.size == 3:
        pytest.skip("4 experts")
    rows = 2 * comm.size
    whole, _ = alone(comm, rows, range(4))
    own = model(comm)
    optimizer = DistributedOptimizer(sgd(own), own.named_parameters(), ranks=comm)
    train(own, optimizer, own_rows(comm), rows, range(2))
    state, moments = gather_state_dict(own), gather_optimizer_state(optimizer, own.named_parameters())
    assert state["1.mlp.experts.up.weight"].shape == (4, 6, WIDTH)
    # One rank, with all experts.
    other = model(single(comm))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(state)
    again = sgd(other)
    load_optimizer_state(again, other.named_parameters(), moments)
    train(other, again, lambda each: each, rows, range(2, 4))
    compare(comm, dict(other.state_dict()), whole)
    # All ranks again.
    third = model(comm)
    third.load_state_dict(state)
    optimizer = DistributedOptimizer(sgd(third), third.named_parameters(), ranks=comm)
    load_optimizer_state(optimizer, third.named_parameters(), moments)
    train(third, optimizer, own_rows(comm), rows, range(2, 4))
    compare(comm, gather_state_dict(third), whole)


@pytest.mark.ranks(min=2)
def test_a_broadcast_does_not_change_experts(comm: Communicator) -> None:
    """Ranks have different experts: those of the root, and their moments, must not replace them."""
    own = model(comm, Experts(2 * comm.size, hidden=4))
    with torch.no_grad():
        own[0].weight.add_(comm.rank)
    before = {name: value.clone() for name, value in own.state_dict().items()}
    for given in (own.state_dict(), own.named_parameters()):
        broadcast_parameters(given, root_rank=0)
    for name, value in own.state_dict().items():
        if "experts" in name:
            assert torch.equal(value, before[name]), name
    first = float(own[0].weight.detach().sum())
    assert comm.all_gather_object(first) == [first] * comm.size
    optimizer = torch.optim.Adam(own.parameters())
    loss_of(own, *batch(2, comm.rank)).backward()
    optimizer.step()
    expert = own[1].mlp.experts.up.weight
    kept = optimizer.state[expert]["exp_avg"].clone()
    broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(optimizer.state[expert]["exp_avg"], kept)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_stages(comm: Communicator, schedule: Any) -> None:
    """Router losses do not depend on the number of stages and microbatches."""
    if comm.size == 3:
        pytest.skip("4 experts")
    mesh = Mesh(pp=2, dp=comm.size // 2)
    dp = mesh["dp"]
    rows = 5 * dp.size
    whole, expected = alone(comm, rows, range(2))
    own = pipeline(model(mesh), mesh["pp"], schedule=schedule, microbatches=4, loss=F.mse_loss)
    optimizer = DistributedOptimizer(sgd(own), own.named_parameters(), mesh=mesh)
    for number in range(2):
        x, y = (own_rows(dp)(each) for each in batch(rows, number))
        loss = own.step(x, y)
        near(torch.from_numpy(dp.all_reduce(loss.reshape(1).numpy(), "mean")), expected[number].reshape(1), "loss")
        own.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    state = own.gather_state_dict()
    compare(comm, state, whole)
    own.close()
    mesh.close()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("gated", [False, True])
def test_divided_experts(comm: Communicator, gated: bool, tmp_path: Path) -> None:
    """Experts are divided along one axis; the ranks along another, which have the same tokens, divide each expert."""
    if comm.size == 3:
        pytest.skip("4 experts")
    options = Experts(4, top_k=2, hidden=7, gated=gated, activation="silu", shared=1)
    mesh = Mesh(dp=-1, tp=2)
    dp = mesh["dp"]
    rows = 2 * dp.size
    whole, _ = alone(comm, rows, range(3), options)
    own = model(mesh, options)
    optimizer = DistributedOptimizer(sgd(own), own.named_parameters(), mesh=mesh)
    train(own, optimizer, own_rows(dp), rows, range(3))
    state = gather_state_dict(own)
    compare(comm, state, whole)
    other = model(mesh, options)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(state)
    compare(comm, gather_state_dict(other), whole)
    path = tmp_path / "experts"
    save_experts(comm.broadcast_object(str(path)), own, optimizer)
    path.write_bytes(comm.broadcast_object(path.read_bytes() if comm.rank == 0 else b""))  # hosts have their own files
    for wrong in (lambda: save_experts(tmp_path, own), lambda: load_experts(path if comm.rank else tmp_path, own)):
        with pytest.raises(UsageError, match=r"cannot write|is not a file written by save_experts"):
            wrong()
    third = model(single(comm), options)
    third.load_state_dict({name: torch.zeros_like(value) if "mlp" in name else value for name, value in state.items()})
    load_experts(path, third)
    compare(comm, third.state_dict(), whole)
    mesh.close()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("which", ["experts", "divided"])
def test_training_continues_after_experts_move(comm: Communicator, which: str) -> None:
    """Weights and moments move with them; saved state still uses their global numbers."""
    if comm.size == 3:
        pytest.skip("4 experts")
    options = Experts(8, top_k=2, hidden=6)
    mesh = Mesh(dp=-1) if which == "experts" else Mesh(dp=-1, tp=2)
    dp = mesh["dp"]
    rows = 2 * dp.size
    whole, _ = alone(comm, rows, range(4), options)
    own = model(mesh, options)
    optimizer = DistributedOptimizer(sgd(own), own.named_parameters(), mesh=mesh)
    train(own, optimizer, own_rows(dp), rows, range(2))
    axis = own[1].mlp.mixture.ranks.axis
    for layer in (own[1].mlp, own[2].mlp):  # experts 0 and 1 are popular, which are neighbours
        layer.stats()
        layer.mixture.counted.numbers[:] = [100, 90, 1, 2, 3, 4, 5, 6, 300, 0, 0]
    reported = rebalance_experts(own, optimizer)
    assert len(reported) == 2
    placement = own[1].mlp.mixture.placement
    assert axis.size == 1 or placement.owners[0] != placement.owners[1]
    assert rebalance_experts(own, optimizer) == dict.fromkeys(
        reported, (1.0, 1.0)
    )  # no token has chosen an expert since
    assert own[1].mlp.mixture.placement == placement
    train(own, optimizer, own_rows(dp), rows, range(2, 4))
    state, moments = gather_state_dict(own), gather_optimizer_state(optimizer, own.named_parameters())
    compare(comm, state, whole)
    other = model(single(comm), options)
    other.load_state_dict(state)
    load_optimizer_state(sgd(other), other.named_parameters(), moments)
    own.load_state_dict(state)
    compare(comm, gather_state_dict(own), whole)
    mesh.close()


class Mixed(nn.Module):
    """A layer divided by a plan, and a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        out: Tensor = x + self.mlp(self.norm(x))
        return out


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("checked", ["example", "first call"])
def test_experts_next_to_divided_layers(comm: Communicator, checked: str) -> None:
    """The check of a plan runs the model, which must not count as a training step of the router."""
    if comm.size == 3:
        pytest.skip("4 experts")
    mesh = Mesh(dp=-1, tp=2)
    dp = mesh["dp"]
    rows = 2 * dp.size
    plan = {"mlp": Experts(4, top_k=2)}

    def build(ranks: Any) -> Any:
        torch.manual_seed(0)
        result = Mixed().double()
        return expertize(result, ranks, plan)

    whole = build(single(comm))
    expected = train(whole, sgd(whole), lambda each: each, rows, range(2))
    own = build(mesh)
    example = batch(1, 9)[0] if checked == "example" else None
    parallelize(own, mesh["tp"], {"up": Column(), "down": Row()}, example=example)
    optimizer = DistributedOptimizer(sgd(own), own.named_parameters(), mesh=mesh)
    with warnings.catch_warnings():  # the model was blamed for an access by our own layer
        warnings.filterwarnings("error", "plan: ")
        losses = train(own, optimizer, own_rows(dp), rows, range(2))
    mean = dp.all_reduce(torch.stack(losses).numpy(), "mean")
    near(torch.from_numpy(mean), torch.stack(expected), "losses")
    compare(comm, gather_state_dict(own), whole)
    mesh.close()


def by_hand(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if ".experts." not in name and parameter.grad is not None:
            parameter.grad = allreduce(parameter.grad)


def mixed(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = allreduce(parameter.grad)


def clipped(model: nn.Module) -> None:
    by_hand(model)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.div_(norm)


@pytest.mark.parametrize("way", [None, by_hand, clipped, mixed])
def test_unreduced_steps_are_reported(comm: Any, way: Any) -> None:
    """Regression: ranks with a plain optimizer silently diverged; reducing all gradients mixed different experts."""
    if comm.size == 1:
        return
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), MoE(4, Experts(2 * comm.size, hidden=4), another_communicator(comm)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected: Any = contextlib.nullcontext()
    if way is mixed:
        expected = pytest.raises(MismatchError, match=r"SGD.step .* parameter \d of group 0.*which mixes them")
    elif way is not by_hand:
        expected = pytest.warns(UserWarning, match=r"SGD.step .*diverge: the gradient of parameter \d of group .*mesh")
    with expected, warnings.catch_warnings():
        if way is by_hand:
            warnings.simplefilter("error")
        for step in range(2):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2 * step + comm.rank))
            (model(x).square().sum() + auxiliary_loss(model)).backward()
            if way is not None:
                way(model)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks(min=2)
def test_different_values_on_ranks_are_reported(comm: Any) -> None:
    """Regression: weights outside a mixture that was inserted into a model depended on the rank's seed."""
    for broadcasts in (False, True):
        torch.manual_seed(comm.rank)
        model = nn.Sequential(nn.Linear(4, 4), MoE(4, Experts(2 * comm.size, hidden=4), comm))
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), ranks=comm)
        if broadcasts:
            broadcast_parameters(model.state_dict(), root=0)
        expected: Any = contextlib.nullcontext()
        if not broadcasts:
            expected = pytest.warns(
                UserWarning, match=r"different values .*parameter 0 of group 0, of shape \[4, 4\], differs"
            )
        with expected, warnings.catch_warnings():
            if broadcasts:
                warnings.simplefilter("error")
            for step in range(2):
                (model(torch.full((6, 4), 1.0 + step + comm.rank)).square().sum() + auxiliary_loss(model)).backward()
                optimizer.step()
                optimizer.zero_grad()


def test_each_optimizer_that_makes_ranks_diverge_is_reported(comm: Any) -> None:
    """Regression: only the first one of a process was reported."""
    if comm.size == 1:
        return
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), MoE(4, Experts(2 * comm.size, hidden=4), comm))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        (model(torch.full((6, 4), 1.0 + comm.rank)).square().sum() + auxiliary_loss(model)).backward()
        with pytest.warns(UserWarning, match=r"SGD.step .* diverge: the gradient of parameter \d of group 0"):
            optimizer.step()


def another_communicator(comm: Any) -> Any:
    """Return another communicator of the same ranks, which repeats warnings that appear once."""
    group = comm.split(0, name="together")
    assert group is not None
    return group


@pytest.mark.ranks(min=2)
def test_an_optimizer_that_only_some_ranks_still_have(comm: Communicator) -> None:
    """Regression: a rank that had collected it reduced within backward, while others took turns, and all waited."""
    kept = []
    for _ in range(2):
        torch.manual_seed(0)
        mixture = MoE(WIDTH, replace(EXPERTS, count=2 * comm.size), comm)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), mixture, nn.Linear(WIDTH, WIDTH)).double()
        plain = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(plain, model.named_parameters(), ranks=comm, overlap=True)
        if comm.rank == 0:
            kept.append(optimizer)  # as a traceback does, or a variable of a notebook
        for number in range(3):
            generator = torch.Generator().manual_seed(comm.rank + 10 * number)
            x = torch.randn(2, 3, WIDTH, generator=generator, dtype=torch.float64)
            (model(x).square().mean() + auxiliary_loss(model)).backward()
            optimizer.step()
            optimizer.zero_grad()
        del model, mixture, plain, optimizer
        gc.collect()


class Averaged(nn.Module):
    """A mixture, followed by a mean over features that a plan divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 12)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(x)
        return x + torch.relu(self.up(x)).mean(-1, keepdim=True)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("chunks", [1, 2])
def test_rules_check_layers_after_divided_experts(comm: Communicator, chunks: int) -> None:
    """Regression: the check put hooks on experts, took these for the user's, and silently ended there."""
    if comm.size % 2:
        pytest.skip("two ranks for each expert")
    mesh = Mesh(dp=-1, tp=2)
    model = Averaged().double()
    expertize(model, mesh, {"mlp": Experts(4, hidden=6, chunks=chunks)})
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    parallelize(model, mesh["tp"], {"up": Column()})
    with pytest.raises(UsageError, match=r"plan: add in the model: a value computed from one rank's shard is no"):
        model(x)
