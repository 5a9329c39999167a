"""A training script of PyTorch: calls that a checker refuses."""

from collections.abc import Sequence

import torch
from torch import nn

import commlib
import commlib_torch as ct

mesh = commlib.Mesh(pp=2, dp=-1, tp=2)
x = torch.ones(4, 4)
model = nn.Sequential(nn.Linear(4, 4))

ct.all_reduce(x, "men")  # error: arg-type
ct.all_reduce(x, comm=mesh["dp"])  # error: call-arg
ct.all_reduce(x, ranks="dp")  # error: arg-type
ct.all_reduce(3.0)  # error: arg-type
print(ct.Sequence)  # error: attr-defined
ct.alreduce(1)  # error: attr-defined
ct.parallelize(model, mesh["tp"], "atuo")  # error: arg-type
ct.parallelize(model, "tp", "auto")  # error: arg-type
ct.tensor.copy(x, axis=mesh["tp"])  # error: call-arg
ct.context.attention(x, x, x, mesh["tp"], layout="zigzag")  # error: arg-type
ct.pipeline(model, mesh["pp"], schedule="1f2b", microbatches=4)  # error: arg-type
ct.pipeline(model, mesh["pp"], microbatches=4, checkpoint="some")  # error: arg-type
ct.pipeline(model, mesh["pp"], microbatches=4, split="atuo")  # error: arg-type
ct.scan(x, "mean")  # error: arg-type
ct.Experts(8, balance="all")  # error: arg-type
ct.MoE(4, ct.Experts(8), ranks="ep")  # error: arg-type
ct.DataParallel(model, op="max")  # error: arg-type
ct.DistributedOptimizer(model)  # error: arg-type
ct.DistributedOptimizer(torch.optim.SGD(model.parameters()), op="men")  # error: arg-type
ct.DistributedOptimizer(torch.optim.SGD(model.parameters()), op="max")  # error: arg-type
ct.Checkpoint("run", model=model, ranks=3)  # error: arg-type

optimizer = ct.DistributedOptimizer(torch.optim.SGD(model.parameters()), mesh=mesh)
optimizer.clip_grad_norm("1")  # error: arg-type
print(optimizer.report.exposed_seconds)  # error: union-attr
names: Sequence[int] = optimizer.compression_choice  # error: assignment
