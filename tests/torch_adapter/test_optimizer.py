"""A wrapped optimizer behaves like the user's optimizer and works with all of PyTorch's tools."""

import copy
import pickle
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from commlib.errors import MismatchError, UsageError
from commlib_torch import DataParallel, DistributedOptimizer
from commlib_torch import horovod as hvd

from .oracle import assert_close, assert_same_everywhere, batch, gradients_of, loss_of, mine, model, parameters_of


def train(comm: Any, network: nn.Module, optimizer: Any, rows: Any, steps: int = 4, scheduler: Any = None) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(network, rows(batch(comm, step))).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def test_it_is_the_same_object_of_the_same_class() -> None:
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    wrapped = DistributedOptimizer(optimizer, network.named_parameters())
    assert wrapped is optimizer
    assert isinstance(wrapped, torch.optim.AdamW)
    assert type(wrapped).__name__ == "AdamW"
    assert wrapped.param_groups[0]["lr"] == 0.01
    assert repr(wrapped).startswith("AdamW")


@pytest.mark.parametrize("first", ["optimizer", "scheduler"])
def test_learning_rate_scheduler(comm: Any, first: str) -> None:
    """A scheduler replaces step() on the instance, before or after wrapping."""
    network, alone = model(), model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)
    if first == "optimizer":
        optimizer = DistributedOptimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    if first == "scheduler":
        optimizer = DistributedOptimizer(optimizer)
    if comm.rank == comm.size - 1 and comm.size > 1:
        pass  # no backward on this rank: step() must join
    else:
        loss_of(network, batch(comm, 9)).backward()
    optimizer.step()
    scheduler.step()
    plain = torch.optim.SGD(alone.parameters(), lr=0.5, momentum=0.9)
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain, 2, 0.1)
    (loss_of(alone, batch(comm, 9)) * max(1, comm.size - 1) / comm.size).backward()
    plain.step()
    plain_scheduler.step()
    train(comm, network, optimizer, lambda data: mine(comm, data), scheduler=scheduler)
    train(comm, alone, plain, lambda data: data, scheduler=plain_scheduler)
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == pytest.approx(0.005)
    assert_close(parameters_of(network), parameters_of(alone), 1e-11)


def test_gradient_scaler(comm: Any) -> None:
    """If one rank overflows, all ranks skip the step and lower the scale."""
    network, alone = model(dtype=torch.float32), model(dtype=torch.float32)
    optimizer = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    scaler, plain_scaler = (torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2))
    for step in range(3):
        before = parameters_of(network)
        overflow = float("inf") if step == 1 and comm.rank == comm.size - 1 else 1.0
        optimizer.zero_grad()
        scaler.scale(loss_of(network, mine(comm, batch(comm, step, torch.float32))) * overflow).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            assert_close(parameters_of(network), before, 0)
            assert scaler.get_scale() == 512.0
        plain.zero_grad()
        plain_scaler.scale(
            loss_of(alone, batch(comm, step, torch.float32)) * (1 if step != 1 else torch.inf)
        ).backward()
        plain_scaler.unscale_(plain)
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        plain_scaler.step(plain)
        plain_scaler.update()
    assert_close(parameters_of(network), parameters_of(alone), 1e-5)
    assert_same_everywhere(comm, parameters_of(network))


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs(comm: Any, line_search: str | None) -> None:
    """LBFGS decides by the loss that its closure returns: every rank must see the same total loss."""

    def run(network: nn.Module, optimizer: Any, rows: Any) -> list[float]:
        losses = []
        for _ in range(3):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(network, rows(batch(comm)))
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return losses

    def make(network: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(network.parameters(), lr=0.5, max_iter=5, line_search_fn=line_search)

    network, alone = model(), model()
    losses = run(network, DistributedOptimizer(make(network)), lambda data: mine(comm, data))
    expected = run(alone, make(alone), lambda data: data)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert_close(parameters_of(network), parameters_of(alone), 1e-6)
    assert_same_everywhere(comm, parameters_of(network))


def test_a_closure_without_a_loss_on_one_rank(comm: Any) -> None:
    network = model()
    optimizer = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    start = parameters_of(network)
    last = comm.size - 1 if comm.size > 1 else -1

    def closure() -> Tensor | None:
        if comm.rank == last:
            return None
        loss = loss_of(network, batch(comm))
        loss.backward()
        return loss

    for round_ in range(2):
        optimizer.zero_grad()
        total = optimizer.step(closure=closure)
        assert_same_everywhere(comm, parameters_of(network))
        if round_ == 0:
            alone = model()
            share = (comm.size - 1) / comm.size if comm.size > 1 else 1
            loss = loss_of(alone, batch(comm)) * share
            loss.backward()
            torch.optim.SGD(alone.parameters(), lr=0.1).step()
            assert_close(parameters_of(network), parameters_of(alone))
            assert total is not None
            assert torch.as_tensor(total).item() == pytest.approx(loss.item())
    assert any(not torch.equal(one, other) for one, other in zip(start, parameters_of(network), strict=True))


def test_state_dicts_are_interchangeable_with_plain_torch(comm: Any) -> None:
    network = model()
    optimizer: Any = DistributedOptimizer(torch.optim.Adam(network.parameters(), lr=0.01))
    train(comm, network, optimizer, lambda data: mine(comm, data))
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    weights = copy.deepcopy(network.state_dict())
    train(comm, network, optimizer, lambda data: mine(comm, data))

    alone = model()
    alone.load_state_dict(weights)
    plain = torch.optim.Adam(alone.parameters())
    plain.load_state_dict(copy.deepcopy(saved))  # torch shares the tensors of what it loads
    train(comm, alone, plain, lambda data: data)
    assert_close(parameters_of(alone), parameters_of(network), 1e-9)

    network.load_state_dict(weights)
    optimizer.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(saved)
    train(comm, network, optimizer, lambda data: mine(comm, data))
    assert_close(parameters_of(network), parameters_of(alone), 1e-9)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_is_the_plain_optimizer(comm: Any, duplicate: Any) -> None:
    network = model()
    optimizer: Any = DistributedOptimizer(torch.optim.Adam(network.parameters(), lr=0.25))
    train(comm, network, optimizer, lambda data: mine(comm, data), steps=1)
    clone = duplicate(optimizer)
    assert type(clone) is torch.optim.Adam
    assert clone.param_groups[0]["lr"] == 0.25
    assert len(clone.state) == len(optimizer.state)
    clone.step()  # local on each rank: no other rank has to join
    if comm.size > 1:
        assert optimizer.statistics.reductions == 1


def test_models_and_parameters_can_be_copied_and_pickled(comm: Any) -> None:
    network = model()
    optimizer: Any = DistributedOptimizer(torch.optim.Adam(network.parameters()))
    loss_of(network, mine(comm, batch(comm))).backward()
    for clone in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert_close(parameters_of(clone), parameters_of(network), 0)
        clone.zero_grad()
        loss_of(clone, mine(comm, batch(comm))).backward()  # hooks are not copied
    optimizer.step()
    if comm.size > 1:
        assert optimizer.statistics.reductions == 1


def test_add_param_group(comm: Any) -> None:
    network, alone = model(), model()
    optimizer: Any = DistributedOptimizer(torch.optim.Adam(network[0].parameters()), network.named_parameters())
    plain = torch.optim.Adam(alone[0].parameters())
    for someone in (network, alone):
        someone[2:].requires_grad_(False)
    train(comm, network, optimizer, lambda data: mine(comm, data), steps=2)
    train(comm, alone, plain, lambda data: data, steps=2)
    for someone, its in ((network, optimizer), (alone, plain)):
        someone[2:].requires_grad_(True)
        its.add_param_group({"params": list(someone[2:].parameters()), "lr": 0.1})
    train(comm, network, optimizer, lambda data: mine(comm, data))
    train(comm, alone, plain, lambda data: data)
    assert_close(parameters_of(network), parameters_of(alone), 1e-9)
    if comm.size > 1:
        assert optimizer.statistics.reductions == 6  # the count continues


def test_only_one_optimizer_reduces_a_gradient(comm: Any) -> None:
    network = model()
    optimizer = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="DistributedOptimizer already"):
        DistributedOptimizer(optimizer)
    with pytest.raises(UsageError, match="already reduced by another"):
        DataParallel(network)
    with pytest.raises(UsageError, match="already reduced by another"):
        DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    del optimizer
    DataParallel(network)  # the reducer is freed with the optimizer


def test_bad_arguments(comm: Any) -> None:
    network = model()
    with pytest.raises(UsageError, match="expected a torch optimizer"):
        DistributedOptimizer(network)  # type: ignore[arg-type]

    def wrap(**options: Any) -> Any:
        return DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1), **options)

    with pytest.raises(UsageError, match="op must be one of mean, sum"):
        wrap(op="max")
    with pytest.raises(UsageError, match="at least 1"):
        wrap(backward_passes_per_step=0)
    with pytest.raises(UsageError, match="positive"):
        wrap(bucket_cap_mib=0)
    for op in (hvd.Average, hvd.Adasum):
        with pytest.raises(UsageError, match="overlap is 'x', expected True, False or None"):
            wrap(overlap="x", op=op)
        with pytest.raises(UsageError, match="sparse_as_dense is 'yes', expected True or False"):
            wrap(sparse_as_dense="yes", op=op)
    with pytest.raises(UsageError, match=r"op must be one of mean, sum, adasum, got 'maen'; did you mean 'mean'\?"):
        wrap(op="maen")
    with pytest.raises(UsageError, match="compress_within_node is 'no', expected True or False"):
        DataParallel(network, compress_within_node=cast("Any", "no"))
    with pytest.raises(UsageError, match="lacks parameters of the optimizer: group 0, parameter 1;"):
        wrap(named_parameters=[("weight", network[0].weight)])
    with pytest.raises(UsageError, match="two parameters are named 'same'"):
        wrap(named_parameters=[("same", parameter) for parameter in network.parameters()])
    meta = nn.Linear(2, 2, device="meta")
    with pytest.raises(UsageError, match=r"parameter group 0, parameter 0: .* device meta"):
        DistributedOptimizer(torch.optim.SGD(meta.parameters(), lr=0.1))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("wrapper", ["optimizer", "module"])
@pytest.mark.parametrize("difference", ["shape", "dtype", "name", "number", "setting"])
def test_ranks_with_different_parameters_are_refused_at_once(comm: Any, wrapper: str, difference: str) -> None:
    odd = comm.rank == comm.size - 1
    network = nn.Sequential()
    network.add_module("other" if odd and difference == "name" else "first", nn.Linear(2, 3))
    network.add_module("last", nn.Linear(3, 5 if odd and difference == "shape" else 4))
    if odd and difference == "dtype":
        network.double()
    if odd and difference == "number":
        network.add_module("more", nn.Linear(1, 1))
    options: Any = {"bucket_cap_mib": 2.0} if odd and difference == "setting" else {}
    with pytest.raises(MismatchError, match=f"rank {comm.size - 1}"):
        if wrapper == "optimizer":
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
            DistributedOptimizer(optimizer, network.named_parameters(), **options)
        else:
            DataParallel(network, **options)
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))  # communication still works


class Fuse(torch.autograd.Function):
    """Raises in backward while `lit`."""

    lit = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Fuse.lit:
            raise ArithmeticError("the fuse blew")
        return gradient


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_backward_that_raises_and_is_caught(comm: Any, overlap: bool) -> None:
    """The others wait for its end. synchronize() or step() completes it; another backward before that is an error."""
    network = model()
    optimizer: Any = DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1), bucket_cap_mib=1e-4, overlap=overlap
    )
    inputs, targets = mine(comm, batch(comm))

    def backward() -> None:
        hidden = Fuse.apply(network[:4](inputs))
        (network[4](hidden) - targets).square().mean().backward()

    Fuse.lit = comm.rank == 0
    try:
        if comm.rank == 0:
            with pytest.raises(ArithmeticError, match="fuse"):
                backward()
            Fuse.lit = False
            with pytest.raises(UsageError, match=r"became ready twice.*synchronize"):
                backward()
            optimizer.synchronize()
        else:
            backward()
    finally:
        Fuse.lit = False
    assert_same_everywhere(comm, gradients_of(network))  # the refused backward has not damaged them
    optimizer.step()
    optimizer.zero_grad()
    alone = model()
    alone.load_state_dict(network.state_dict())
    backward()
    loss_of(alone, batch(comm)).backward()
    assert_close(gradients_of(network), gradients_of(alone))


def test_the_reducer_is_freed_with_the_optimizer(comm: Any) -> None:
    from commlib_torch._autograd import backward_passes

    network = model()
    optimizer = DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    assert any(next(network.parameters()) in member for member in backward_passes.members)
    del optimizer
    assert not any(next(network.parameters()) in member for member in backward_passes.members)
    loss_of(network, mine(comm, batch(comm))).backward()
    local = model()
    loss_of(local, mine(comm, batch(comm))).backward()
    assert_close(gradients_of(network), gradients_of(local), 0)
