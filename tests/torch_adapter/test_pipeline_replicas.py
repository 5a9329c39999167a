"""Pipelines with replicas, two stages on two ranks each, match one process with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib import Mesh
from commlib.data_parallel.reducer import GradientReducer
from commlib.errors import UsageError
from commlib.pipeline.schedule import table
from commlib_torch import DataParallel, DistributedOptimizer, pipeline

WIDTH = 6
EXACT = 1e-12  # some ulps of float64: sums in another order

pytestmark = pytest.mark.ranks(min=4, max=4)


class Model(nn.Module):
    """Eight layers, of which the first and the last share their weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.last(x)
        return out


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", [name for name, plan in table.items() if not plan.updates])
def test_as_one_process_with_the_whole_batch(comm: Any, name: Any, overlap: bool) -> None:
    """Three steps: each accumulates the gradients of two batches and clips them by the norm over all stages."""
    mesh = Mesh(pp=2, dp=2)
    pipe = pipeline(Model(), mesh["pp"], schedule=name, microbatches=3, loss=F.mse_loss)
    optimizer = DistributedOptimizer(
        torch.optim.AdamW(pipe.parameters(), lr=0.05), pipe.named_parameters(), mesh=mesh, overlap=overlap,
        bucket_cap_mib=1e-4, first_bucket_mib=1e-4,
    )  # fmt: skip
    whole = Model()
    theirs = torch.optim.AdamW(whole.parameters(), lr=0.05)
    replica = mesh.coordinate("dp")
    for step in range(3):
        for half in range(2):
            x, y = batch(14, 2 * step + half)
            loss = F.mse_loss(whole(x), y)
            loss.backward()
            mine = slice(7 * replica, 7 * replica + 7)
            got = pipe.step(x[mine], y[mine])
            both = sum(comm.all_gather_object(float(got))) / comm.size
            assert both == pytest.approx(loss.item(), rel=EXACT)
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
        assert float(pipe.clip_grad_norm(0.05)) == pytest.approx(float(norm), rel=1e-6)
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
        expected = whole.state_dict()
        for key, value in pipe.state_dict().items():
            # Neither side rounds the norm to float32, but they sum in different orders.
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-9)
    pipe.close()
    mesh.close()


def test_gradients_are_ready_after_their_last_microbatch(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breadth first: the second stage's gradients are reduced while the first one still computes its own."""
    mesh = Mesh(pp=2, dp=2)
    pipe = pipeline(Model(), mesh["pp"], schedule="breadth_first", microbatches=3, loss=F.mse_loss)
    optimizer: Any = DistributedOptimizer(
        torch.optim.SGD(pipe.parameters(), lr=0.1), pipe.named_parameters(), mesh=mesh, overlap=True
    )
    ready: list[tuple[str, int]] = []
    plain = GradientReducer.ready

    def noting(reducer: GradientReducer, index: int) -> None:
        ready.append((pipe.pipe.runner.position.split(" ")[0], index))
        plain(reducer, index)

    monkeypatch.setattr(GradientReducer, "ready", noting)
    pipe.step(*batch(6, 0))
    rank = mesh["pp"].rank
    assert list(dict.fromkeys(action for action, _ in ready)) == [f"{rank + 2}B2", f"{rank}B2"]
    assert len({index for _, index in ready}) == len(ready) == len(optimizer.reducer.gradients)
    pipe.close()
    mesh.close()


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_updates_during_the_pipeline_include_all_replicas(comm: Any, name: Any) -> None:
    """They match a pipeline without replicas that processes the microbatches of both in turn."""
    mesh = Mesh(pp=2, dp=2)
    every = 2 if name == "pipedream_2bw" else 1

    def layers() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))).double()

    def distributed(named: Any) -> Any:
        return DistributedOptimizer(torch.optim.Adam([p for _, p in named], lr=0.05), named, mesh=mesh)

    pipe, plain = (
        pipeline(layers(), mesh["pp"], schedule=name, microbatches=4, every=every, loss=F.mse_loss, optimizer=optimizer)
        for optimizer in (distributed, lambda named: torch.optim.Adam([p for _, p in named], lr=0.05))
    )
    replica = mesh.coordinate("dp")
    for step in range(3):
        x, y = (value.reshape(4, 2, 3, WIDTH) for value in batch(24, step))  # microbatch, replica, row
        mine = pipe.step(x[:, replica].reshape(12, WIDTH), y[:, replica].reshape(12, WIDTH))
        whole = plain.step(x.reshape(24, WIDTH), y.reshape(24, WIDTH))
        both = sum(comm.all_gather_object(float(mine))) / comm.size
        assert both == pytest.approx(float(whole), rel=EXACT)
        expected = plain.state_dict()
        for key, value in pipe.state_dict().items():
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-9)
    pipe.close()
    plain.close()
    mesh.close()


def test_a_mesh_without_replicas_is_refused(comm: Any) -> None:
    mesh = Mesh(pp=4)
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"reduces over its axes dp and cp, but Mesh\(pp=4\) has neither"):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), mesh=mesh)
    mesh.close()


def test_data_parallel_of_a_stage_is_refused(comm: Any) -> None:
    """A pipeline is not called; the error of a wrapper that expects a call explains this."""
    pipe = pipeline(Model(), comm, microbatches=2, loss=F.mse_loss)
    with pytest.raises(UsageError, match="a pipeline cannot be called"):
        DataParallel(pipe, ranks=comm.split(comm.rank))(batch(2, 0)[0])
    pipe.close()
