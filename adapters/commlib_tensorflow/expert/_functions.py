"""Nodes around the core's routing and dispatch, with their gradients.

Each is one host call. State that a node needs from an earlier one arrives as a tensor, so it does not matter when a
graph runs its nodes, or whether it runs the backward at all. Rows on a GPU stay there, and so does the dispatch plan of
a call; logits and the routing are on the host.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from commlib.devices.array import DeviceArray
from commlib.devices.copies import copy_to_host
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.expert.chunked_dispatch import split_tokens
from commlib.expert.device_plan import DeviceDispatchPlan, pack_device_plan, unpack_device_plan
from commlib.expert.mixture import Mixture
from commlib.expert.routing import Routing
from commlib.expert.scaled_gradients import scale_gradients
from commlib_tensorflow._bridge import as_tensor
from commlib_tensorflow._device_calls import call_at
from commlib_tensorflow._host_calls import Spec, call_in_order, refuse_vectorized
from commlib_tensorflow._placement import DevicePlace, place_of
from commlib_tensorflow.errors import as_tensorflows


class DispatchedTokens(NamedTuple):
    """Tokens for the experts of this rank: rows [number, width], their gates, and the count of each expert.

    plan: the dispatch plan for `combine_tokens`, as bytes. losses: balance and z, if it was routed, too. place: of
    the rows.
    """

    rows: Any
    gates: Any
    counts: Any
    plan: Any
    losses: Any = None
    place: DevicePlace | None = None


def route_and_dispatch(
    x: Any, logits: Any, mixture: Mixture, route: Callable[..., Routing], more: Sequence[Any]
) -> DispatchedTokens:
    """Send tokens [tokens, width] to the experts that the router's logits (float32) choose.

    Collective, with its gradient.

    route: computes the routing from an array of logits, and arrays of `more`.
    """
    refuse_vectorized()
    place = place_of([x])
    width = x.shape[-1]
    local = len(mixture.placement.of_rank(mixture.ranks.axis.rank))
    given = [x, logits, *(_widen(tensor, place) for tensor in more)]

    def forward(x: Any, logits: Array, *more: Array) -> Sequence[Any]:
        routing = route(logits, *more)
        plan, rows, gates, counts = mixture.exchange.dispatch(mixture.name, routing, x, routing.gates)
        losses = np.array([routing.balance, routing.z], np.float32)
        return [rows, gates.copy(), counts.astype(_NUMBERS), _pack_plan(plan), losses, _pickle(routing)]

    def backward(plan: Any, state: Array, of_rows: Any, of_gates: Any, of_losses: Array) -> Sequence[Any]:
        of_x, gates = mixture.exchange.dispatch_back(mixture.name, _unpack_plan(plan, mixture), of_rows, of_gates)
        routing: Routing = pickle.loads(state.data)
        on_host = copy_to_host(gates, mixture.ranks.axis.comm.watch(f"gradients of gates of {mixture.name}"))
        return [of_x, routing.gradient(on_host, float(of_losses[0]), float(of_losses[1]))]

    def sending(x: Any, logits: Any) -> tuple[tuple[Any, ...], Any]:
        specs = [
            Spec(x.dtype, (None, width)), Spec(tf.float32, (None,)), Spec(tf.int64, (local,)), _PASSAGE,
            Spec(tf.float32, (2,)), _STATE,
        ]  # fmt: skip
        *outputs, state = call_at(place, "experts", forward, [x, logits, *given[2:]], specs, host=range(1, len(given)))
        plan = outputs[3]

        def gradient(of_rows: Any, of_gates: Any, of_counts: Any, of_passage: Any, of_losses: Any) -> Any:
            specs = [Spec.like(x), Spec.like(logits)]
            return _differentiate_once(
                place, backward, [plan, state], [of_rows, of_gates, of_losses], specs, host=(1, 4)
            )

        return tuple(outputs), gradient

    return DispatchedTokens(*tf.custom_gradient(sending)(x, logits))._replace(place=place)


class RoutedTokens(NamedTuple):
    """Routing of tokens in several chunks. gates: of assignments, chunk by chunk. losses: balance and z.

    tokens, assignments: the number in each chunk. state: for `dispatch_tokens`.
    """

    gates: Any
    losses: Any
    tokens: Any
    assignments: Any
    state: Any


def route_tokens(logits: Any, parts: int, route: Callable[..., Routing], more: Sequence[Any]) -> RoutedTokens:
    """Route tokens by their logits (float32), and split them into `parts` chunks.

    route: as for `route_and_dispatch`.
    """
    refuse_vectorized()

    def forward(logits: Array, *more: Array) -> Sequence[Array]:
        routing = route(logits, *more)
        cut = split_tokens(routing, parts)
        order = np.concatenate([part.places for part in cut])
        losses = np.array([routing.balance, routing.z], np.float32)
        lengths = [
            np.array(each, np.int32) for each in zip(*((p.last - p.first, len(p.places)) for p in cut), strict=True)
        ]
        return [routing.gates[order], losses, *lengths, _pickle((routing, cut, order))]

    def backward(state: Array, of_gates: Array, of_losses: Array) -> Sequence[Array]:
        routing, _, order = pickle.loads(state.data)
        gates = np.empty_like(of_gates)
        gates[order] = of_gates
        return [routing.gradient(gates, float(of_losses[0]), float(of_losses[1]))]

    def routing(logits: Any) -> tuple[tuple[Any, ...], Any]:
        lengths = Spec(tf.int32, (parts,))
        specs = [Spec(tf.float32, (None,)), Spec(tf.float32, (2,)), lengths, lengths, Spec(tf.uint8, (None,))]
        outputs = call_in_order("experts", forward, [logits, *more], specs)

        def gradient(of_gates: Any, of_losses: Any, *_: Any) -> Any:
            return _differentiate_once(None, backward, [outputs[-1]], [of_gates, of_losses], [Spec.like(logits)])

        return tuple(outputs), gradient

    return RoutedTokens(*tf.custom_gradient(routing)(logits))


def dispatch_tokens(x: Any, gates: Any, mixture: Mixture, part: int, state: Any) -> DispatchedTokens:
    """Send one chunk of routed tokens, and the gates of its assignments. Collective, with its gradient."""
    place = place_of([x])
    width = x.shape[-1]
    local = len(mixture.placement.of_rank(mixture.ranks.axis.rank))

    def forward(x: Any, gates: Array, state: Array) -> Sequence[Any]:
        own = pickle.loads(state.data)[1][part]
        plan, rows, arrived, counts = mixture.exchange.dispatch(mixture.name, own, x, gates)
        return [rows, arrived.copy(), counts.astype(_NUMBERS), _pack_plan(plan)]

    def backward(plan: Any, of_rows: Any, of_gates: Any) -> Sequence[Any]:
        return list(mixture.exchange.dispatch_back(mixture.name, _unpack_plan(plan, mixture), of_rows, of_gates))

    def sending(x: Any, gates: Any) -> tuple[tuple[Any, ...], Any]:
        specs = [Spec(x.dtype, (None, width)), Spec(tf.float32, (None,)), Spec(tf.int64, (local,)), _PASSAGE]
        outputs = call_at(place, "experts", forward, [x, gates, state], specs, host=(1, 2))

        def gradient(of_rows: Any, of_gates: Any, *_: Any) -> Any:
            return _differentiate_once(
                place, backward, [outputs[-1]], [of_rows, of_gates], [Spec.like(x), Spec.like(gates)]
            )

        return tuple(outputs), gradient

    return DispatchedTokens(*tf.custom_gradient(sending)(x, gates))._replace(place=place)


def combine_tokens(rows: Any, mixture: Mixture, arrived: DispatchedTokens, tokens: Any) -> Any:
    """Return for each token the sum of its experts' outputs times its gates. Collective, with its gradient.

    rows: the outputs of this rank's experts. tokens: the sent tokens, whose shape the result has.
    """
    place, plan = arrived.place, arrived.plan

    def forward(rows: Any, gates: Any, plan: Any) -> Sequence[Any]:
        return [mixture.exchange.combine(mixture.name, _unpack_plan(plan, mixture), rows, gates)]

    def backward(plan: Any, gradient: Any, rows: Any, gates: Any) -> Sequence[Any]:
        arrived = mixture.exchange.combine_back(mixture.name, _unpack_plan(plan, mixture), gradient)
        return [arrived, scale_gradients(arrived, rows, gates)]

    def combining(rows: Any, gates: Any) -> tuple[Any, Any]:
        (combined,) = call_at(place, "experts", forward, [rows, gates, plan], [Spec(rows.dtype, tokens.shape)])

        def gradient(of_combined: Any) -> Any:
            specs = [Spec.like(rows), Spec.like(gates)]
            return _differentiate_once(place, backward, [plan], [of_combined, rows, gates], specs)

        return combined, gradient

    return tf.custom_gradient(combining)(rows, arrived.gates)


def _differentiate_once(
    place: DevicePlace | None,
    function: Any,
    leading: Sequence[Any],
    gradients: Sequence[Any],
    specs: Sequence[Spec],
    *,
    host: tuple[int, ...] = (),
) -> Any:
    """Apply a function to gradients (see `call_at`), and raise if a second-order gradient is requested.

    TensorFlow sees no gradient of the exchange, and would silently drop the second derivative.
    """

    def node(*inputs: Any) -> tuple[Any, Any]:
        results = call_at(place, "experts", function, [*leading, *inputs], specs, host=host)
        return results[0] if len(results) == 1 else results, _refuse

    return tf.custom_gradient(node)(*map(as_tensor, gradients))


def _refuse(*gradients: Any) -> Any:
    raise as_tensorflows(UsageError("a mixture of experts has no gradients of gradients"))


def _widen(tensor: Any, place: DevicePlace | None) -> Any:
    """Return a tensor in a dtype that a node at a place supports: see `fits`."""
    return tensor if place is None or tensor.dtype != tf.int32 else tf.cast(tensor, tf.int64)


def _pack_plan(plan: Any) -> Any:
    """Return a dispatch plan as bytes, on its device."""
    return pack_device_plan(plan) if type(plan) is DeviceDispatchPlan else plan.view(np.uint8)


def _unpack_plan(plan: Any, mixture: Mixture) -> Any:
    """Convert bytes back to a dispatch plan."""
    if type(plan) is not DeviceArray:
        return plan.view(np.int32)
    comm = mixture.ranks.axis.comm
    return unpack_device_plan(plan, comm.size, comm.watch(f"the dispatch plan of {mixture.name}"))


def _pickle(state: Any) -> Array:
    return np.frombuffer(pickle.dumps(state, pickle.HIGHEST_PROTOCOL), np.uint8).copy()


_PASSAGE, _STATE, _NUMBERS = Spec(tf.uint8, (None,)), Spec(tf.uint8, (None,)), np.int64
