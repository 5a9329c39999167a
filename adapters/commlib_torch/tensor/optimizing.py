"""Optimizers of PyTorch and divided parameters: refuse what looks at whole weights, before it changes anything.

So is a step of a GradScaler that has asked this rank alone, and one by which ranks would part. What an optimizer keeps
of training before the model was divided is divided, too.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from commlib.comparison.whole_weights import MOST, is_due
from commlib.sharding.axis import Axis
from commlib.sharding.shards import world_ranks
from commlib.tensor_parallel.checks.alike import Watch, check_alike
from commlib.tensor_parallel.run.optimizers import check_optimizer
from commlib_torch._bridge import back, dtype_name, host_array
from commlib_torch._saved_parts import check_part, mark_part
from commlib_torch._scaled_steps import check_scaler, scaler_of_step
from commlib_torch._shards import shard_of
from commlib_torch._uncompiled import uncompiled
from commlib_torch.clip import squares_of, values_of
from commlib_torch.tensor._norms import watch_norms


@functools.cache
def watch_optimizers() -> None:
    """Let every optimizer's step look for divided parameters first, from now on."""
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
        _look(optimizer)  # with the other ranks, so behind all that one rank can tell by itself


def _check_scaler(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    shards = (shard_of(parameter) for group in optimizer.param_groups for parameter in group["params"])
    for comm in {id(shard.axis.comm): shard.axis.comm for shard in shards if shard is not None}.values():
        check_scaler(scaler, world_ranks(comm), "parts of weights", "commlib_torch.GradScaler(mesh=mesh)")


class _Steps:
    """Counts an optimizer's steps, for all that is looked at now and then."""

    def __init__(self) -> None:
        self.count, self.divisions = 0, 0
        self.state: Any = None
        """What the optimizer kept at the last look: loading makes another one."""


class _Divided:
    """Counts how often anything was divided."""

    divisions = 0


_STEPS: weakref.WeakKeyDictionary[Optimizer, _Steps] = weakref.WeakKeyDictionary()


def state_may_be_whole() -> None:
    """Let all optimizers look at their next step whether they keep something for a parameter that is smaller by now."""
    _Divided.divisions += 1


@uncompiled
def _look(optimizer: Optimizer) -> None:
    steps = _STEPS.get(optimizer)
    if steps is None:
        steps = _STEPS[optimizer] = _Steps()
    steps.count += 1
    due = is_due(steps.count)
    if due or steps.divisions != _Divided.divisions or steps.state is not optimizer.state:
        steps.divisions, steps.state = _Divided.divisions, optimizer.state
        _settle_state(optimizer)
    if due:
        _check_alike(optimizer)
    if due or is_due(steps.count + 1):
        for axis in _axes_of(optimizer):
            if axis.watch is not None:
                axis.watch.passed(optimizer, steps.count)


def _settle_state(optimizer: Optimizer) -> None:
    """Cut what an optimizer keeps for whole weights that are divided by now, and mark what it keeps for parts.

    So a file of it says of which part that is. Raises UsageError for what was loaded, and is of another one.
    """
    for parameter, kept in optimizer.state.items():
        shard = shard_of(parameter) if isinstance(parameter, Tensor) else None
        if shard is None or tuple(parameter.shape) == shard.sharding.shape:
            continue
        for key, value in kept.items():
            if not isinstance(value, Tensor):
                continue
            check_part(f"{key} that {type(optimizer).__name__} keeps", value, shard)
            if tuple(value.shape) == shard.sharding.shape and not shard.is_local:
                value = kept[key] = back(shard.own(host_array(value)), value)
            if value.shape == parameter.shape:
                mark_part(value, shard)


def _axes_of(optimizer: Optimizer) -> list[Axis]:
    """Return the axes over which an optimizer's parameters are divided, each once, in order."""
    shards = (shard_of(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return list(dict.fromkeys(shard.axis for shard in shards if shard is not None and not shard.is_local))


def _check_alike(optimizer: Optimizer) -> None:
    """Compare what was noted along the axes over which parameters are divided, and the gradients of whole ones."""
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
    found = [0.0 if gradient is None else next(squares) for gradient in given]
    names, dtypes = [name for name, _ in whole], [dtype_name(parameter.dtype) for _, parameter in whole]
    for axis in axes:
        watch: Watch | None = axis.watch
        notes = [] if watch is None else watch.taken()
        check_alike(f"{type(optimizer).__name__}.step", axis, notes, names, found, dtypes)
