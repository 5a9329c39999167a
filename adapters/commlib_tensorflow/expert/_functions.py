"""Nodes around the core's routing and exchange, with their gradients.

Each is one call of the host. What a node must know of an earlier one comes to it as a tensor, so that it does not
matter when a graph runs its nodes, or whether it runs the backward at all.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.expert.flow import parts_of
from commlib.expert.mixture import Mixture
from commlib.expert.routing import Routing
from commlib.kernels.host.rows import multiply_rows
from commlib_tensorflow._bridge import as_tensor
from commlib_tensorflow._graph import Spec, call_in_order
from commlib_tensorflow.errors import as_tensorflows


class Sent(NamedTuple):
    """What came to the experts of this rank: rows [number, width], their gates, and how many each has.

    passage: for `combined`. losses: balance and z, where it was routed, too.
    """

    rows: Any
    gates: Any
    counts: Any
    passage: Any
    losses: Any = None


def sent(x: Any, logits: Any, mixture: Mixture, route: Callable[..., Routing], more: Sequence[Any]) -> Sent:
    """Send tokens [tokens, width] where the router's logits (float32) say. Collective, as its gradient is.

    route: makes the routing of an array of logits, and of arrays of `more`.
    """
    width = x.shape[-1]
    local = len(mixture.placement.of_rank(mixture.ranks.axis.rank))

    def forward(x: Array, logits: Array, *more: Array) -> Sequence[Array]:
        routing = route(logits, *more)
        passage, rows, gates, counts = mixture.exchange.dispatch(mixture.name, routing, x, routing.gates)
        losses = np.array([routing.balance, routing.z], np.float32)
        return [rows, gates.copy(), counts.astype(np.int32), passage, losses, _packed(routing)]

    def backward(passage: Array, state: Array, of_rows: Array, of_gates: Array, of_losses: Array) -> Sequence[Array]:
        of_x, gates = mixture.exchange.dispatch_back(mixture.name, passage, of_rows, of_gates)
        routing: Routing = pickle.loads(state.data)
        return [of_x, routing.gradient(gates, float(of_losses[0]), float(of_losses[1]))]

    def sending(x: Any, logits: Any) -> tuple[tuple[Any, ...], Any]:
        specs = [
            Spec(x.dtype, (None, width)), Spec(tf.float32, (None,)), Spec(tf.int32, (local,)), _PASSAGE,
            Spec(tf.float32, (2,)), _STATE,
        ]  # fmt: skip
        *found, state = call_in_order("experts", forward, [x, logits, *more], specs)
        passage = found[3]

        def gradient(of_rows: Any, of_gates: Any, of_counts: Any, of_passage: Any, of_losses: Any) -> Any:
            specs = [Spec.like(x), Spec.like(logits)]
            return _once(backward, [passage, state], [of_rows, of_gates, of_losses], specs)

        return tuple(found), gradient

    return Sent(*tf.custom_gradient(sending)(x, logits))


class Routed(NamedTuple):
    """Where tokens go, in several parts. gates: of assignments, part by part. losses: balance and z.

    tokens, assignments: how many each part has. state: for `dispatched`.
    """

    gates: Any
    losses: Any
    tokens: Any
    assignments: Any
    state: Any


def routed(logits: Any, parts: int, route: Callable[..., Routing], more: Sequence[Any]) -> Routed:
    """Route tokens by their logits (float32), and cut them into parts. route: as for `sent`."""

    def forward(logits: Array, *more: Array) -> Sequence[Array]:
        routing = route(logits, *more)
        cut = parts_of(routing, parts)
        order = np.concatenate([part.places for part in cut])
        losses = np.array([routing.balance, routing.z], np.float32)
        lengths = [
            np.array(each, np.int32) for each in zip(*((p.last - p.first, len(p.places)) for p in cut), strict=True)
        ]
        return [routing.gates[order], losses, *lengths, _packed((routing, cut, order))]

    def backward(state: Array, of_gates: Array, of_losses: Array) -> Sequence[Array]:
        routing, _, order = pickle.loads(state.data)
        gates = np.empty_like(of_gates)
        gates[order] = of_gates
        return [routing.gradient(gates, float(of_losses[0]), float(of_losses[1]))]

    def routing(logits: Any) -> tuple[tuple[Any, ...], Any]:
        lengths = Spec(tf.int32, (parts,))
        specs = [Spec(tf.float32, (None,)), Spec(tf.float32, (2,)), lengths, lengths, Spec(tf.uint8, (None,))]
        found = call_in_order("experts", forward, [logits, *more], specs)

        def gradient(of_gates: Any, of_losses: Any, *_: Any) -> Any:
            return _once(backward, [found[-1]], [of_gates, of_losses], [Spec.like(logits)])

        return tuple(found), gradient

    return Routed(*tf.custom_gradient(routing)(logits))


def dispatched(x: Any, gates: Any, mixture: Mixture, part: int, state: Any) -> Sent:
    """Send one part of what was routed: its tokens, and the gates of its assignments. Collective, as its gradient."""
    width = x.shape[-1]
    local = len(mixture.placement.of_rank(mixture.ranks.axis.rank))

    def forward(x: Array, gates: Array, state: Array) -> Sequence[Array]:
        own = pickle.loads(state.data)[1][part]
        passage, rows, came, counts = mixture.exchange.dispatch(mixture.name, own, x, gates)
        return [rows, came.copy(), counts.astype(np.int32), passage]

    def backward(passage: Array, of_rows: Array, of_gates: Array) -> Sequence[Array]:
        return list(mixture.exchange.dispatch_back(mixture.name, passage, of_rows, of_gates))

    def sending(x: Any, gates: Any) -> tuple[tuple[Any, ...], Any]:
        specs = [Spec(x.dtype, (None, width)), Spec(tf.float32, (None,)), Spec(tf.int32, (local,)), _PASSAGE]
        found = call_in_order("experts", forward, [x, gates, state], specs)

        def gradient(of_rows: Any, of_gates: Any, *_: Any) -> Any:
            return _once(backward, [found[-1]], [of_rows, of_gates], [Spec.like(x), Spec.like(gates)])

        return tuple(found), gradient

    return Sent(*tf.custom_gradient(sending)(x, gates))


def combined(rows: Any, gates: Any, mixture: Mixture, passage: Any, tokens: Any) -> Any:
    """Return for each token the sum of what experts made of it, times its gates. Collective, as its gradient is.

    tokens: what was sent, whose shape the result has.
    """

    def forward(rows: Array, gates: Array, passage: Array) -> Sequence[Array]:
        return [mixture.exchange.combine(mixture.name, passage, rows, gates)]

    def backward(passage: Array, gradient: Array, rows: Array, gates: Array) -> Sequence[Array]:
        came = mixture.exchange.combine_back(mixture.name, passage, gradient)
        of_gates = np.empty_like(gates)
        multiply_rows(came, rows, gates, came, of_gates)
        return [came, of_gates]

    def combining(rows: Any, gates: Any) -> tuple[Any, Any]:
        (found,) = call_in_order("experts", forward, [rows, gates, passage], [Spec(rows.dtype, tokens.shape)])

        def gradient(of_found: Any) -> Any:
            specs = [Spec.like(rows), Spec.like(gates)]
            return _once(backward, [passage], [of_found, rows, gates], specs)

        return found, gradient

    return tf.custom_gradient(combining)(rows, gates)


def _once(host: Any, told: Sequence[Any], gradients: Sequence[Any], specs: Sequence[Spec]) -> Any:
    """Return what `host` makes of gradients, and raise where somebody wants the gradient of that.

    What travels in it has no gradient that TensorFlow would know of, and it would leave it out without a word.
    """

    def node(*inputs: Any) -> tuple[Any, Any]:
        found = call_in_order("experts", host, [*told, *inputs], specs)
        return found[0] if len(found) == 1 else found, _refuse

    return tf.custom_gradient(node)(*map(as_tensor, gradients))


def _refuse(*gradients: Any) -> Any:
    raise as_tensorflows(UsageError("a mixture of experts has no gradients of gradients"))


def _packed(state: Any) -> Array:
    return np.frombuffer(pickle.dumps(state, pickle.HIGHEST_PROTOCOL), np.uint8).copy()


_PASSAGE, _STATE = Spec(tf.int32, (None,)), Spec(tf.uint8, (None,))
