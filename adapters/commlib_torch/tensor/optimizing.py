"""Optimizers of PyTorch and divided parameters: what looks at whole weights is refused before it changes anything."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from commlib.functional.optimizers import check_optimizer
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
