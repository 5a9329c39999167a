"""Autograd functions around the core's routing and exchange. What is on a GPU goes through the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from commlib.expert.exchange import Exchange
from commlib.expert.routing import Routing
from commlib.kernels.host.rows import multiply_rows
from commlib_torch._bridge import back, host_array, packed


class Routed(Function):
    """Logits to gates and losses: `gates, balance, z = Routed.apply(logits, routing)`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
        ctx.routing = routing
        balance, z = (torch.tensor(loss, device=logits.device) for loss in (routing.balance, routing.z))
        return back(routing.gates, logits), balance, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_gates: Tensor, of_balance: Tensor, of_z: Tensor) -> tuple[Tensor, None]:
        gradient = ctx.routing.gradient(host_array(of_gates), float(of_balance), float(of_z))
        return back(gradient, of_gates), None


class Dispatched(Function):
    """Rows of tokens to experts: `rows, gates, passage, counts = Dispatched.apply(x, gates, exchange, ...)`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, exchange: Exchange, what: str, routing: Routing
    ) -> tuple[Tensor, Tensor, Any, list[int]]:
        passage, rows, came, counts = exchange.dispatch(what, routing, host_array(x), host_array(gates))
        ctx.call = exchange, what, passage
        return back(rows, x), back(came, gates), passage, counts.tolist()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rows: Tensor, of_gates: Tensor, *_: Any) -> tuple[Tensor, Tensor, None, None, None]:
        exchange, what, passage = ctx.call
        x, gates = exchange.dispatch_back(what, passage, host_array(of_rows), host_array(of_gates))
        return back(x, of_rows), back(gates, of_gates), None, None, None


class Combined(Function):
    """Rows of experts, times gates, back to tokens: `y = Combined.apply(rows, gates, exchange, what, passage)`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, exchange: Exchange, what: str, passage: Any) -> Tensor:
        rows = packed(rows)
        ctx.save_for_backward(rows, gates)
        ctx.call = exchange, what, passage
        return back(exchange.combine(what, passage, host_array(rows), host_array(gates)), rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        exchange, what, passage = ctx.call
        rows, gates = ctx.saved_tensors
        came = exchange.combine_back(what, passage, host_array(gradient))
        row_gates = host_array(gates)
        of_gates = np.empty_like(row_gates)
        multiply_rows(came, host_array(rows), row_gates, came, of_gates)
        return back(came, rows), back(of_gates, gates), None, None, None
