"""Optimizers of PyTorch and divided parameters: refuse what looks at whole weights, before it changes anything.

So is a step of a GradScaler that has asked this rank alone.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from commlib.functional.optimizers import check_optimizer
from commlib.functional.shards import world_ranks
from commlib_torch._scaled_steps import check_scaler, scaler_of_step
from commlib_torch._shards import shard_of


@functools.cache
def watch_optimizers() -> None:
    """Let every optimizer's step look for divided parameters first, from now on."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    groups = enumerate(optimizer.param_groups)
    check_optimizer(
        optimizer,
        (
            (f"parameter {place} of group {number}", shard_of(parameter))
            for number, group in groups
            for place, parameter in enumerate(group["params"])
        ),
    )
    if (scaler := scaler_of_step()) is None:
        return
    shards = (shard_of(parameter) for group in optimizer.param_groups for parameter in group["params"])
    for comm in {id(shard.axis.comm): shard.axis.comm for shard in shards if shard is not None}.values():
        check_scaler(scaler, world_ranks(comm), "parts of weights", "commlib_torch.GradScaler(mesh=mesh)")
