"""Reductions of gradients in a graph: a host node takes gradients as soon as they exist, while backward continues.

    gradients of the last variables -> give 0 --+
    gradients of earlier ones       -> give 1 --+-> end -> reduced gradients

A traced function runs its stateful nodes in the order in which they were made: a node whose gradients come late blocks
those behind it. So the nodes are made in the order in which backward makes gradients, which the graph shows.

If variables are on a GPU, gradients stay on it: buckets are GPU memory, and results are tensors over their slots, or
for sparse ones over the gathered arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.data_parallel.options import Gradient, Options
from commlib.devices.copies import copy_to_device
from commlib.named_gradients.gradients import CallSpec, GradientCall, NamedGradients
from commlib_tensorflow._bridge import dtype_name
from commlib_tensorflow._device_calls import array_of
from commlib_tensorflow._gradient_tensors import (
    OptionalGradient,
    decode_gradient,
    describe_gradients,
    device_tensors,
    dtype_of_result,
    encode_gradient,
    own_array,
    place_of_gradients,
)
from commlib_tensorflow._host_calls import Spec, call, call_on_device_of, is_ordered, result_empty
from commlib_tensorflow.devices import settle, tensors_over, use_device_stream


class GraphCall(GradientCall):
    """One call in a graph; each run of its nodes is a run of it.

    given_if: boolean tensors for some of the gradients, which count as None when False. options: of the wire.
    """

    def __init__(
        self,
        gradients: NamedGradients,
        spec: CallSpec,
        given: Sequence[Any],
        like: Sequence[Any],
        given_if: Mapping[int, Any],
        options: Options,
    ) -> None:
        super().__init__(gradients, spec)
        self._options = options
        self._place = place_of_gradients(like)
        """The device of the gradients; None for the host."""
        self._dense, self._sparse = spec.dense, spec.sparse
        self._given, self._like, self._given_if = given, like, dict(given_if)
        strict = spec.strict if not isinstance(spec.strict, bool) else ()
        self._absent = [index for index, one in enumerate(given) if one is None and index not in strict]
        self._maybe = self._absent + list(given_if)
        """Numbers of gradients whose results exist only if any rank has them."""
        self._shapes: tuple[Any, ...] = ()
        self._kinds: tuple[Gradient, ...] = ()

    def run(self) -> list[Any]:
        """Return the reduced gradients."""
        given = self._given
        messages = {index: encode_gradient(given[index], self._options) for index in self._dense}
        slices: list[Any] = []
        specs = [Spec.like(messages[index]) for index in self._dense]
        for index in self._sparse:
            slices += [tf.cast(given[index].indices, tf.int64), given[index].values]
            specs += map(Spec.rows_of, slices[-2:])
        specs += [Spec(self._wire_dtype(index), self._like[index].shape) for index in self._absent]
        specs += [Spec(tf.bool, ())] * len(self._maybe)
        if not specs:  # nothing but None, but TensorFlow needs an output
            specs = [Spec(tf.int64, ())]
        nodes = self._nodes(messages)
        if len(nodes) > 1:
            answers = self._called(self._end, 0, [*slices, *self._gives(messages, nodes)], specs)
        else:
            dense = [messages[index] for index in self._dense]
            conditions = list(self._given_if.values())
            answers = self._called(self._all_at_once, len(dense), [*dense, *conditions, *slices], specs)
        results: list[Any] = [None] * len(given)
        remaining = iter(answers)
        for index in self._dense:
            results[index] = self._decode(index, next(remaining))
        for index in self._sparse:
            indices, values = next(remaining), next(remaining)
            indices = tf.cast(indices, given[index].indices.dtype)
            results[index] = tf.IndexedSlices(values, indices, given[index].dense_shape)
        for index in self._absent:
            results[index] = self._decode(index, next(remaining))
        for index in self._maybe:
            results[index] = OptionalGradient(results[index], next(remaining))
        return results

    # While the graph is made

    def _called(
        self, function: Callable[..., list[Any]], dense: int, inputs: Sequence[Any], specs: Sequence[Spec]
    ) -> list[Any]:
        """Call a host function on the gradients' device. The first `dense` inputs are dense gradients."""
        place = self._place
        if place is None:
            return call(function, inputs, specs)

        def there(*tensors: Any) -> list[Any]:
            with use_device_stream(place.device):
                return function(*map(array_of, tensors[:dense]), *tensors[dense:])

        return call_on_device_of(place.where, there, inputs, specs)

    def _wire_dtype(self, index: int) -> Any:
        dtype = self._dtype(index)
        wire = tf.as_dtype(self._options.wire_dtype(dtype_name(dtype.real_dtype)))
        return dtype if dtype.is_complex else wire

    def _decode(self, index: int, tensor: Any) -> Any:
        return decode_gradient(tensor, self._dtype(index), self._options)

    def _dtype(self, index: int) -> Any:
        return dtype_of_result(self._given[index], self._like[index])

    def _nodes(self, messages: Mapping[int, Any]) -> Sequence[Sequence[int]]:
        """Return the gradients for each node that takes some; a single node if all are taken at the end."""
        if self._given_if or not all(tensor.shape.is_fully_defined() for tensor in messages.values()):
            return [self._dense]
        self._kinds = self._describe({index: (tensor.dtype, tensor.shape) for index, tensor in messages.items()})
        return self._gradients.launches(self._kinds, self.spec)

    def _gives(self, messages: Mapping[int, Any], nodes: Sequence[Sequence[int]]) -> list[Any]:
        """Make nodes that take gradients; return tensors that order the `end` node after them."""

        def giving(members: Sequence[int], begins: Any) -> Callable[..., list[Any]]:
            def give(*arrays: Any) -> list[Any]:
                self.give(members, arrays[: len(members)], begins)
                return [np.zeros((), np.int64)]

            return give

        token = [Spec(tf.int64, ())]
        # Without node order, a separate node begins first; otherwise the first node begins.
        first = [] if is_ordered() else call(giving([], self._kinds), [], token)
        tokens: list[Any] = []
        for members in nodes:
            begins = self._kinds if not tokens and not first else None
            given = [messages[index] for index in members]
            tokens += self._called(giving(members, begins), len(given), [*given, *first], token)
        return tokens

    def _describe(self, sent: Mapping[int, tuple[Any, Any]]) -> tuple[Gradient, ...]:
        return describe_gradients(self.spec, sent, self._like, self._place)

    # On the host

    def begin(self, kinds: Sequence[Gradient], *, eager: bool) -> None:
        """Start a run; TensorFlow no longer reads released slots afterwards."""
        super().begin(tuple(kinds), eager=eager)
        if self._place is not None:
            settle(self._place.where)

    def _all_at_once(self, *arrays: Any) -> list[Any]:
        count = len(self._dense)
        conditions = dict(zip(self._given_if, arrays[count:], strict=False))
        arrays = (*arrays[:count], *arrays[count + len(conditions) :])
        shapes = tuple(array.shape for array in arrays)
        if shapes != self._shapes or not self._kinds:
            sent = {i: (array.dtype, array.shape) for i, array in zip(self._dense, arrays[:count], strict=True)}
            sent |= {i: (rows.dtype, rows.shape) for i, rows in zip(self._sparse, arrays[count + 1 :: 2], strict=True)}
            self._shapes, self._kinds = shapes, self._describe(sent)
        there = [place for place, index in enumerate(self._dense) if bool(conditions.get(index, True))]
        members = [self._dense[place] for place in there]
        rows = self._rows(arrays[count:])
        return self._answers(self.reduce(self._kinds, members, [arrays[place] for place in there], rows))

    def _end(self, *slices: Any) -> list[Any]:
        return self._answers(self.end(self._rows(slices)))

    def _rows(self, slices: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Return sparse gradients as (indices, rows); later inputs are tokens of earlier nodes."""
        flat = slices[: 2 * len(self._sparse)]
        rows = flat if self._place is None else list(map(array_of, flat))
        return list(zip(rows[::2], rows[1::2], strict=True))

    def _answers(self, results: dict[int, Any]) -> list[Any]:
        """Return the outputs of the last node, for reduced gradients by number."""
        exist = [np.asarray(index in results) for index in self._maybe]
        for index in self._maybe:
            if index not in results:
                results[index] = self._zeros(index)
        gathered = [array for index in self._sparse for array in results[index]]
        answers = [
            *self._own(results, self._dense),
            *(gathered if self._place is None else tensors_over(gathered)),
            *self._own(results, self._absent),
            *exist,
        ]
        return answers or [np.zeros((), np.int64)]

    def _zeros(self, index: int) -> Any:
        """Return zeros for a missing result, in the dtype and place of a reducer's result."""
        kind = self.kinds[index]
        zeros = result_empty(kind.shape, self._options.wire_dtype(kind.dtype))
        zeros[...] = 0
        return zeros if self._place is None else copy_to_device(zeros, kind.place)

    def _own(self, results: Mapping[int, Any], members: Sequence[int]) -> list[Any]:
        """Return results in a form that TensorFlow may adopt."""
        pairs = [(results[index], self._dtype(index)) for index in members]
        if self._place is None:
            return [own_array(array, dtype, eager=False) for array, dtype in pairs]
        return device_tensors(pairs)


def order_of(given: Sequence[Any]) -> list[int]:
    """Return the numbers of gradients in the order of backward: in a graph as its nodes are ordered, else reversed."""
    numbers = range(len(given) - 1, -1, -1)
    if tf.executing_eagerly():
        return list(numbers)
    graph = tf.compat.v1.get_default_graph()
    order = {operation: place for place, operation in enumerate(graph.get_operations())}

    def place(index: int) -> int:
        gradient = given[index]
        if gradient is None or isinstance(gradient, tf.IndexedSlices):
            return len(order)  # last, when all others exist
        return 0 if gradient.op.type == "Placeholder" else order.get(gradient.op, 0)

    return sorted(numbers, key=place)
