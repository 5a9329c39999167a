"""Autograd functions around the core's routing and exchange."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from commlib.expert.exchange import Exchange
from commlib.expert.routing import Routing
from commlib.kernels.host.rows import multiply_rows
from commlib_torch._bridge import array_of, packed, to_tensor


class Routed(Function):
    """Logits to gates and losses: `gates, balance, z = Routed.apply(logits, routing)`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
        ctx.routing = routing
        return to_tensor(routing.gates), torch.tensor(routing.balance), torch.tensor(routing.z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_gates: Tensor, of_balance: Tensor, of_z: Tensor) -> tuple[Tensor, None]:
        gates = array_of(packed(of_gates))
        return to_tensor(ctx.routing.gradient(gates, float(of_balance), float(of_z))), None


class Dispatched(Function):
    """Rows of tokens to experts: `rows, gates, passage, counts = Dispatched.apply(x, gates, exchange, ...)`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, exchange: Exchange, what: str, routing: Routing
    ) -> tuple[Tensor, Tensor, Any, list[int]]:
        passage, rows, came, counts = exchange.dispatch(what, routing, array_of(packed(x)), array_of(packed(gates)))
        ctx.call = exchange, what, passage
        return to_tensor(rows), to_tensor(came), passage, counts.tolist()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rows: Tensor, of_gates: Tensor, *_: Any) -> tuple[Tensor, Tensor, None, None, None]:
        exchange, what, passage = ctx.call
        x, gates = exchange.dispatch_back(what, passage, array_of(packed(of_rows)), array_of(packed(of_gates)))
        return to_tensor(x), to_tensor(gates), None, None, None


class Combined(Function):
    """Rows of experts, times gates, back to tokens: `y = Combined.apply(rows, gates, exchange, what, passage)`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, exchange: Exchange, what: str, passage: Any) -> Tensor:
        rows = packed(rows)
        ctx.save_for_backward(rows, gates)
        ctx.call = exchange, what, passage
        return to_tensor(exchange.combine(what, passage, array_of(rows), array_of(packed(gates))))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        exchange, what, passage = ctx.call
        rows, gates = ctx.saved_tensors
        came = exchange.combine_back(what, passage, array_of(packed(gradient)))
        of_gates = torch.empty_like(gates)
        multiply_rows(came, array_of(packed(rows)), array_of(packed(gates)), came, array_of(of_gates))
        return to_tensor(came), of_gates, None, None, None
