"""Arguments `ranks`: a communicator, a mesh with one axis and a process set give the same result in every call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commlib_torch as ct
from commlib.errors import UsageError
from commlib.mesh_groups import Mesh

pytestmark = [pytest.mark.any_mpi, pytest.mark.ranks(min=2, max=2)]


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


X, Y = torch.arange(16.0).view(4, 4) / 16, torch.ones(4, 2)


def piped(ranks: Any) -> Any:
    pipe = ct.pipeline(model(), ranks=ranks, schedule="gpipe", microbatches=2, loss=nn.MSELoss())
    return torch.as_tensor(pipe.step(X, Y))


def sharded(ranks: Any) -> Any:
    plan: Any = {"0": ct.Column(), "2": ct.Row()}
    return ct.parallelize(model(), ranks=ranks, plan=plan, report=str)(X).detach()


def optimized(ranks: Any) -> Any:
    net = model()
    optimizer = ct.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters(), ranks=ranks)
    nn.functional.mse_loss(net(X + ct.rank()), Y).backward()
    optimizer.step()
    return torch.as_tensor(net[0].weight.detach())


def averaged(ranks: Any) -> Any:
    net = ct.DataParallel(model(), ranks=ranks)
    nn.functional.mse_loss(net(X + ct.rank()), Y).backward()
    return torch.as_tensor(next(net.parameters()).grad)


def one_bit(ranks: Any) -> Any:
    net = model()
    optimizer = ct.OneBitAdam(net.parameters(), freeze_step=2, ranks=ranks)
    nn.functional.mse_loss(net(X + ct.rank()), Y).backward()
    optimizer.step()
    return torch.as_tensor(net[0].weight.detach())


def reduced(ranks: Any) -> Any:
    return ct.all_reduce(X + ct.rank(), ranks=ranks) + ct.broadcast(X + ct.rank(), root=1, ranks=ranks)


def redistributed(ranks: Any) -> Any:
    return ct.tensor.gather(ct.tensor.scatter(X, ranks=ranks), ranks=ranks)


def mixed(ranks: Any) -> Any:
    torch.manual_seed(0)
    return ct.MoE(4, ct.Experts(2, top_k=1, hidden=8), ranks=ranks)(X).detach()


CALLS = [piped, sharded, optimized, averaged, one_bit, reduced, redistributed, mixed]


@pytest.mark.parametrize("call", CALLS)
def test_all_kinds_of_ranks(call: Callable[[Any], Any], comm: Any) -> None:
    expected = call(comm)
    for ranks in (Mesh(dp=2)["dp"], Mesh(tp=2), Mesh(ranks=comm, pp=2), ct.global_process_set):
        if call is mixed and isinstance(ranks, Mesh):
            ranks = Mesh(ep=2)  # experts use this axis
        assert torch.equal(call(ranks), expected)


@pytest.mark.parametrize("call", [call for call in CALLS if call is not mixed])
def test_other_ranks_are_refused_by_name(call: Callable[[Any], Any], comm: Any) -> None:
    mesh = Mesh(pp=1, tp=2)
    for ranks, text in (("tp", "ranks is the str 'tp'"), (mesh, r"ranks is the whole Mesh\(pp=1, tp=2\)")):
        with pytest.raises(UsageError, match=rf"^\w+: {text}: expected a Communicator"):
            call(ranks)


def test_a_whole_mesh_is_all_its_ranks(comm: Any, tmp_path: Path) -> None:
    mesh = Mesh(pp=1, tp=2)
    assert ct.GradScaler(ranks=mesh).comm is comm
    folder = comm.broadcast_object(tmp_path)
    assert ct.Checkpoint(folder, model=model(), ranks=mesh).save(1).is_dir()
    with pytest.raises(UsageError, match="Checkpoint: ranks is the int 3"):
        ct.Checkpoint(folder, model=model(), ranks=3)  # type: ignore[arg-type]


def test_ranks_must_not_be_given_twice(comm: Any) -> None:
    optimizer = torch.optim.SGD(model().parameters(), 0.1)
    with pytest.raises(UsageError, match="ranks= and mesh= both say which ranks"):
        ct.DistributedOptimizer(optimizer, ranks=comm, mesh=Mesh(dp=2))
