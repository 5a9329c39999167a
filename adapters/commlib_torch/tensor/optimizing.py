"""Optimizers of PyTorch that look at whole weights: refused where a weight is divided, before they change anything."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from commlib.errors import UsageError
from commlib_torch._shards import shard_of

_LOOK_AT_WHOLE_WEIGHTS = {"Adafactor", "LAMB", "LARS", "LBFGS", "Lamb", "Lars", "Muon"}


@functools.cache
def watch_optimizers() -> None:
    """Let every optimizer's step look for divided parameters first, from now on."""
    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    looks = _LOOK_AT_WHOLE_WEIGHTS.intersection(kind.__name__ for kind in type(optimizer).__mro__)
    if not looks:
        return
    for group in optimizer.param_groups:
        for at, parameter in enumerate(group["params"]):
            if (shard := shard_of(parameter)) is not None and shard.axis.size > 1:
                raise UsageError(
                    f"{min(looks)} on rank {shard.axis.rank} of {shard.axis.comm.name}: looks at whole weights, but "
                    f"parameter {at} of a group, of shape {shard.sharding.shape}, is divided among ranks: use an "
                    "optimizer that treats each element by itself, such as AdamW or SGD, for divided parameters"
                )
