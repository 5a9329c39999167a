"""Checkpoints: training resumed in new objects matches uninterrupted training to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commlib_torch as ct
from commlib.errors import UsageError

STEPS, STOP = 9, 4


@pytest.fixture
def folder(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all ranks can access."""
    return Path(comm.broadcast_object(str(tmp_path_factory.mktemp("checkpoints"))))


class Training:
    """A model with dropout and batch statistics, an optimizer and a schedule, as a new process creates them."""

    def __init__(self, comm: Any, **options: Any) -> None:
        torch.manual_seed(1 + comm.rank)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        ct.broadcast_parameters(self.model.state_dict(), root=0)
        plain = torch.optim.AdamW(self.model.parameters(), 0.05)
        self.optimizer = ct.DistributedOptimizer(plain, self.model.named_parameters(), ranks=comm, **options)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(plain, [3, 6], 0.5)
        self.rank = comm.rank

    def checkpoint(self, folder: Path, comm: Any) -> Any:
        return ct.Checkpoint(folder, ranks=comm, model=self.model, optimizer=self.optimizer, schedule=self.schedule)

    def run(self, steps: range) -> None:
        for step in steps:
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + self.rank))
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.schedule.step()

    def bits(self) -> list[Any]:
        state = self.optimizer.state_dict()["state"]
        tensors = [*self.model.state_dict().values(), *(one for own in state.values() for one in own.values())]
        return [[tensor.tolist() for tensor in tensors], self.schedule.get_last_lr(), torch.rand(2).tolist()]


@pytest.mark.parametrize("options", [{}, {"compression": "topk:ratio=0.2", "compress_within_node": True}], ids=str)
def test_resumed_training_is_the_same(comm: Any, folder: Path, options: dict[str, Any]) -> None:
    straight = Training(comm, **options)
    straight.run(range(STEPS))
    expected = straight.bits()
    stopped = Training(comm, **options)
    stopped.run(range(STOP))
    stopped.checkpoint(folder, comm).save(STOP)
    resumed = Training(comm, **options)
    torch.manual_seed(99)
    done = resumed.checkpoint(folder, comm).resume()
    assert done == STOP
    resumed.run(range(done, STEPS))
    assert resumed.bits() == expected


@pytest.mark.ranks(min=2)
def test_each_rank_writes_its_own_state(comm: Any, folder: Path) -> None:
    """BatchNorm's statistics come from a rank's own batches; weights and the optimizer are shared."""
    training = Training(comm)
    training.run(range(2))
    place = training.checkpoint(folder, comm).save(2)
    writers = json.loads((place / "index.json").read_text())["writers"]
    everyone = list(range(comm.size))
    assert writers["model"] == writers["random"] == everyone
    assert writers["optimizer"] == writers["schedule"] == writers["optimizer.compression"] == [0] * comm.size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.float64])
def test_tensors_of_any_dtype_are_restored(comm: Any, folder: Path, dtype: torch.dtype) -> None:
    model = nn.Module()
    for name, shape in (("scalar", ()), ("matrix", (3, 4)), ("empty", (0, 2))):
        model.register_buffer(name, torch.full(shape, 3.0).to(dtype))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ct.Checkpoint(folder, ranks=comm, model=model).save(1)
    for tensor in model.buffers():
        tensor.zero_()
    assert ct.Checkpoint(folder, ranks=comm, model=model).resume() == 1
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == dtype and tensor.shape == before[name].shape
        assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == bytes(
            before[name].reshape(-1).view(torch.uint8).tolist()
        )


def test_an_object_without_state_is_refused(comm: Any, folder: Path) -> None:
    with pytest.raises(UsageError, match="step= must have state_dict and load_state_dict"):
        ct.Checkpoint(folder, ranks=comm, step=3)  # type: ignore[arg-type]
    sparse = nn.Module()
    sparse.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(UsageError, match=r"model\['sparse'\] has a tensor with layout torch.sparse_coo"):
        ct.Checkpoint(folder, ranks=comm, model=sparse).save(1)
