"""Autograd functions for a flow of tokens in several chunks: see `commlib.expert.chunked_dispatch`.

A started all-to-all continues in the background of tensors that are not filled yet: one function passes them to
another, which waits; nothing else sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from commlib.expert.chunked_dispatch import ChunkedDispatch
from commlib.expert.scaled_gradients import scale_gradients
from commlib_torch._bridge import core_array, pack, read, to_tensor
from commlib_torch.devices import use_device_streams
from commlib_torch.expert._backward_failure import BackwardGuard

Compute = Callable[[Tensor, list[int]], Tensor]


def run_in_chunks(flow: ChunkedDispatch, between: BackwardGuard, x: Tensor, gates: Tensor, compute: Compute) -> Tensor:
    """Return the experts' outputs for tokens, times gates.

    compute: the experts' function of rows and counts. between: this call of the layer.
    """
    between.flow = flow
    pieces = _SplitTokens.apply(x, gates, flow, between)  # type: ignore[no-untyped-call]
    count, results = len(flow.parts), []
    _call_ordered(flow.dispatch, 0)
    for part in range(count):
        if part + 1 < count:
            _call_ordered(flow.dispatch, part + 1)
        own = pieces[2 * part], pieces[2 * part + 1]
        rows, row_gates, counts = _DispatchChunk.apply(*own, flow, part)  # type: ignore[no-untyped-call]
        results.append(_CombineChunk.apply(compute(rows, counts), row_gates, flow, part))  # type: ignore[no-untyped-call]
    tokens: Tensor = _JoinTokens.apply(flow, between, *results)  # type: ignore[no-untyped-call]
    return tokens


def _call_ordered(call: Callable[..., Any], *args: Any) -> Any:
    """Call a function with torch's current streams for the core's devices."""
    with use_device_streams():
        return call(*args)


class _SplitTokens(Function):
    """Tokens and gates, split into chunks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, flow: ChunkedDispatch, between: BackwardGuard
    ) -> tuple[Tensor, ...]:
        ctx.flow, ctx.between, ctx.like = flow, between, (x.new_empty(0), x.shape, gates.new_empty(0), gates.shape)
        chunks: list[Tensor] = []
        for part in flow.parts:
            chunks += x[part.first : part.last].clone(), gates[torch.from_numpy(part.places)]
        return tuple(chunks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, Tensor, None, None]:
        empty, shape, no_gates, number = ctx.like
        of_x, of_gates = empty.new_empty(shape), no_gates.new_empty(number)
        for place, part in enumerate(ctx.flow.parts):
            x, gates = _call_ordered(ctx.flow.wait_dispatch_back, place)
            of_x[part.first : part.last] = to_tensor(x)
            of_gates[torch.from_numpy(part.places)] = to_tensor(gates)
        ctx.between.close()
        return of_x, of_gates, None, None


class _DispatchChunk(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, flow: ChunkedDispatch, part: int
    ) -> tuple[Tensor, Tensor, list[int]]:
        ctx.call = flow, part
        ctx.like = x.new_empty(0), x.shape, gates.new_empty(0), gates.shape
        rows, arrived, counts = _call_ordered(flow.dispatched, part)
        return to_tensor(rows), to_tensor(arrived), counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rows: Tensor, of_gates: Tensor, _: Any) -> tuple[Tensor, Tensor, None, None]:
        flow, part = ctx.call
        empty, shape, no_gates, number = ctx.like
        _call_ordered(flow.dispatch_back, part, read(of_rows), read(of_gates))
        return empty.new_empty(shape), no_gates.new_empty(number), None, None


class _CombineChunk(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, flow: ChunkedDispatch, part: int) -> Tensor:
        rows = pack(rows)
        ctx.save_for_backward(rows, gates)
        ctx.call = flow, part
        _call_ordered(flow.combine, part, core_array(rows), read(gates))
        own = flow.parts[part]
        return rows.new_empty(own.last - own.first, rows.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        flow, part = ctx.call
        rows, gates = map(read, ctx.saved_tensors)
        with use_device_streams():
            arrived = flow.wait_combine_back(part)
            of_gates = scale_gradients(arrived, rows, gates)
        return to_tensor(arrived), to_tensor(of_gates), None, None


class _JoinTokens(Function):
    """The results of all chunks, concatenated."""

    @staticmethod
    def forward(ctx: Any, flow: ChunkedDispatch, between: BackwardGuard, *results: Tensor) -> Tensor:
        ctx.flow, ctx.between = flow, between
        return torch.cat([to_tensor(_call_ordered(flow.combined, part)) for part in range(len(results))])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        flow = ctx.flow
        parts = [pack(gradient[part.first : part.last]) for part in flow.parts]
        for place in reversed(range(len(parts))):  # in the order of autograd's backward
            _call_ordered(flow.combine_back, place, core_array(parts[place]))
        ctx.between.open()
        return (None, None, *parts)
