"""Forward runs: run a PyTorch model unsharded, or as one rank with its shards, and return the numbers of its calls."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from commlib.dtypes import Array
from commlib.errors import CommlibError, UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.checks.guided_run import GuidedRun
from commlib.tensor_parallel.checks.trace_run import TracedRun
from commlib.tensor_parallel.checks.weight_shapes import list_weight_shapes
from commlib.tensor_parallel.run.rank_numbers import change_numbers, numbers_of_rank, whole_numbers_of
from commlib.tensor_parallel.styles import Column, Row, Style, Vocabulary
from commlib_torch._bridge import host_array
from commlib_torch._graph_breaks import suspend_compile
from commlib_torch._trial_run import copy_arguments, map_leaves, preserve_model
from commlib_torch.tensor._comparison import has_numbers
from commlib_torch.tensor._nested_tensors import tensors_in
from commlib_torch.tensor._numbers import numbers_in
from commlib_torch.tensor._placeholders import substitute_weights, zeros_in
from commlib_torch.tensor._weights import sharded_weights
from commlib_torch.tensor.features import FeatureLayer
from commlib_torch.tensor.moves import gather, scatter
from commlib_torch.tensor.tracing import TraceRecorder
from commlib_torch.tensor.verify import disable_fusion, evaluation_mode

Change = tuple[nn.Module, str, Any]
"""An attribute of a module, and a temporary value."""


def forward(
    model: nn.Module,
    axis: ParallelAxis,
    call: Any,
    styles: Mapping[str, Style],
    guide: GuidedRun | None,
    *,
    evaluate: bool,
    replaces_zeros: bool,
) -> TracedRun | None:
    """Run a model as `ModelRunner` of `numeric_checks` describes. axis: the axis along which it is sharded.

    replaces_zeros: replace weights that are zeros.
    """
    whole = guide is None or guide.cuts
    changes = _unsharding_changes(model, axis) if whole else []
    if changes is None:
        return None
    numbers = [one for module in model.modules() for one in whole_numbers_of(module).items()] if whole else []
    if guide is not None and guide.cuts:
        numbers += numbers_of_rank(numbers_in(model), styles, axis)
    ranks = (axis.rank, axis.size) if guide is not None and guide.cuts else None
    learns = torch.is_grad_enabled() and any(weight.requires_grad for weight in model.parameters())

    recorder = TraceRecorder(
        model,
        styles,
        whole=whole,
        guide=guide,
        calls=lambda: axis.calls,
        ranks=ranks,
        keeps=True,
        differentiates=learns,
        weights=list_weight_shapes(sharded_weights(model, styles), axis, guide),
    )
    with (
        _change_attributes(changes),
        change_numbers(numbers),
        substitute_weights(model, zeros_in(model) if replaces_zeros else ()),
    ):
        return _run(model, recorder, call, evaluate=evaluate)


def _run(model: nn.Module, recorder: TraceRecorder, call: Any, *, evaluate: bool) -> TracedRun:
    error, messages, result = None, _Messages(), None
    with ExitStack() as stack:
        stack.enter_context(suspend_compile())
        stack.enter_context(preserve_model(model, *call))
        stack.enter_context(evaluation_mode(model) if evaluate else disable_fusion())
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            stack.enter_context(messages)
        args, options = (copy_arguments(part) for part in call)
        before = _random_states()
        try:
            trace, result = recorder.run(tuple(args), dict(options))
        except Exception as raised:
            if isinstance(raised, CommlibError) and not isinstance(raised, UsageError):
                raise
            trace, error = recorder.trace_of(()), raised
        draws = before != _random_states()
        saved = recorder.layer_values
        values = [_array(saved.get(number, tensor)) for number, tensor in enumerate(recorder.tensors)]
    recorder.forget()
    return TracedRun(
        trace,
        values,
        {},
        {},
        {},
        draws=draws,
        results=_numbers(result),
        communicates=recorder.communicates or messages.seen,
        hides=recorder.hides,
        error=error,
    )


def _unsharding_changes(model: nn.Module, axis: ParallelAxis) -> list[Change] | None:
    """Return attribute changes that make a sharded model compute unsharded results on all ranks; None if impossible.

    Activations are gathered at the outputs of sharded layers and split at their inputs; weights stay sharded.
    """
    changes: list[Change] = []
    heads, others = set[nn.Module](), set[nn.Module]()
    """Modules within an attention, and modules within sharded layers."""
    for module in model.modules():
        style, own = getattr(module, "style", None), getattr(module, "axis", None)
        if not isinstance(own, ParallelAxis):
            continue
        if not isinstance(style, Style):
            others.update(one for one in module.modules() if one is not module)
            continue
        if isinstance(module, nn.MultiheadAttention):
            heads.update(module.modules())
        if own.comm is not axis.comm or (module in others and getattr(style, "sequence", None) is not None):
            return None
        if module in heads or (isinstance(style, Vocabulary) and isinstance(module, nn.Embedding)):
            change: Style = replace(style, sequence=None)  # type: ignore[arg-type]  # all of these have one
        elif module in others:
            continue
        elif isinstance(module, FeatureLayer):
            changes.append((module, "takes_whole", True))
            continue
        elif isinstance(style, Column | Vocabulary):
            change = replace(style, gather=True, sequence=None)
        elif isinstance(style, Row):
            change = replace(style, split=True, sequence=None)
        else:
            continue
        changes.append((module, "style", change))
    return changes


@contextmanager
def _change_attributes(changes: list[Change]) -> Iterator[None]:
    """Change attributes of modules within the context."""
    own = [(module, name, vars(module)[name]) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            vars(module)[name] = value
        yield
    finally:
        for module, name, value in own:
            vars(module)[name] = value


class _Messages(TorchDispatchMode):
    """Detects calls of torch.distributed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= getattr(func, "namespace", "") in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def _random_states() -> list[bytes]:
    """Return the states of random generators, for comparison."""
    states = [
        torch.get_rng_state().numpy().tobytes(),
        repr(random.getstate()).encode(),
        repr(np.random.get_state()).encode(),
    ]
    if torch.cuda.is_initialized():
        states += [torch.cuda.get_rng_state(device).numpy().tobytes() for device in range(torch.cuda.device_count())]
    return states


def _numbers(result: Any) -> tuple[float, ...]:
    """Return the Python numbers in a model's results."""
    return tuple(float(one) for one in tree_leaves(result) if isinstance(one, int | float))


def _array(tensor: Tensor) -> Array:
    """Return the numbers of a tensor as an array; an empty one if numpy cannot represent them."""
    try:
        return host_array(tensor)
    except Exception:
        return np.empty(0)


def split_calls(axis: ParallelAxis, call: Any, dims: Mapping[int, int], *, is_part: bool) -> tuple[Any, Any] | None:
    """Return calls as `ModelRunner` of `numeric_checks` specifies; None for tensors in objects. Collective."""
    args, options = call
    tensors = tensors_in([*args, *options.values()])
    divided = {id(tensors[at]): tensors[at] for at in dims}
    if not all(axis.comm.all_gather_object(_are_within(call, divided))):
        return None
    move = gather if is_part else scatter
    with torch.no_grad():
        moved = {id(tensors[at]): move(tensors[at].detach(), axis, dim) for at, dim in dims.items()}

    def change(value: Any) -> Any:
        other = moved.get(id(value))
        return value if other is None else other.requires_grad_(value.requires_grad)

    changed = map_leaves((tuple(args), dict(options)), change)
    return (changed, call) if is_part else (call, changed)


def _are_within(call: Any, tensors: Mapping[int, Tensor]) -> bool:
    """Return whether tensors have values, and are in tuples, lists and dicts."""
    within = set[int]()

    args, options = call
    map_leaves((tuple(args), dict(options)), lambda one: within.add(id(one)))
    return within.issuperset(tensors) and all(map(has_numbers, tensors.values()))
