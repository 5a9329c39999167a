"""The contenders of benchmarks/compression.py: the training step of each."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

RATES = {"sgd": 0.05, "momentum": 0.02, "adam": 0.001}  # near the highest at which uncompressed training converges
MOMENTUM = 0.9


@dataclass
class Training:
    """One contender: its model, its training step, and the bytes sent, if it counts them."""

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
    """Return SGD for schemes with built-in momentum; its steps are in the long run as large as the optimizer's."""
    import torch

    rates = {"sgd": options.lr * (1 - MOMENTUM), "momentum": options.lr, "adam": RATES["momentum"]}
    return torch.optim.SGD(model.parameters(), lr=rates[options.optimizer])


def train_by(model: Any, optimizer: Any, options: argparse.Namespace) -> Callable[[Any], float]:
    """Return a training step; the learning rate rises during the first tenth of the steps."""
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
    """Train without communication: every rank trains on its own data alone."""
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
        compress_within_node=options.hosts == 1,  # measured on one node too, although nothing is gained by it
    )
    train = train_by(model, optimizer, options)
    backward_passes.leave(optimizer._gradients)

    def step(batch: Any) -> float:
        # With several reducers in one process, none launches before backward ends. So only one exists at a time.
        backward_passes.join(optimizer._gradients)
        loss = train(batch)
        backward_passes.leave(optimizer._gradients)
        return loss

    return Training(model, step, lambda: optimizer.report.sent_bytes, optimizer._gradients.close)


def ddp(model: Any, options: argparse.Namespace, *, hook: str = "") -> Training:
    """Train with torch's DistributedDataParallel on gloo, with one of its communication hooks.

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
    """Return the contender of this name from the table; any other name is one of commlib's compressions."""
    return CONTENDERS.get(name) or partial(ours, compression=name)
