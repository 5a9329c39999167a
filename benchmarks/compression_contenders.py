"""The contenders of benchmarks/compression.py: how each of them trains a model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

RATES = {"sgd": 0.05, "momentum": 0.02, "adam": 0.001}  # by optimizer; all about as high as uncompressed training bears
MOMENTUM = 0.9


@dataclass
class Training:
    """One contender: its model, how to take a step, and what that sent, if it says so."""

    model: Any
    step: Callable[[Any], float]  # takes a batch; returns this rank's loss
    sent: Callable[[], int] | None = None
    close: Callable[[], None] = lambda: None


def make_optimizer(model: Any, options: argparse.Namespace) -> Any:
    import torch

    if options.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=options.lr)
    momentum = MOMENTUM if options.optimizer == "momentum" else 0
    return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=momentum)


def make_plain_sgd(model: Any, options: argparse.Namespace) -> Any:
    """For what has a momentum of its own: steps in the long run as large as those of the optimizer that was chosen."""
    import torch

    rates = {"sgd": options.lr * (1 - MOMENTUM), "momentum": options.lr, "adam": RATES["momentum"]}
    return torch.optim.SGD(model.parameters(), lr=rates[options.optimizer])


def train_by(model: Any, optimizer: Any, options: argparse.Namespace) -> Callable[[Any], float]:
    """Return a training step; in the first tenth of the steps the learning rate rises."""
    import torch

    from benchmarks.text_model import loss_of

    warm_up = max(1, options.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / warm_up))

    def step(batch: Any) -> float:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.item()

    return step


def local(model: Any, options: argparse.Namespace) -> Training:
    """No communication: every rank trains on its own data alone."""
    return Training(model, train_by(model, make_optimizer(model, options), options))


def ours(
    model: Any,
    options: argparse.Namespace,
    *,
    compression: str,
    make_optimizer: Callable[[Any, argparse.Namespace], Any] = make_optimizer,
) -> Training:
    """Our DistributedOptimizer."""
    from commlib_torch import DistributedOptimizer
    from commlib_torch._autograd import backward_passes

    optimizer: Any = DistributedOptimizer(
        make_optimizer(model, options),
        model.named_parameters(),
        compression=compression,
        compress_within_node=options.hosts == 1,  # it is to be measured there too, though nothing is gained by it
    )
    train = train_by(model, optimizer, options)
    backward_passes.leave(optimizer._gradients)

    def step(batch: Any) -> float:
        # Several reducers in one process launch nothing before backward ends. Each contender is to be the only one.
        backward_passes.join(optimizer._gradients)
        loss = train(batch)
        backward_passes.leave(optimizer._gradients)
        return loss

    return Training(model, step, lambda: optimizer.report.sent_bytes, optimizer._gradients.close)


def ddp(model: Any, options: argparse.Namespace, *, hook: str = "") -> Training:
    """torch's DistributedDataParallel on gloo, with one of its communication hooks.

    PowerSGD gets one bucket: with several, gloo aborted, since callbacks of the hook issue collectives in any order.
    Like ours, its matrices have rank 4; it may not compress the first two steps.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    cap = 1000 if hook == "powersgd" else options.ddp_buckets
    wrapped = DistributedDataParallel(model, bucket_cap_mb=cap)
    if hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Training(model, train_by(wrapped, make_optimizer(model, options), options))


Make = Callable[[Any, argparse.Namespace], Training]
CONTENDERS: dict[str, Make] = {
    "local": local,
    "none": partial(ours, compression="none"),
    "fp16": partial(ours, compression="fp16"),
    "bf16": partial(ours, compression="bf16"),
    "fp8": partial(ours, compression="fp8"),
    "int8": partial(ours, compression="int8"),
    "int4": partial(ours, compression="int4"),
    "qsgd": partial(ours, compression="qsgd"),
    "sign": partial(ours, compression="sign"),
    "topk": partial(ours, compression="topk:ratio=0.01"),
    "randomk": partial(ours, compression="randomk:ratio=0.01"),
    "powersgd": partial(ours, compression="powersgd:rank=4"),
    "dgc": partial(ours, compression="dgc:ratio=0.01,warmup_steps=40", make_optimizer=make_plain_sgd),
    "auto": partial(ours, compression="auto"),
    "ddp": ddp,
    "ddp fp16": partial(ddp, hook="fp16"),
    "ddp powersgd": partial(ddp, hook="powersgd"),
}


def contender(name: str) -> Make:
    """Return what is in the table by this name; another one is the name of a compression of ours."""
    return CONTENDERS.get(name) or partial(ours, compression=name)
