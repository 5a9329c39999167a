"""Nodes around the core's routing and exchange, with their gradients.

Each is one call of the host. What a node must know of an earlier one comes to it as a tensor, so that it does not
matter when a graph runs its nodes, or whether it runs the backward at all. Rows on a GPU stay there, and so does the
passage of a call; logits, and what was routed, go to the host.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from commlib.devices.array import DeviceArray
from commlib.devices.copies import fetched
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.expert.device_passage import DevicePassage
from commlib.expert.flow import parts_of
from commlib.expert.mixture import Mixture
from commlib.expert.packed_passage import packed, unpacked
from commlib.expert.routing import Routing
from commlib.expert.scaled import scaled_back
from commlib_tensorflow._bridge import as_tensor
from commlib_tensorflow._graph import Spec, call_in_order, refuse_vectorized
from commlib_tensorflow._on_device import call_at
from commlib_tensorflow._placement import Place, place_of
from commlib_tensorflow.errors import as_tensorflows


class Sent(NamedTuple):
    """What came to the experts of this rank: rows [number, width], their gates, and how many each has.

    passage: for `combined`, bytes. losses: balance and z, where it was routed, too. place: of the rows.
    """

    rows: Any
    gates: Any
    counts: Any
    passage: Any
    losses: Any = None
    place: Place | None = None


def sent(x: Any, logits: Any, mixture: Mixture, route: Callable[..., Routing], more: Sequence[Any]) -> Sent:
    """Send tokens [tokens, width] where the router's logits (float32) say. Collective, as its gradient is.

    route: makes the routing of an array of logits, and of arrays of `more`.
    """
    refuse_vectorized()
    place = place_of([x])
    width = x.shape[-1]
    local = len(mixture.placement.of_rank(mixture.ranks.axis.rank))
    given = [x, logits, *(_wide(tensor, place) for tensor in more)]

    def forward(x: Any, logits: Array, *more: Array) -> Sequence[Any]:
        routing = route(logits, *more)
        passage, rows, gates, counts = mixture.exchange.dispatch(mixture.name, routing, x, routing.gates)
        losses = np.array([routing.balance, routing.z], np.float32)
        return [rows, gates.copy(), counts.astype(_NUMBERS), _closed(passage), losses, _packed(routing)]

    def backward(passage: Any, state: Array, of_rows: Any, of_gates: Any, of_losses: Array) -> Sequence[Any]:
        of_x, gates = mixture.exchange.dispatch_back(mixture.name, _opened(passage, mixture), of_rows, of_gates)
        routing: Routing = pickle.loads(state.data)
        on_host = fetched(gates, mixture.ranks.axis.comm.watch(f"gradients of gates of {mixture.name}"))
        return [of_x, routing.gradient(on_host, float(of_losses[0]), float(of_losses[1]))]

    def sending(x: Any, logits: Any) -> tuple[tuple[Any, ...], Any]:
        specs = [
            Spec(x.dtype, (None, width)), Spec(tf.float32, (None,)), Spec(tf.int64, (local,)), _PASSAGE,
            Spec(tf.float32, (2,)), _STATE,
        ]  # fmt: skip
        *found, state = call_at(place, "experts", forward, [x, logits, *given[2:]], specs, host=range(1, len(given)))
        passage = found[3]

        def gradient(of_rows: Any, of_gates: Any, of_counts: Any, of_passage: Any, of_losses: Any) -> Any:
            specs = [Spec.like(x), Spec.like(logits)]
            return _once(place, backward, [passage, state], [of_rows, of_gates, of_losses], specs, host=(1, 4))

        return tuple(found), gradient

    return Sent(*tf.custom_gradient(sending)(x, logits))._replace(place=place)


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
    refuse_vectorized()

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
            return _once(None, backward, [found[-1]], [of_gates, of_losses], [Spec.like(logits)])

        return tuple(found), gradient

    return Routed(*tf.custom_gradient(routing)(logits))


def dispatched(x: Any, gates: Any, mixture: Mixture, part: int, state: Any) -> Sent:
    """Send one part of what was routed: its tokens, and the gates of its assignments. Collective, as its gradient."""
    place = place_of([x])
    width = x.shape[-1]
    local = len(mixture.placement.of_rank(mixture.ranks.axis.rank))

    def forward(x: Any, gates: Array, state: Array) -> Sequence[Any]:
        own = pickle.loads(state.data)[1][part]
        passage, rows, came, counts = mixture.exchange.dispatch(mixture.name, own, x, gates)
        return [rows, came.copy(), counts.astype(_NUMBERS), _closed(passage)]

    def backward(passage: Any, of_rows: Any, of_gates: Any) -> Sequence[Any]:
        return list(mixture.exchange.dispatch_back(mixture.name, _opened(passage, mixture), of_rows, of_gates))

    def sending(x: Any, gates: Any) -> tuple[tuple[Any, ...], Any]:
        specs = [Spec(x.dtype, (None, width)), Spec(tf.float32, (None,)), Spec(tf.int64, (local,)), _PASSAGE]
        found = call_at(place, "experts", forward, [x, gates, state], specs, host=(1, 2))

        def gradient(of_rows: Any, of_gates: Any, *_: Any) -> Any:
            return _once(place, backward, [found[-1]], [of_rows, of_gates], [Spec.like(x), Spec.like(gates)])

        return tuple(found), gradient

    return Sent(*tf.custom_gradient(sending)(x, gates))._replace(place=place)


def combined(rows: Any, mixture: Mixture, came: Sent, tokens: Any) -> Any:
    """Return for each token the sum of what experts made of it, times its gates. Collective, as its gradient is.

    rows: what experts made of those that came. tokens: what was sent, whose shape the result has.
    """
    place, passage = came.place, came.passage

    def forward(rows: Any, gates: Any, passage: Any) -> Sequence[Any]:
        return [mixture.exchange.combine(mixture.name, _opened(passage, mixture), rows, gates)]

    def backward(passage: Any, gradient: Any, rows: Any, gates: Any) -> Sequence[Any]:
        came = mixture.exchange.combine_back(mixture.name, _opened(passage, mixture), gradient)
        return [came, scaled_back(came, rows, gates)]

    def combining(rows: Any, gates: Any) -> tuple[Any, Any]:
        (found,) = call_at(place, "experts", forward, [rows, gates, passage], [Spec(rows.dtype, tokens.shape)])

        def gradient(of_found: Any) -> Any:
            specs = [Spec.like(rows), Spec.like(gates)]
            return _once(place, backward, [passage], [of_found, rows, gates], specs)

        return found, gradient

    return tf.custom_gradient(combining)(rows, came.gates)


def _once(
    place: Place | None,
    function: Any,
    told: Sequence[Any],
    gradients: Sequence[Any],
    specs: Sequence[Spec],
    *,
    host: tuple[int, ...] = (),
) -> Any:
    """Return what a function makes of gradients (see `call_at`), and raise where somebody wants the gradient of that.

    What travels in it has no gradient that TensorFlow would know of, and it would leave it out without a word.
    """

    def node(*inputs: Any) -> tuple[Any, Any]:
        found = call_at(place, "experts", function, [*told, *inputs], specs, host=host)
        return found[0] if len(found) == 1 else found, _refuse

    return tf.custom_gradient(node)(*map(as_tensor, gradients))


def _refuse(*gradients: Any) -> Any:
    raise as_tensorflows(UsageError("a mixture of experts has no gradients of gradients"))


def _wide(tensor: Any, place: Place | None) -> Any:
    """Return a tensor as a node at a place may have it: see `fits`."""
    return tensor if place is None or tensor.dtype != tf.int32 else tf.cast(tensor, tf.int64)


def _closed(passage: Any) -> Any:
    """Return a passage as bytes, on the device where it is."""
    return packed(passage) if type(passage) is DevicePassage else passage.view(np.uint8)


def _opened(passage: Any, mixture: Mixture) -> Any:
    """Undo `_closed`."""
    if type(passage) is not DeviceArray:
        return passage.view(np.int32)
    comm = mixture.ranks.axis.comm
    return unpacked(passage, comm.size, comm.watch(f"the passage of {mixture.name}"))


def _packed(state: Any) -> Array:
    return np.frombuffer(pickle.dumps(state, pickle.HIGHEST_PROTOCOL), np.uint8).copy()


_PASSAGE, _STATE, _NUMBERS = Spec(tf.uint8, (None,)), Spec(tf.uint8, (None,)), np.int64
