"""Reduction of the gradients of many variables, for `DistributedGradientTape` and the optimizers.

Dense gradients go into buckets; sparse ones (tf.IndexedSlices) are gathered. In a graph a host node takes gradients as
soon as they exist, while backward continues:

    gradients of the last variables -> give 0 --+
    gradients of earlier ones       -> give 1 --+-> end -> reduced gradients

A traced function runs its stateful nodes in the order in which they were made: a node whose gradients come late blocks
those behind it. So the nodes are made in the order in which backward makes gradients, which the graph shows.

If variables are on a GPU, gradients stay on it: buckets are GPU memory, and results are tensors over their slots, or
for sparse ones over the gathered arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import commlib
from commlib import horovod as core
from commlib.buffers.aligned_arrays import aligned_empty
from commlib.compress.casts import Compressing
from commlib.compress.choice import CompressionChoice
from commlib.data_parallel.buckets import BUCKET_CAP_MIB, FIRST_BUCKET_MIB
from commlib.data_parallel.groups import read_groups
from commlib.data_parallel.options import Gradient, Options
from commlib.devices.array import DeviceArray
from commlib.devices.copies import copy_to_device
from commlib.dtypes import numpy_dtype
from commlib.errors import UsageError
from commlib.group.overlap import cores_per_rank
from commlib.horovod.mesh_sets import process_set_along
from commlib.named_gradients.gradients import CallSpec, GradientCall, NamedGradients
from commlib.sharding.shard_replicas import axes_of_data, mesh_of
from commlib.sharding.shards import check_same_shard
from commlib_tensorflow._bridge import Array, as_tensor, dtype_name
from commlib_tensorflow._device_calls import array_of
from commlib_tensorflow._host_calls import Spec, call, call_on_device_of, is_ordered, no_autograph, result_empty
from commlib_tensorflow._placement import DevicePlace, fits, place_of
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow.compression import Compression
from commlib_tensorflow.devices import settle, tensors_over, use_device_stream
from commlib_tensorflow.named_verbs.operations import grouped_allreduce

Groups = int | Sequence[Sequence[str]] | None


class OptionalGradient(NamedTuple):
    """A reduced gradient that is None on this rank, in a graph: only the run shows whether another rank has one."""

    value: Any
    """Zeros if no rank has one."""
    exists: Any
    """A bool, or a tensor of one."""


class GradientsByName(NamedGradients):
    """Reduction of gradients over the ranks of a process set. Calls are collective, under operations named `name`.

    op is that of `allreduce`, and so may compression be. compression may also be a name such as "int8" or
    "powersgd:rank=4", or a codec or scheme of `commlib.compress`: then buckets are compressed between nodes (with
    compress_within_node between all ranks), and the compression error is added to the next step's gradients.

    gradient_predivide_factor: with op Average, gradients are divided by it before they are added and by size / factor
    after. sparse_as_dense: tf.IndexedSlices are made dense first; otherwise each is gathered from all ranks. groups: a
    number of groups, or lists of variables' names that travel together; by default gradients travel in buckets of up to
    `bucket_cap_mib` MiB, the first one of `first_bucket_mib`. overlap: whether a traced function reduces each bucket as
    soon as it is complete; None decides from the ranks' nodes and their cores. reads_marks: without a process set,
    variables that are sharded along a mesh determine the ranks.
    """

    def __init__(
        self,
        name: str,
        *,
        op: core.ReduceOp = core.Average,
        compression: Compressing = Compression.none,
        compress_within_node: bool = False,
        gradient_predivide_factor: float = 1.0,
        sparse_as_dense: bool = False,
        groups: Groups = None,
        process_set: core.ProcessSet | None = None,
        overlap: bool | None = None,
        bucket_cap_mib: float = BUCKET_CAP_MIB,
        first_bucket_mib: float = FIRST_BUCKET_MIB,
        reads_marks: bool = False,
    ) -> None:
        self.op = core.resolve_op(op)
        self._in_buckets = self.op in (core.Average, core.Sum)
        requested = Options(
            op="sum" if self.op == core.Sum else "mean",
            bucket_cap_mib=bucket_cap_mib,
            first_bucket_mib=first_bucket_mib,
            overlap=overlap,
            compression=compression,
            within_node=compress_within_node,
            predivide=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
        )
        if not self._in_buckets and (gradient_predivide_factor != 1 or requested.scheme):
            raise UsageError(f"op={self.op.name.capitalize()} takes neither compression nor gradient_predivide_factor")
        self.compressor: Any = requested.compressor
        """The user's own compressor, if any: the tensors it makes go into buckets unchanged."""
        options = replace(requested, compression=CompressionChoice()) if self.compressor else requested
        super().__init__(name, options, read_groups(groups, str), process_set)
        self._reads_marks = reads_marks and (process_set is None or process_set is core.global_process_set)

    @no_autograph
    def __call__(
        self,
        gradients: Sequence[Any],
        names: Sequence[str],
        like: Sequence[Any] = (),
        *,
        strict: Collection[int] | None = None,
        given_if: Mapping[int, Any] = MappingProxyType({}),
    ) -> list[Any]:
        """Return the gradients reduced over all ranks, in the same order. Eagerly or in a traced function.

        `like` are the variables; they describe missing gradients. A gradient that is None only on some ranks counts as
        zeros there, and those ranks get the result too. But it raises MismatchError on every rank if the gradient is
        sparse, or if its number is in `strict` (by default none eagerly, and all in a graph, where it is unknown
        before the run whether a result will be None). In a graph the result is an `OptionalGradient` for numbers
        outside `strict`. None stays None if no rank has a gradient.

        given_if: boolean tensors for some of the gradients, which count as None when False. Only in a graph.

        Raises MismatchError on every rank if ranks have different gradients; UsageError for an invalid gradient.
        """
        if len(gradients) != len(names):
            raise UsageError(f"{self.name}: {len(gradients)} gradients but {len(names)} names")
        given = [self._checked(gradient, name) for gradient, name in zip(gradients, names, strict=True)]
        if self.alone:
            return given
        self.settle_ranks(names, like or ())
        if self.alone:  # settle_ranks may have found a single rank
            return given
        if not self._in_buckets:
            return self._one_by_one(given)
        if like and not tf.executing_eagerly():  # a slot has its variable's dtype, and so does its result
            given = [_cast_like(*pair) for pair in zip(given, like, strict=True)]
        if strict is None or self.compressor is not None:  # a compressor may fail on zeros that no rank has
            strict = () if tf.executing_eagerly() else range(len(given))
        return GraphCall(self, given, names, like or given, strict, given_if).run()

    def reduce_with_tangents(
        self, gradients: Sequence[Any], names: Sequence[str], like: Sequence[Any] = ()
    ) -> list[Any]:
        """Do the same as a call, eagerly, with results that have derivatives in forward mode.

        All ranks pass the same gradients. Raises UsageError for sparse ones, and for compression beyond a cast.
        """
        given = [self._checked(gradient, name) for gradient, name in zip(gradients, names, strict=True)]
        self.settle_ranks(names, like)
        if self.alone:
            return given
        if self.options.scheme or self.options.predivide != 1:
            raise UsageError(
                f"{self.name}: forward mode (tf.autodiff.ForwardAccumulator) works neither with compression beyond a "
                "cast nor with gradient_predivide_factor: leave it out, or take two tf.GradientTape instead (reverse "
                "mode)"
            )
        return self._one_by_one(given)

    def settle_ranks(self, names: Sequence[str], variables: Sequence[Any]) -> None:
        """Reduce over the ranks with the same shards, if variables are sharded on a mesh and no process set was given.

        The first call is collective over all ranks. Raises UsageError if some of the ranks have other shards.
        """
        shards = list(zip(names, map(shard_of, variables), strict=False))
        if self._reads_marks and any(shard is not None and not shard.is_local for _, shard in shards):
            self._reads_marks = False
            if (mesh := mesh_of(shards, self.size)) is not None:
                self.process_set = process_set_along(mesh, axes_of_data(mesh), self.name)
        check_same_shard(self.name, shards, self.process_set.ranks or ())

    def _one_by_one(self, given: Sequence[Any]) -> list[Any]:
        """Reduce gradients by an operation that buckets do not support, because it treats a bucket as one vector."""
        there = [gradient for gradient in given if gradient is not None]
        casts = {"": Compression.none, "float16": Compression.fp16, "bfloat16": Compression.bf16}
        compression = self.compressor or casts[self.options.compression.wire]
        settings: dict[str, Any] = {"op": self.op, "process_set": self.process_set, "name": self.name}
        results = iter(grouped_allreduce(there, compression=compression, ignore_name_scope=True, **settings))
        return [None if gradient is None else next(results) for gradient in given]

    def _checked(self, gradient: Any, name: str) -> Any:
        if gradient is None:
            return None
        try:
            if isinstance(gradient, tf.IndexedSlices):
                dtype_name(gradient.values.dtype)
                return tf.convert_to_tensor(gradient) if self.options.sparse_as_dense else gradient
            return as_tensor(gradient)
        except UsageError as error:
            raise UsageError(f"{self.name}: the gradient of {name}: {error}") from error


class GraphCall(GradientCall):
    """One call of a `GradientsByName`; in a graph, one run of its nodes."""

    def __init__(
        self,
        gradients: GradientsByName,
        given: Sequence[Any],
        names: Sequence[str],
        like: Sequence[Any],
        strict: Collection[int],
        given_if: Mapping[int, Any],
    ) -> None:
        sparse = [index for index, gradient in enumerate(given) if isinstance(gradient, tf.IndexedSlices)]
        dense = [index for index, gradient in enumerate(given) if gradient is not None and index not in sparse]
        super().__init__(gradients, CallSpec(names, dense, sparse, _order_of(given), count_threads(), strict))
        self._compressor, self._options = gradients.compressor, gradients.options_here()
        self._place = place_of_gradients(like)
        """The device of the gradients; None for the host."""
        self._dense, self._sparse, self._names = dense, sparse, names
        self._eager = tf.executing_eagerly()  # a host function itself always runs eagerly
        self._given, self._like = given, like
        self._contexts: dict[int, Any] = {}
        self._also: list[int] = []  # gradients that are None here, but not on all ranks
        self._given_if = dict(given_if)
        self._maybe: list[int] = []
        """In a graph: numbers of gradients whose results exist only if any rank has them."""
        if not self._eager:
            self._maybe = [i for i, one in enumerate(given) if one is None and i not in strict] + list(given_if)
        self._shapes: tuple[Any, ...] = ()
        self._kinds: tuple[Gradient, ...] = ()

    def run(self) -> list[Any]:
        """Return the reduced gradients."""
        given = self._given
        messages = {index: self._to_send(index) for index in self._dense}
        slices: list[Any] = []
        specs = [Spec.like(messages[index]) for index in self._dense]
        for index in self._sparse:
            slices += [tf.cast(given[index].indices, tf.int64), given[index].values]
            specs += map(Spec.rows_of, slices[-2:])
        absent = [index for index in self._maybe if index not in self._given_if]
        for index in absent:
            specs.append(Spec(self._to_send_dtype(index), self._like[index].shape))
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
            results[index] = self._received(index, next(remaining))
        for index in self._sparse:
            indices, values = next(remaining), next(remaining)
            indices = tf.cast(indices, given[index].indices.dtype)
            results[index] = tf.IndexedSlices(values, indices, given[index].dense_shape)
        for index in absent or self._also:
            results[index] = self._received(index, next(remaining))
        for index in self._maybe:
            results[index] = OptionalGradient(results[index], next(remaining))
        return results

    # In the graph

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

    def _to_send(self, index: int) -> Any:
        gradient = self._given[index]
        if self._compressor is not None:
            message, self._contexts[index] = self._compressor.compress(gradient)
            return message
        return encode_gradient(gradient, self._options)

    def _to_send_dtype(self, index: int) -> Any:
        dtype = self._dtype(index)
        wire = tf.as_dtype(self._options.wire_dtype(dtype_name(dtype.real_dtype)))
        return dtype if dtype.is_complex else wire

    def _received(self, index: int, tensor: Any) -> Any:
        if self._compressor is not None:
            return self._compressor.decompress(tensor, self._contexts.get(index))
        return decode_gradient(tensor, self._dtype(index), self._options)

    def _dtype(self, index: int) -> Any:
        """Return the dtype of a gradient, which may be None here."""
        for known in (self._given[index], self._like[index]):
            if known is not None:
                return tf.as_dtype(known.dtype)
        return tf.as_dtype(self._reducer_in_use().gradients[index].dtype)

    def _nodes(self, messages: Mapping[int, Any]) -> list[list[int]]:
        """Return the gradients for each node that takes some; a single node if all are taken at the end."""
        if (
            self._given_if
            or tf.executing_eagerly()
            or not all(tensor.shape.is_fully_defined() for tensor in messages.values())
        ):
            return [self._dense]
        self._kinds = self._describe({index: (tensor.dtype, tensor.shape) for index, tensor in messages.items()})
        return self._gradients.launches(self._kinds, self._call)

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

    def _describe(self, kinds: Mapping[int, tuple[Any, Any]]) -> tuple[Gradient, ...]:
        """Describe each gradient, by dtypes and shapes of the sent ones."""
        device = "cpu" if self._place is None else self._place.name
        described = []
        for index, name in enumerate(self._names):
            like = self._like[index].values if isinstance(self._like[index], tf.IndexedSlices) else self._like[index]
            dtype, shape = kinds.get(index, (None, None))
            if like is None and dtype is None:
                described.append(Gradient(name, (0,), "float32", device, is_known=False))
                continue
            if like is not None and (dtype is None or self._compressor is None):
                dtype = like.dtype  # before the cast to the wire dtype
            if shape is None or (index in self._sparse and like is not None):
                shape = like.shape
            described.append(gradient_of(name, dtype, shape, device))
        return tuple(described)

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
            kinds = {i: (array.dtype, array.shape) for i, array in zip(self._dense, arrays[:count], strict=True)}
            kinds |= {i: (rows.dtype, rows.shape) for i, rows in zip(self._sparse, arrays[count + 1 :: 2], strict=True)}
            self._shapes, self._kinds = shapes, self._describe(kinds)
        self.begin(self._kinds, eager=False)
        there = [place for place, index in enumerate(self._dense) if bool(conditions.get(index, True))]
        self.give([self._dense[place] for place in there], [arrays[place] for place in there])
        return self._end(*arrays[count:])

    def _end(self, *slices: Any) -> list[Any]:
        count = 2 * len(self._sparse)  # the rest are tokens of earlier nodes
        rows = slices[:count] if self._place is None else list(map(array_of, slices[:count]))
        results = self.end(list(zip(rows[::2], rows[1::2], strict=True)))
        self._also = [index for index in results if self._given[index] is None] if not self._maybe else []
        exist = [index in results for index in self._maybe]
        for index in self._maybe:
            if index not in results:
                results[index] = self._zeros(index)
        answers = self._own([(results[index], self._dtype(index)) for index in self._dense])
        gathered = [array for index in self._sparse for array in results[index]]
        answers += gathered if self._place is None else tensors_over(gathered)
        absent = [index for index in self._maybe if index not in self._given_if]
        answers += self._own([(results[index], self._dtype(index)) for index in absent or self._also])
        answers += [np.asarray(one) for one in exist]
        return answers or [np.zeros((), np.int64)]

    def _zeros(self, index: int) -> Any:
        """Return zeros for a missing result, in the dtype and place of a reducer's result."""
        kind = self._reducer_in_use().gradients[index]
        zeros = result_empty(kind.shape, self._options.wire_dtype(kind.dtype))
        zeros[...] = 0
        return zeros if self._place is None else copy_to_device(zeros, kind.place)

    def _own(self, results: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Return results, each with its dtype, in a form that TensorFlow may adopt."""
        if self._place is None:
            return [own_array(array, dtype, eager=self._eager) for array, dtype in results]
        return device_tensors(results)


def _cast_like(gradient: Any, variable: Any) -> Any:
    """Return a gradient, which may be None, in the dtype of its variable."""
    if gradient is None or variable is None or gradient.dtype == tf.as_dtype(variable.dtype):
        return gradient
    return tf.cast(gradient, variable.dtype)


def scale_gradient(gradient: Any, factor: float) -> Any:
    """Return a gradient, which may be sparse or None, times `factor`."""
    if gradient is None or factor == 1.0:
        return gradient
    if isinstance(gradient, OptionalGradient):
        return OptionalGradient(scale_gradient(gradient.value, factor), gradient.exists)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scale_gradient(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def encode_gradient(gradient: Any, options: Options) -> Any:
    """Return a gradient in its wire form: pre-divided, in the wire dtype."""
    if options.predivide != 1 and not gradient.dtype.is_integer:
        gradient = gradient / tf.cast(options.predivide, gradient.dtype)
    return tf.cast(gradient, options.wire_dtype(dtype_name(gradient.dtype)))


def decode_gradient(tensor: Any, dtype: Any, options: Options) -> Any:
    """Return a received gradient in dtype `dtype`, with the predivision undone."""
    tensor = tf.cast(tensor, dtype)
    if options.predivide != 1 and not tensor.dtype.is_integer:
        tensor = tensor * tf.cast(options.predivide, tensor.dtype)
    return tensor


def gradient_of(name: str, dtype: Any, shape: Any, device: str = "cpu") -> Gradient:
    """Return the reducer's description of a gradient of this dtype and shape; complex numbers become pairs."""
    kind = tf.as_dtype(dtype)
    pair = (2,) if kind.is_complex else ()
    return Gradient(name, (*(n or 0 for n in shape), *pair), dtype_name(kind.real_dtype), device)


def place_of_gradients(like: Sequence[Any]) -> DevicePlace | None:
    """Return the place of gradients, which is the place of their variables."""
    if not is_ordered():
        return None
    known = [value.values if isinstance(value, tf.IndexedSlices) else value for value in like if value is not None]
    place = place_of(known)
    return place if place is not None and fits([value.dtype for value in known]) else None


def _order_of(given: Sequence[Any]) -> list[int]:
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


def count_threads() -> int:
    """Return the number of TensorFlow's compute threads."""
    return int(tf.config.threading.get_intra_op_parallelism_threads()) or cores_per_rank(commlib.world())


def device_tensors(results: Sequence[tuple[DeviceArray, Any]]) -> list[tf.Tensor]:
    """Return device results, each with its dtype, as tensors over them; narrow complex pairs are widened."""
    arrays = []
    for array, dtype in results:
        if dtype.is_complex and array.dtype != (real := numpy_dtype(dtype_name(dtype.real_dtype))):
            wide = array.device.wrap(array.device.empty(array.shape, real), "a gradient")
            array.device.kernels.cast(array.reshape(-1), wide.reshape(-1))
            array = wide
        arrays.append(array)
    return tensors_over(arrays, pairs=[dtype.is_complex for _, dtype in results])


def own_array(array: Array, dtype: Any, *, eager: bool) -> Array:
    """Return a result of this dtype, as an array that TensorFlow may adopt.

    TensorFlow must adopt the very object, because slots in use are tracked by it; otherwise it gets a copy.
    """
    if dtype.is_complex:
        pairs = aligned_empty(array.shape, dtype.real_dtype.as_numpy_dtype)  # it may have travelled in a narrower dtype
        pairs[...] = array
        whole: Array = pairs.view(dtype.as_numpy_dtype).reshape(array.shape[:-1])
        return whole
    return array.copy() if array.dtype.kind == "V" and eager else array
