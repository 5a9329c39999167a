"""Nodes around the core's routing and exchange, with their gradients.

Each is one call of the host. What a node must know of an earlier one comes to it as a tensor of bytes, so that it does
not matter when a graph runs its nodes, or whether it runs the backward at all.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from commlib.dtypes import Array
from commlib.expert.mixture import Mixture
from commlib.expert.routing import Routing
from commlib.kernels.host.rows import multiply_rows
from commlib_tensorflow._bridge import as_tensor
from commlib_tensorflow._graph import Spec, call_in_order


class Sent(NamedTuple):
    """What came to the experts of this rank: rows [number, width], their gates, and how many each has.

    losses: balance and z. state: for `combined`.
    """

    rows: Any
    gates: Any
    counts: Any
    losses: Any
    state: Any


def sent(x: Any, logits: Any, mixture: Mixture, route: Callable[..., Routing], more: Sequence[Any]) -> Sent:
    """Send tokens [tokens, width] where the router's logits (float32) say. Collective, as its gradient is.

    route: makes the routing of an array of logits, and of arrays of `more`.
    """
    width = x.shape[-1]
    local = len(mixture.placement.of_rank(mixture.ranks.axis.rank))

    def forward(x: Array, logits: Array, *more: Array) -> Sequence[Array]:
        routing = route(logits, *more)
        passage, rows, gates, counts = mixture.exchange.dispatch(mixture.name, routing, x, routing.gates)
        state = np.frombuffer(pickle.dumps((routing, passage), pickle.HIGHEST_PROTOCOL), np.uint8)
        losses = np.array([routing.balance, routing.z], np.float32)
        return [rows, gates.copy(), counts.astype(np.int32), losses, state.copy()]

    def backward(state: Array, of_rows: Array, of_gates: Array, of_losses: Array) -> Sequence[Array]:
        routing, passage = pickle.loads(state.data)
        of_x, gates = mixture.exchange.dispatch_back(mixture.name, passage, of_rows, of_gates)
        return [of_x, routing.gradient(gates, float(of_losses[0]), float(of_losses[1]))]

    def sending(x: Any, logits: Any) -> tuple[tuple[Any, ...], Any]:
        specs = [
            Spec(x.dtype, (None, width)), Spec(tf.float32, (None,)), Spec(tf.int32, (local,)), Spec(tf.float32, (2,)),
            Spec(tf.uint8, (None,)),
        ]  # fmt: skip
        rows, gates, counts, losses, state = call_in_order("experts", forward, [x, logits, *more], specs)

        def gradient(of_rows: Any, of_gates: Any, of_counts: Any, of_losses: Any, of_state: Any) -> list[Any]:
            inputs = [state, as_tensor(of_rows), as_tensor(of_gates), as_tensor(of_losses)]
            return call_in_order("experts", backward, inputs, [Spec.like(x), Spec.like(logits)])

        return (rows, gates, counts, losses, state), gradient

    return Sent(*tf.custom_gradient(sending)(x, logits))


def combined(rows: Any, gates: Any, mixture: Mixture, state: Any, tokens: Any) -> Any:
    """Return for each token the sum of what experts made of it, times its gates. Collective, as its gradient is.

    tokens: what was sent, whose shape the result has.
    """
    def forward(rows: Array, gates: Array, state: Array) -> Sequence[Array]:
        return [mixture.exchange.combine(mixture.name, pickle.loads(state.data)[1], rows, gates)]

    def backward(gradient: Array, rows: Array, gates: Array, state: Array) -> Sequence[Array]:
        came = mixture.exchange.combine_back(mixture.name, pickle.loads(state.data)[1], gradient)
        of_gates = np.empty_like(gates)
        multiply_rows(came, rows, gates, came, of_gates)
        return [came, of_gates]

    def combining(rows: Any, gates: Any) -> tuple[Any, Any]:
        (found,) = call_in_order("experts", forward, [rows, gates, state], [Spec(rows.dtype, tokens.shape)])

        def gradient(of_found: Any) -> list[Any]:
            inputs = [as_tensor(of_found), rows, gates, state]
            return call_in_order("experts", backward, inputs, [Spec.like(rows), Spec.like(gates)])

        return found, gradient

    return tf.custom_gradient(combining)(rows, gates)
