"""Optimizer checks for sharded parameters: refuse optimizers that need full weights, before they change anything.

A step is also refused if its GradScaler has checked only this rank, or if it would let ranks diverge. Optimizer state
from before the sharding of a model is sharded, too.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from commlib.comparison.gradient_comparison import MOST, is_due
from commlib.sharding.axis import ParallelAxis
from commlib.sharding.shards import world_ranks
from commlib.tensor_parallel.checks.axis_equality import AxisWatch, check_alike
from commlib.tensor_parallel.run.optimizers import check_optimizer
from commlib_torch._bridge import dtype_name, host_array, to_device_of
from commlib_torch._graph_breaks import disable_compile
from commlib_torch._scaled_steps import check_scaler, scaler_of_step
from commlib_torch._shard_marks import check_part, mark_part
from commlib_torch._shards import shard_of
from commlib_torch.clip import squares_of, values_of
from commlib_torch.tensor._norms import watch_norms


@functools.cache
def watch_optimizers() -> None:
    """Check for sharded parameters before every optimizer step from now on."""
    watch_norms()
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
    if (scaler := scaler_of_step()) is not None:
        _check_scaler(scaler, optimizer)
    if not torch.compiler.is_compiling():
        _check_state(optimizer)  # collective, so after all local checks


def _check_scaler(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    shards = (shard_of(parameter) for group in optimizer.param_groups for parameter in group["params"])
    for comm in {id(shard.axis.comm): shard.axis.comm for shard in shards if shard is not None}.values():
        check_scaler(scaler, world_ranks(comm), "shards of weights", "commlib_torch.GradScaler(ranks=mesh)")


class _StepCount:
    """Counts an optimizer's steps, for periodic checks."""

    def __init__(self) -> None:
        self.count, self.divisions = 0, 0
        self.state: Any = None
        """The optimizer's state object at the last check: loading replaces it."""


class _ShardingCount:
    """Counts shardings of parameters."""

    divisions = 0


_STEPS: weakref.WeakKeyDictionary[Optimizer, _StepCount] = weakref.WeakKeyDictionary()


def state_may_be_whole() -> None:
    """Let each optimizer's next step look for state of parameters that have been sharded since."""
    _ShardingCount.divisions += 1


@disable_compile
def _check_state(optimizer: Optimizer) -> None:
    steps = _STEPS.get(optimizer)
    if steps is None:
        steps = _STEPS[optimizer] = _StepCount()
    steps.count += 1
    due = is_due(steps.count)
    if due or steps.divisions != _ShardingCount.divisions or steps.state is not optimizer.state:
        steps.divisions, steps.state = _ShardingCount.divisions, optimizer.state
        _settle_state(optimizer)
    if due:
        _check_alike(optimizer)
    if due or is_due(steps.count + 1):
        for axis in _axes_of(optimizer):
            if axis.watch is not None:
                axis.watch.passed(optimizer, steps.count)


def _settle_state(optimizer: Optimizer) -> None:
    """Shard the optimizer state of parameters that have been sharded since, and mark the state of shards.

    A file then identifies its shard. Raises UsageError for loaded state of another shard.
    """
    for parameter, state in optimizer.state.items():
        shard = shard_of(parameter) if isinstance(parameter, Tensor) else None
        if shard is None or tuple(parameter.shape) == shard.sharding.shape:
            continue
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            check_part(f"{key} that {type(optimizer).__name__} keeps", value, shard)
            if tuple(value.shape) == shard.sharding.shape and not shard.is_local:
                value = state[key] = to_device_of(shard.own(host_array(value)), value)
            if value.shape == parameter.shape:
                mark_part(value, shard)


def _axes_of(optimizer: Optimizer) -> list[ParallelAxis]:
    """Return the axes along which an optimizer's parameters are sharded, each once, in order."""
    shards = (shard_of(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return list(dict.fromkeys(shard.axis for shard in shards if shard is not None and not shard.is_local))


def _check_alike(optimizer: Optimizer) -> None:
    """Compare the records of each axis along which parameters are sharded, and gradients of unsharded parameters."""
    axes = _axes_of(optimizer)
    if not axes:
        return
    named = [
        (f"parameter {place} of group {number}, of shape {list(parameter.shape)},", parameter)
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]
    whole = [(name, one) for name, one in named if shard_of(one) is None]
    given = [parameter.grad for _, parameter in whole]
    squares = squares_of([values_of(gradient)[:MOST] for gradient in given if gradient is not None])
    norms = [0.0 if gradient is None else next(squares) for gradient in given]
    names, dtypes = [name for name, _ in whole], [dtype_name(parameter.dtype) for _, parameter in whole]
    for axis in axes:
        watch: AxisWatch | None = axis.watch
        notes = [] if watch is None else watch.take()
        check_alike(f"{type(optimizer).__name__}.step", axis, notes, names, norms, dtypes)
