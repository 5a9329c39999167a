"""Forward: run a model of PyTorch as a whole, or as one rank with its part, and keep the numbers."""

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
from commlib.sharding.axis import Axis
from commlib.tensor_parallel.checks.guide import Guide
from commlib.tensor_parallel.checks.runs import Run
from commlib.tensor_parallel.checks.seen_weights import seen_weights
from commlib.tensor_parallel.run.per_rank import changed_numbers, numbers_of_rank, whole_numbers_of
from commlib.tensor_parallel.styles import Column, Row, Style, Vocabulary
from commlib_torch._bridge import host_array
from commlib_torch._uncompiled import uncompiled_calls
from commlib_torch._unnoticed import fresh, unnoticed
from commlib_torch.tensor._numbers import numbers_in
from commlib_torch.tensor._stand_ins import standing_in, zeros_in
from commlib_torch.tensor._weights import divided_weights
from commlib_torch.tensor.features import OnFeatures
from commlib_torch.tensor.tracing import Recorder
from commlib_torch.tensor.verify import evaluating, unfused

Change = tuple[nn.Module, str, Any]
"""An attribute of a module, and another value for it."""


def forward(
    model: nn.Module,
    axis: Axis,
    call: Any,
    styles: Mapping[str, Style],
    guide: Guide | None,
    *,
    evaluate: bool,
    stands_in: bool,
) -> Run | None:
    """Run a model as `commlib.tensor_parallel.checks.numbers.Runs` says. axis: among which it is divided.

    stands_in: with other numbers for weights that are zeros.
    """
    whole = guide is None or guide.cuts
    changes = _undivided(model, axis) if whole else []
    if changes is None:
        return None
    numbers = [one for module in model.modules() for one in whole_numbers_of(module).items()] if whole else []
    if guide is not None and guide.cuts:
        numbers += numbers_of_rank(numbers_in(model), styles, axis)
    ranks = (axis.rank, axis.size) if guide is not None and guide.cuts else None
    learns = torch.is_grad_enabled() and any(weight.requires_grad for weight in model.parameters())

    recorder = Recorder(
        model,
        styles,
        whole=whole,
        guide=guide,
        calls=lambda: axis.calls,
        ranks=ranks,
        keeps=True,
        differentiates=learns,
        weights=seen_weights(divided_weights(model, styles), axis, guide),
    )
    with _changed(changes), changed_numbers(numbers), standing_in(model, zeros_in(model) if stands_in else ()):
        return _ran(model, recorder, call, evaluate=evaluate)


def _ran(model: nn.Module, recorder: Recorder, call: Any, *, evaluate: bool) -> Run:
    error, messages, result = None, _Messages(), None
    with ExitStack() as stack:
        stack.enter_context(uncompiled_calls())
        stack.enter_context(unnoticed(model, *call))
        stack.enter_context(evaluating(model) if evaluate else unfused())
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            stack.enter_context(messages)
        args, options = (fresh(part) for part in call)
        before = _random_states()
        try:
            trace, result = recorder.run(tuple(args), dict(options))
        except Exception as raised:
            if isinstance(raised, CommlibError) and not isinstance(raised, UsageError):
                raise
            trace, error = recorder.trace_of(()), raised
        draws = before != _random_states()
        kept = recorder.kept
        values = [_array(kept.get(number, tensor)) for number, tensor in enumerate(recorder.tensors)]
    recorder.forget()
    return Run(
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


def _undivided(model: nn.Module, axis: Axis) -> list[Change] | None:
    """Return with which attributes a divided model computes the whole, on all ranks alike; None if with none.

    Activations are put together where they leave a layer, and divided again where they enter one: each rank has the
    weights that it has.
    """
    found: list[Change] = []
    heads, others = set[nn.Module](), set[nn.Module]()
    """Modules within an attention, and within layers that are divided by themselves."""
    for module in model.modules():
        style, own = getattr(module, "style", None), getattr(module, "axis", None)
        if not isinstance(own, Axis):
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
        elif isinstance(module, OnFeatures):
            found.append((module, "takes_whole", True))
            continue
        elif isinstance(style, Column | Vocabulary):
            change = replace(style, gather=True, sequence=None)
        elif isinstance(style, Row):
            change = replace(style, split=True, sequence=None)
        else:
            continue
        found.append((module, "style", change))
    return found


@contextmanager
def _changed(changes: list[Change]) -> Iterator[None]:
    """Give modules other attributes for a while."""
    own = [(module, name, vars(module)[name]) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            vars(module)[name] = value
        yield
    finally:
        for module, name, value in own:
            vars(module)[name] = value


class _Messages(TorchDispatchMode):
    """Sees whether torch.distributed is called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= getattr(func, "namespace", "") in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def _random_states() -> list[bytes]:
    """Return the states of generators, to be compared."""
    states = [
        torch.get_rng_state().numpy().tobytes(),
        repr(random.getstate()).encode(),
        repr(np.random.get_state()).encode(),
    ]
    if torch.cuda.is_initialized():
        states += [torch.cuda.get_rng_state(device).numpy().tobytes() for device in range(torch.cuda.device_count())]
    return states


def _numbers(result: Any) -> tuple[float, ...]:
    """Return the numbers of Python among a model's results."""
    return tuple(float(one) for one in tree_leaves(result) if isinstance(one, int | float))


def _array(tensor: Tensor) -> Array:
    """Return the numbers of a tensor; none of one that has none which numpy could hold."""
    try:
        return host_array(tensor)
    except Exception:
        return np.empty(0)
