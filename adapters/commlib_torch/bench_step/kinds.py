"""Contenders for each kind of parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from commlib import Mesh
from commlib.bench.steps.contract import Contenders, Step, StepSizes, layers_of_stages
from commlib.expert import Experts
from commlib.tensor_parallel import Column, Row
from commlib_torch.bench_step.model import (
    Embed,
    LogitHead,
    TransformerBlock,
    batch_of,
    count,
    join_batches,
    loss_of,
    make_step,
    plain_optimizer,
    transformer,
)
from commlib_torch.expert import auxiliary_loss, expertize
from commlib_torch.optimizer import DistributedOptimizer
from commlib_torch.pipelines.pipeline import pipeline
from commlib_torch.tensor import parallelize


def data_parallel(comm: Any, sizes: StepSizes, *, peer: bool) -> Contenders:
    """Each rank has a batch, gradients are averaged; the peer is DistributedDataParallel over gloo."""
    mine, model = batch_of(sizes, comm.rank), transformer(sizes)
    optimizer: Any = DistributedOptimizer(plain_optimizer(model), model.named_parameters())
    alone, whole = transformer(sizes), transformer(sizes)
    theirs: Step | None = None
    if peer:
        wrapped = nn.parallel.DistributedDataParallel(transformer(sizes))
        theirs = make_step(wrapped, plain_optimizer(wrapped), mine)
    return Contenders(
        ours=make_step(model, optimizer, mine),
        alone=make_step(alone, plain_optimizer(alone), mine),
        whole=make_step(whole, plain_optimizer(whole), join_batches(sizes, comm.size)),
        parameters=count(whole),
        peer=theirs,
        peer_name="torch DDP over gloo" if peer else "",
    )


def tensor_parallel(comm: Any, sizes: StepSizes) -> Contenders:
    """All ranks have one batch, and a shard of each layer."""
    batch, units = batch_of(sizes, 0), Column(units=sizes.heads)
    plan: dict[str, Column | Row] = {
        "*.[qkv]": units,
        "*.out": Row(units=sizes.heads),
        "*.mlp.0": Column(),
        "*.mlp.2": Row(),
    }
    model = parallelize(transformer(sizes), comm, plan)
    alone, whole = transformer(sizes, comm.size), transformer(sizes)
    return Contenders(
        ours=make_step(model, plain_optimizer(model), batch),
        alone=make_step(alone, plain_optimizer(alone), batch),
        whole=make_step(whole, plain_optimizer(whole), batch),
        parameters=count(whole),
    )


def pipeline_parallel(comm: Any, sizes: StepSizes) -> Contenders:
    """Each rank has a stage; the microbatches of one batch pass through all stages."""
    inputs, targets = batch_of(sizes, 0)
    stages = layers_of_stages(sizes.layers, comm.size)
    split = [n + (stage == 0) + (stage == comm.size - 1) for stage, n in enumerate(stages)]
    pipe = pipeline(
        transformer(sizes), comm, schedule="1f1b", microbatches=sizes.microbatches, loss=loss_of, split=split
    )
    optimizer, whole = plain_optimizer(pipe), transformer(sizes)

    def ours() -> float:
        optimizer.zero_grad()
        loss = pipe.step(inputs, targets)
        optimizer.step()
        return float(loss)

    return Contenders(
        ours=ours,
        alone=_own_stage(comm, sizes, stages[comm.rank]),
        whole=make_step(whole, plain_optimizer(whole), (inputs, targets)),
        parameters=count(whole),
    )


def _own_stage(comm: Any, sizes: StepSizes, blocks: int) -> Step:
    """Return a step of this rank's stage only, microbatch by microbatch, without waiting for other ranks."""
    is_first, is_last = comm.rank == 0, comm.rank == comm.size - 1
    layers: list[nn.Module] = [Embed(sizes)] if is_first else []
    layers += [TransformerBlock(sizes) for _ in range(blocks)]
    model = nn.Sequential(*layers, *([LogitHead(sizes)] if is_last else []))
    optimizer = plain_optimizer(model)
    inputs, targets = batch_of(sizes, 0)
    vectors = torch.randn(sizes.rows, sizes.context, sizes.width)

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for given, wanted in zip(
            (inputs if is_first else vectors).chunk(sizes.microbatches), targets.chunk(sizes.microbatches), strict=True
        ):
            output: Tensor = model(given if is_first else given.detach().requires_grad_())
            loss = loss_of(output, wanted) / sizes.microbatches if is_last else output.mean()
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        return total

    return step


def experts(comm: Any, sizes: StepSizes) -> Contenders:
    """Each rank has a batch and some of the experts; all ranks' tokens go to them."""
    single = comm.split(comm.rank, name="alone")
    mesh, mine = Mesh(ranks=comm, dp=-1), batch_of(sizes, comm.rank)
    model = _mixture(sizes, mesh, sizes.experts)
    optimizer: Any = DistributedOptimizer(plain_optimizer(model), model.named_parameters(), mesh=mesh)
    alone = _mixture(sizes, single, sizes.experts // comm.size)  # with the number of experts and tokens of one rank
    whole = _mixture(sizes, single, sizes.experts)
    return Contenders(
        ours=make_step(model, optimizer, mine, lambda: auxiliary_loss(model)),
        alone=make_step(alone, plain_optimizer(alone), mine, lambda: auxiliary_loss(alone)),
        whole=make_step(whole, plain_optimizer(whole), join_batches(sizes, comm.size), lambda: auxiliary_loss(whole)),
        parameters=count(whole),
    )


def _mixture(sizes: StepSizes, ranks: Any, number: int) -> nn.Module:
    return expertize(transformer(sizes), ranks, {"*.mlp": Experts(number, top_k=sizes.top_k)})
