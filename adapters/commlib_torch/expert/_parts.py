"""Autograd functions around a flow of tokens in several parts: see `commlib.expert.flow`.

Exchanges that have been started go on behind tensors that are not filled yet: those are handed from one of these
functions to another one, which waits, and nobody else sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from commlib.expert.flow import Flow
from commlib.expert.scaled import scaled_back
from commlib_torch._bridge import core_array, packed, read, to_tensor
from commlib_torch.devices import in_order
from commlib_torch.expert._failing import Between

Compute = Callable[[Tensor, list[int]], Tensor]


def in_parts(flow: Flow, between: Between, x: Tensor, gates: Tensor, compute: Compute) -> Tensor:
    """Return what experts make of tokens, times gates.

    compute: their outputs, of rows and how many each has. between: this call of the layer.
    """
    between.flow = flow
    pieces = _Opened.apply(x, gates, flow, between)  # type: ignore[no-untyped-call]
    count, results = len(flow.parts), []
    _ordered(flow.dispatch, 0)
    for part in range(count):
        if part + 1 < count:
            _ordered(flow.dispatch, part + 1)
        own = pieces[2 * part], pieces[2 * part + 1]
        rows, row_gates, counts = _Dispatched.apply(*own, flow, part)  # type: ignore[no-untyped-call]
        results.append(_Combined.apply(compute(rows, counts), row_gates, flow, part))  # type: ignore[no-untyped-call]
    found: Tensor = _Closed.apply(flow, between, *results)  # type: ignore[no-untyped-call]
    return found


def _ordered(call: Callable[..., Any], *args: Any) -> Any:
    """Call with torch's current streams as those of the core's devices."""
    with in_order():
        return call(*args)


class _Opened(Function):
    """Tokens and gates, cut into parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, flow: Flow, between: Between) -> tuple[Tensor, ...]:
        ctx.flow, ctx.between, ctx.like = flow, between, (x.new_empty(0), x.shape, gates.new_empty(0), gates.shape)
        found: list[Tensor] = []
        for part in flow.parts:
            found += x[part.first : part.last].clone(), gates[torch.from_numpy(part.places)]
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, Tensor, None, None]:
        empty, shape, no_gates, number = ctx.like
        of_x, of_gates = empty.new_empty(shape), no_gates.new_empty(number)
        for place, part in enumerate(ctx.flow.parts):
            x, gates = _ordered(ctx.flow.dispatched_back, place)
            of_x[part.first : part.last] = to_tensor(x)
            of_gates[torch.from_numpy(part.places)] = to_tensor(gates)
        ctx.between.close()
        return of_x, of_gates, None, None


class _Dispatched(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, flow: Flow, part: int) -> tuple[Tensor, Tensor, list[int]]:
        ctx.call = flow, part
        ctx.like = x.new_empty(0), x.shape, gates.new_empty(0), gates.shape
        rows, came, counts = _ordered(flow.dispatched, part)
        return to_tensor(rows), to_tensor(came), counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rows: Tensor, of_gates: Tensor, _: Any) -> tuple[Tensor, Tensor, None, None]:
        flow, part = ctx.call
        empty, shape, no_gates, number = ctx.like
        _ordered(flow.dispatch_back, part, read(of_rows), read(of_gates))
        return empty.new_empty(shape), no_gates.new_empty(number), None, None


class _Combined(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, flow: Flow, part: int) -> Tensor:
        rows = packed(rows)
        ctx.save_for_backward(rows, gates)
        ctx.call = flow, part
        _ordered(flow.combine, part, core_array(rows), read(gates))
        own = flow.parts[part]
        return rows.new_empty(own.last - own.first, rows.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        flow, part = ctx.call
        rows, gates = map(read, ctx.saved_tensors)
        with in_order():
            came = flow.combined_back(part)
            of_gates = scaled_back(came, rows, gates)
        return to_tensor(came), to_tensor(of_gates), None, None


class _Closed(Function):
    """What came back of all parts, one after another."""

    @staticmethod
    def forward(ctx: Any, flow: Flow, between: Between, *results: Tensor) -> Tensor:
        ctx.flow, ctx.between = flow, between
        return torch.cat([to_tensor(_ordered(flow.combined, part)) for part in range(len(results))])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        flow = ctx.flow
        parts = [packed(gradient[part.first : part.last]) for part in flow.parts]
        for place in reversed(range(len(parts))):  # as autograd goes back through them
            _ordered(flow.combine_back, place, core_array(parts[place]))
        ctx.between.open()
        return (None, None, *parts)
