"""A training script of PyTorch."""

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import commlib
import commlib_torch as ct
import commlib_torch.horovod as hvd
from commlib.data_parallel import Statistics, StepReport

comm = ct.init()
assert_type(comm, commlib.Communicator)
mesh = commlib.Mesh(pp=2, dp=-1, tp=2)

x = torch.ones(4, 4)
assert_type(ct.all_reduce(x, "mean", ranks=mesh["dp"]), Tensor)
assert_type(ct.all_gather(x, ranks=mesh["dp"]), Tensor)
assert_type(ct.scan(x, "max", ranks=mesh["dp"]), Tensor)
assert_type(ct.gather(x), Tensor | None)
assert_type(ct.all_reduce_async(x, algorithm="ring").wait(), Tensor)
assert_type(hvd.allreduce(x, op=hvd.Sum), Tensor)
assert_type(hvd.allreduce_async(x, name="x"), ct.Work[Tensor])
assert_type(ct.tensor.gather(x, mesh["tp"], dim=1), Tensor)
assert_type(ct.context.attention(x, x, x, mesh["tp"], layout="contiguous", method="all_to_all"), Tensor)

plan: ct.tensor.Plan = {"*.up": ct.Column(), "*.norm": ct.tensor.Sequence(1), "*.down": ct.Row(split=True)}
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
assert_type(ct.parallelize(model, mesh["tp"], plan), nn.Sequential)
assert_type(ct.parallelize(model, mesh["tp"], "auto"), nn.Sequential)
assert_type(ct.expertize(model, mesh, {"*": ct.Experts(8, balance="global")}), nn.Sequential)
moe = ct.MoE(4, ct.Experts(8, hidden=16), ranks=mesh)

# The usual line of Horovod's scripts: the variable keeps its name.
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = ct.DistributedOptimizer(optimizer, model.named_parameters(), mesh=mesh, compression="int8")
assert_type(optimizer.clip_grad_norm(1.0), Tensor)
assert_type(optimizer.report, StepReport | None)
assert_type(optimizer.statistics, Statistics)
with optimizer.no_sync():
    model(x).sum().backward()
with optimizer.skip_synchronize():
    optimizer.step()
optimizer.zero_grad()


def train(optimizer: ct.WrappedOptimizer) -> float:
    """Take a step."""
    optimizer.step()
    optimizer.set_backward_passes_per_step(2)
    return optimizer.exposed_seconds


schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
train(ct.DistributedOptimizer(torch.optim.AdamW(model.parameters()), op="sum", ranks=comm))
ct.GradScaler(ranks=mesh).step(optimizer)
ct.DistributedOptimizer(torch.optim.SGD(model.parameters()), op="adasum")
ct.DistributedOptimizer(torch.optim.SGD(model.parameters()), op=hvd.Sum)
ct.OneBitAdam(model.parameters(), freeze_step=10, ranks=ct.global_process_set)
wrapped = ct.DataParallel(model, op="sum", ranks=mesh["dp"])

pipe = ct.pipeline(model, mesh["pp"], schedule="zb_h1", microbatches=4, checkpoint="full", batch_norm="batch")
with pipe:
    pipe.step(x, x)
    assert_type(pipe.clip_grad_norm(1.0), Tensor)
ct.pipeline(model, mesh["pp"], schedule=Path("own.csv"), microbatches=4, split=["1"])
ct.pipeline(model, mesh["pp"], microbatches=4, split="time")
ct.pipeline(model, mesh["pp"], microbatches=4, split=lambda model: [1, 1])
ct.pipeline(model, mesh["pp"], microbatches=4, split=(1, 1))
ct.Checkpoint("run", model=model, optimizer=optimizer, schedule=schedule, ranks=comm).save(1)
