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
from commlib.kernels.host.rows import multiply_rows
from commlib_torch._bridge import array_of, packed, to_tensor

Compute = Callable[[Tensor, list[int]], Tensor]


def in_parts(flow: Flow, x: Tensor, gates: Tensor, compute: Compute) -> Tensor:
    """Return what experts make of tokens, times gates; compute: their outputs, of rows and how many each has."""
    pieces = _Opened.apply(x, gates, flow)  # type: ignore[no-untyped-call]
    count, results = len(flow.parts), []
    flow.dispatch(0)
    for part in range(count):
        if part + 1 < count:
            flow.dispatch(part + 1)
        own = pieces[2 * part], pieces[2 * part + 1]
        rows, row_gates, counts = _Dispatched.apply(*own, flow, part)  # type: ignore[no-untyped-call]
        results.append(_Combined.apply(compute(rows, counts), row_gates, flow, part))  # type: ignore[no-untyped-call]
    found: Tensor = _Closed.apply(flow, *results)  # type: ignore[no-untyped-call]
    return found


class _Opened(Function):
    """Tokens and gates, cut into parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, flow: Flow) -> tuple[Tensor, ...]:
        ctx.flow, ctx.like = flow, (x.new_empty(0), x.shape, gates.shape)
        found: list[Tensor] = []
        for part in flow.parts:
            found += x[part.first : part.last].clone(), gates[torch.from_numpy(part.places)]
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, Tensor, None]:
        empty, shape, number = ctx.like
        of_x, of_gates = empty.new_empty(shape), torch.empty(number)
        for place, part in enumerate(ctx.flow.parts):
            x, gates = ctx.flow.dispatched_back(place)
            of_x[part.first : part.last] = to_tensor(x)
            of_gates[torch.from_numpy(part.places)] = to_tensor(gates)
        return of_x, of_gates, None


class _Dispatched(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, flow: Flow, part: int) -> tuple[Tensor, Tensor, list[int]]:
        ctx.call = flow, part
        ctx.like = x.shape, x.dtype, gates.shape
        rows, came, counts = flow.dispatched(part)
        return to_tensor(rows), to_tensor(came), counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rows: Tensor, of_gates: Tensor, _: Any) -> tuple[Tensor, Tensor, None, None]:
        flow, part = ctx.call
        shape, kind, number = ctx.like
        flow.dispatch_back(part, array_of(packed(of_rows)), array_of(packed(of_gates)))
        return torch.empty(shape, dtype=kind), torch.empty(number), None, None


class _Combined(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, flow: Flow, part: int) -> Tensor:
        rows = packed(rows)
        ctx.save_for_backward(rows, gates)
        ctx.call = flow, part
        flow.combine(part, array_of(rows), array_of(packed(gates)))
        own = flow.parts[part]
        return rows.new_empty(own.last - own.first, rows.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        flow, part = ctx.call
        rows, gates = ctx.saved_tensors
        came = flow.combined_back(part)
        of_gates = torch.empty_like(gates)
        multiply_rows(came, array_of(packed(rows)), array_of(packed(gates)), came, array_of(of_gates))
        return to_tensor(came), of_gates, None, None


class _Closed(Function):
    """What came back of all parts, one after another."""

    @staticmethod
    def forward(ctx: Any, flow: Flow, *results: Tensor) -> Tensor:
        ctx.flow = flow
        return torch.cat([to_tensor(flow.combined(part)) for part in range(len(results))])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        flow = ctx.flow
        parts = [packed(gradient[part.first : part.last]) for part in flow.parts]
        for place in reversed(range(len(parts))):  # as autograd goes back through them
            flow.combine_back(place, array_of(parts[place]))
        return (None, *parts)
