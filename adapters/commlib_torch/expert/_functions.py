"""Autograd functions for the core's routing and dispatch.

Rows stay on their device. The host waits for the logits of the router and, in backward, for the gradients of gates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from commlib.expert.dispatcher import Dispatcher
from commlib.expert.routing import Routing
from commlib.expert.scaled_gradients import scale_gradients
from commlib_torch._bridge import core_array, host_array, pack, read, to_device_of, to_tensor
from commlib_torch.devices import use_device_streams
from commlib_torch.expert._backward_failure import BackwardGuard
from commlib_torch.expert._pending_gradients import PendingGradient


class RouteFunction(Function):
    """Logits to gates and the weighted loss: `gates, loss = Routed.apply(logits, routing, weights, waiting)`.

    weights: of the balance loss and the z-loss. waiting: has the gradient of the loss if a first forward recorded it.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, routing: Routing, weights: tuple[float, float], waiting: PendingGradient | None
    ) -> tuple[Tensor, Tensor]:
        ctx.call = routing, weights, waiting
        loss = weights[0] * routing.balance + weights[1] * routing.z
        return to_device_of(routing.gates, logits), torch.tensor(loss, device=logits.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_gates: Tensor, of_loss: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.is_spent = not torch._C._autograd._get_current_graph_task_keep_graph()
        routing, (balance, z), waiting = ctx.call
        by = float(of_loss) + (0.0 if waiting is None else waiting.take())
        gradient = routing.gradient(host_array(of_gates), balance * by, z * by)
        return to_device_of(gradient, of_gates), None, None, None


class DispatchFunction(Function):
    """Rows of tokens to experts: `rows, gates, plan, counts = Dispatched.apply(x, gates, exchange, ...)`.

    gates: from the routing, which sends its own arrays. between: this call of the layer, as for `CombineFunction`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, exchange: Dispatcher, between: BackwardGuard, routing: Routing
    ) -> tuple[Tensor, Tensor, Any, list[int]]:
        given = read(x)
        with use_device_streams():
            plan, rows, arrived, counts = exchange.dispatch(between.mixture.name, routing, given, routing.gates)
        ctx.call = exchange, between, plan
        return to_tensor(rows), to_tensor(arrived), plan, counts.tolist()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rows: Tensor, of_gates: Tensor, *_: Any) -> tuple[Tensor, Tensor, None, None, None]:
        exchange, between, plan = ctx.call
        rows, numbers = read(of_rows), read(of_gates)
        with use_device_streams():
            x, gates = exchange.dispatch_back(between.mixture.name, plan, rows, numbers)
        between.close()
        return to_tensor(x), to_tensor(gates), None, None, None


class CombineFunction(Function):
    """Rows of experts, times gates, back to tokens: `y = Combined.apply(rows, gates, exchange, between, plan)`."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, gates: Tensor, exchange: Dispatcher, between: BackwardGuard, plan: Any
    ) -> Tensor:
        rows = pack(rows)
        ctx.save_for_backward(rows, gates)
        ctx.call = exchange, between, plan
        given, by = core_array(rows), read(gates)
        with use_device_streams():
            return to_tensor(exchange.combine(between.mixture.name, plan, given, by))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        exchange, between, plan = ctx.call
        rows, gates = map(read, ctx.saved_tensors)
        given = read(gradient)
        with use_device_streams():
            arrived = exchange.combine_back(between.mixture.name, plan, given)
        between.open()
        with use_device_streams():
            of_gates = scale_gradients(arrived, rows, gates)
        return to_tensor(arrived), to_tensor(of_gates), None, None, None
