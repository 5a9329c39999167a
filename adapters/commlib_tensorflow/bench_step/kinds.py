"""The contenders of each kind of parallelism."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from commlib import Mesh
from commlib.bench.steps.contract import Contenders, Step, StepSizes, layers_of_stages
from commlib.expert import Experts
from commlib.tensor_parallel import Column, Row
from commlib_tensorflow.bench_step.model import (
    Embed,
    batch_of,
    block,
    head,
    join_batches,
    loss_of,
    make_step,
    plain_optimizer,
    transformer,
)
from commlib_tensorflow.expert import expertize
from commlib_tensorflow.optimizer import DistributedOptimizer
from commlib_tensorflow.pipelines.pipeline import pipeline
from commlib_tensorflow.tensor import parallelize


def data_parallel(comm: Any, sizes: StepSizes) -> Contenders:
    """Data parallelism: each rank has a batch, and gradients are averaged."""
    mine, whole = batch_of(sizes, comm.rank), transformer(sizes)
    return Contenders(
        ours=make_step(transformer(sizes), DistributedOptimizer(plain_optimizer()), mine),
        alone=make_step(transformer(sizes), plain_optimizer(), mine),
        whole=make_step(whole, plain_optimizer(), join_batches(sizes, comm.size)),
        parameters=whole.count_params(),
    )


def tensor_parallel(comm: Any, sizes: StepSizes) -> Contenders:
    """Tensor parallelism: all ranks have one batch, and a shard of each layer."""
    batch, whole = batch_of(sizes, 0), transformer(sizes)
    units = Column(units=sizes.heads)
    plan: dict[str, Column | Row] = {
        "q*": units,
        "k*": units,
        "v*": units,
        "out*": Row(units=sizes.heads),
        "*_mlp/up*": Column(),
        "*_mlp/down*": Row(),
    }
    return Contenders(
        ours=make_step(parallelize(transformer(sizes), comm, plan), plain_optimizer(), batch),
        alone=make_step(transformer(sizes, comm.size), plain_optimizer(), batch),
        whole=make_step(whole, plain_optimizer(), batch),
        parameters=whole.count_params(),
    )


def pipeline_parallel(comm: Any, sizes: StepSizes) -> Contenders:
    """Pipeline parallelism: each rank has a stage, and the microbatches of one batch go through all of them."""
    batch, whole = batch_of(sizes, 0), transformer(sizes)
    stages = layers_of_stages(sizes.layers, comm.size)
    begins = [f"norm{sum(stages[:stage])}" for stage in range(1, comm.size)]
    pipe = pipeline(transformer(sizes), comm, schedule="1f1b", microbatches=sizes.microbatches, split=begins)
    return Contenders(
        ours=make_step(pipe, plain_optimizer(), batch),
        alone=_own_stage(comm, sizes, stages),
        whole=make_step(whole, plain_optimizer(), batch),
        parameters=whole.count_params(),
    )


def _own_stage(comm: Any, sizes: StepSizes, stages: list[int]) -> Step:
    """Return a step of this rank's stage of a pipeline, microbatch after microbatch, without waiting for others."""
    is_first, is_last = comm.rank == 0, comm.rank == comm.size - 1
    first = sum(stages[: comm.rank])
    given = keras.Input((sizes.context,), dtype="int32") if is_first else keras.Input((sizes.context, sizes.width))
    x = Embed(sizes, name="embed")(given) if is_first else given
    for number in range(first, first + stages[comm.rank]):
        x = block(x, sizes, number)
    model = keras.Model(given, head(x, sizes) if is_last else x)
    optimizer, loss = plain_optimizer(), loss_of()
    optimizer.build(model.trainable_variables)
    inputs, targets = (tf.constant(part) for part in batch_of(sizes, 0))
    if not is_first:
        inputs = tf.random.normal((sizes.rows, sizes.context, sizes.width))
    parts = list(zip(tf.split(inputs, sizes.microbatches), tf.split(targets, sizes.microbatches), strict=True))

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def gradients(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            if not is_first:
                tape.watch(x)
            result = model(x, training=True)
            value = loss(y, result) / sizes.microbatches if is_last else tf.reduce_mean(result)
        sources = [*model.trainable_variables, *([] if is_first else [x])]
        return value, tape.gradient(value, sources)[: len(model.trainable_variables)]

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def update(sums: Any) -> None:
        optimizer.apply(sums, model.trainable_variables)

    def step() -> float:
        total, sums = 0.0, None
        for x, y in parts:
            value, result = gradients(x, y)
            result = [tf.convert_to_tensor(one) for one in result]
            sums = result if sums is None else [one + other for one, other in zip(sums, result, strict=True)]
            total += float(value)
        update(sums)
        return total

    return step


def experts(comm: Any, sizes: StepSizes) -> Contenders:
    """Expert parallelism: each rank has a batch and some of the experts, which get the tokens of all ranks."""
    single = comm.split(comm.rank, name="alone")
    mesh, mine = Mesh(ranks=comm, dp=-1), batch_of(sizes, comm.rank)
    whole = _mixture(sizes, single, sizes.experts)
    fewer = _mixture(sizes, single, sizes.experts // comm.size)  # as many experts and tokens as one rank has
    model = _mixture(sizes, mesh, sizes.experts)
    return Contenders(
        ours=make_step(model, DistributedOptimizer(plain_optimizer(), mesh=mesh), mine),
        alone=make_step(fewer, plain_optimizer(), mine),
        whole=make_step(whole, plain_optimizer(), join_batches(sizes, comm.size)),
        parameters=whole.count_params(),
    )


def _mixture(sizes: StepSizes, ranks: Any, number: int) -> Any:
    return expertize(transformer(sizes), ranks, {"*_mlp": Experts(number, top_k=sizes.top_k)})
