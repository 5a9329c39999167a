"""Gradient checks after optimizer steps: periodically report gradients that let ranks diverge, or that mix experts."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from commlib.comparison.gradient_comparison import MOST, is_due, print_of
from commlib.expert.shared_gradients import check_step, has_experts
from commlib_torch._bridge import dtype_name, host_array
from commlib_torch._graph_breaks import disable_compile
from commlib_torch._shards import shard_of
from commlib_torch.clip import squares_of, values_of

_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_warned: weakref.WeakKeyDictionary[Optimizer, set[str]] = weakref.WeakKeyDictionary()


@functools.cache
def watch_gradients() -> None:
    """Compare the gradients of experts after optimizer steps from now on; by then every wrapper has reduced them."""
    register_optimizer_step_post_hook(_check_step)


def _check_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _count(optimizer)


@disable_compile
def _count(optimizer: Optimizer) -> None:
    step = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    if not is_due(step):
        return
    entries = [
        (f"parameter {place} of group {number}, of shape {list(one.shape)},", one, shard_of(one))
        for number, group in enumerate(optimizer.param_groups)
        if group.get("lr") != 0  # ranks cannot diverge
        for place, one in enumerate(group["params"])
    ]
    if not has_experts(shard for *_, shard in entries):
        return
    squares = squares_of([values_of(one.grad)[:MOST] for _, one, _ in entries if one.grad is not None])
    gradients = [
        (name, shard, 0.0 if one.grad is None else next(squares), dtype_name(one.dtype)) for name, one, shard in entries
    ]
    own = [one for one in gradients if one[1] is None or one[1].is_local]
    prints = [print_of(host_array(values_of(one)[:MOST])) for _, one, shard in entries if shard is None and step == 1]
    check_step(f"{type(optimizer).__name__}.step", own, _warned.setdefault(optimizer, set()), prints)
