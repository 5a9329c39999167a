"""Gradients of many variables reduced together: how eager code and graphs drive the core's GradientReducer.

Dense gradients go into buckets; sparse ones (tf.IndexedSlices) are gathered. In a graph a node of the host takes
gradients as soon as they are there, while backward goes on:

    gradients of the last variables -> give 0 --+
    gradients of earlier ones       -> give 1 --+-> end -> reduced gradients

A traced function runs its stateful nodes in the order in which they were made: one whose gradients come late holds up
those behind. So they are made in the order in which backward makes gradients, as the graph tells.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

import commlib
from commlib import horovod as core
from commlib.buffers.aligned import aligned_empty
from commlib.compress.choice import Choice
from commlib.data_parallel import (
    BUCKET_CAP_MIB,
    FIRST_BUCKET_MIB,
    Gradient,
    GradientReducer,
    Options,
    Statistics,
    StepClock,
    StepReport,
    cores_per_rank,
    load_compression,
    place_groups,
    read_groups,
    save_compression,
)
from commlib.data_parallel.array_values import ArrayValues
from commlib.data_parallel.bucket_order import buckets_of
from commlib.errors import UsageError
from commlib.horovod.by_name import ByName, overlap_pays_here
from commlib_tensorflow._bridge import Array, as_tensor, dtype_name
from commlib_tensorflow._graph import Spec, as_written, call, ordered
from commlib_tensorflow.collectives import grouped_allreduce
from commlib_tensorflow.compression import Compression, GradientCompressing

Groups = int | Sequence[Sequence[str]] | None


class Gradients:
    """Combines gradients over the ranks of a process set. Collective when called, under operations named `name`.

    op is that of `allreduce`, and so may compression be. It may also be a name such as "int8" or "powersgd:rank=4", or
    a codec or scheme of `commlib.compress`: then buckets are compressed between nodes (with compress_within_node
    between all ranks), and what is lost is added to the next step's gradients.

    gradient_predivide_factor: with op Average, gradients are divided by it before they are added and by size / factor
    after. sparse_as_dense: tf.IndexedSlices are made dense first; else each is gathered from all ranks. groups: a
    number of groups, or lists of variables' names that travel together; by default gradients travel in buckets of up to
    `bucket_cap_mib` MiB, the first one of `first_bucket_mib`. overlap: whether a traced function reduces each bucket as
    soon as it is complete; None decides by where the ranks are and the cores they have.
    """

    def __init__(
        self,
        name: str,
        *,
        op: core.ReduceOp = core.Average,
        compression: GradientCompressing = Compression.none,
        compress_within_node: bool = False,
        gradient_predivide_factor: float = 1.0,
        sparse_as_dense: bool = False,
        groups: Groups = None,
        process_set: core.ProcessSet | None = None,
        overlap: bool | None = None,
        bucket_cap_mib: float = BUCKET_CAP_MIB,
        first_bucket_mib: float = FIRST_BUCKET_MIB,
    ) -> None:
        self.name = name
        self.op = core.resolve_op(op)
        self._in_buckets = self.op in (core.Average, core.Sum)
        self.options = Options(
            op="sum" if self.op == core.Sum else "mean",
            bucket_cap_mib=bucket_cap_mib,
            first_bucket_mib=first_bucket_mib,
            overlap=overlap,
            compression=compression,
            within_node=compress_within_node,
            predivide=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
        )
        if not self._in_buckets and (gradient_predivide_factor != 1 or self.options.scheme):
            raise UsageError(f"op={self.op.name.capitalize()} takes neither compression nor gradient_predivide_factor")
        self.groups = read_groups(groups, str)
        self.process_set = core.process_set_of(process_set)
        self.statistics = Statistics()
        self.report: StepReport | None = None
        """What the last step cost, a step being from the end of one reduction to that of the next."""
        self._clock = StepClock()
        self._loaded: dict[str, Any] | None = None
        self._reducers: dict[tuple[Gradient, ...], tuple[GradientReducer, ArrayValues, ByName]] = {}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.process_set.size() or 1

    @property
    def alone(self) -> bool:
        """Whether this rank reduces with no other one, as one that is not in the process set, like Horovod's."""
        return self.size == 1 or self.process_set.included() is False

    @property
    def reducers(self) -> list[GradientReducer]:
        """What reduces gradients, one for each kind of call so far: its buckets, options and compression."""
        return [reducer for reducer, _, _ in self._reducers.values()]

    @as_written
    def __call__(
        self, gradients: Sequence[Any], names: Sequence[str], like: Sequence[Any] = (), *, strict: bool = False
    ) -> list[Any]:
        """Return the gradients combined over all ranks, in the same order. Eagerly or in a traced function.

        None stays None where no rank has a gradient. Where only some have one, it is zeros on the others, which get
        the result too; but in a graph, or if this is `strict`, that is a MismatchError on every rank. `like` are the
        variables, by which those without a gradient are known. Raises MismatchError on every rank where ranks have
        different gradients; UsageError for what is no gradient.
        """
        if len(gradients) != len(names):
            raise UsageError(f"{self.name}: {len(gradients)} gradients but {len(names)} names")
        given = [self._checked(gradient, name) for gradient, name in zip(gradients, names, strict=True)]
        if self.alone:
            return given
        if not self._in_buckets:
            return self._one_by_one(given)
        return _Call(self, given, names, like, strict=strict or not tf.executing_eagerly()).run()

    def find(
        self, gradients: tuple[Gradient, ...], there: Collection[int], sparse: Sequence[int], order: Sequence[int]
    ) -> tuple[GradientReducer, ArrayValues]:
        """Return what reduces gradients, of which those that are `there` are known. Collective when first called."""
        for known, (reducer, values, ranks) in list(self._reducers.items()):
            if len(known) == len(gradients) and all(known[index] == gradients[index] for index in there):
                if ranks.is_current:
                    return reducer, values
                del self._reducers[known]
        ranks, values = ByName(self.process_set, self.name), ArrayValues(gradients)
        reducer = GradientReducer(
            ranks,
            gradients,
            values,
            replace(self.options, compression=Choice()) if self.options.compressor else self.options,
            groups=place_groups(self.groups, [gradient.name for gradient in gradients]),
            sparse=sparse,
            order=order,
            threads=_threads(),
            what=self.name,
        )
        if self._loaded is not None:
            load_compression(reducer, self._loaded, np.asarray)
        reducer.statistics = self.statistics
        self._reducers[gradients] = reducer, values, ranks
        return reducer, values

    def stepped(self, reducer: GradientReducer) -> None:
        """Note that all gradients of a step were reduced."""
        reducer.stepped()
        self.report = self._clock.step(self.statistics)

    def compression_state(self) -> dict[str, Any]:
        """Return what compression remembers on this rank, for `load_compression_state` there; {} if nothing."""
        if not self._reducers:
            return self._loaded or {}
        (reducer, _, _), *_ = self._reducers.values()
        return save_compression(reducer, np.copy)

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `compression_state` returned: with the same bits if before the first step, on every rank."""
        self._loaded = dict(state) if state else None
        for reducer in self.reducers if state else ():
            load_compression(reducer, dict(state), np.asarray)

    def _one_by_one(self, given: Sequence[Any]) -> list[Any]:
        """Combine gradients by an operation that is not for buckets, in which several are one vector."""
        there = [gradient for gradient in given if gradient is not None]
        results = iter(
            grouped_allreduce(
                there,
                compression=self._compressor(),
                op=self.op,
                process_set=self.process_set,
                name=self.name,
                ignore_name_scope=True,
            )
        )
        return [None if gradient is None else next(results) for gradient in given]

    def _compressor(self) -> Any:
        choice: Choice = self.options.compression
        casts = {"": Compression.none, "float16": Compression.fp16, "bfloat16": Compression.bf16}
        return choice.compressor or casts[choice.wire]

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


class _Call:
    """One call of a `Gradients`; in a graph what each run of that call does."""

    def __init__(
        self, gradients: Gradients, given: Sequence[Any], names: Sequence[str], like: Sequence[Any], *, strict: bool
    ) -> None:
        self._gradients, self._given, self._names, self._strict = gradients, given, names, strict
        self._like = like or given
        self._sparse = [index for index, gradient in enumerate(given) if isinstance(gradient, tf.IndexedSlices)]
        self._dense = [i for i, gradient in enumerate(given) if gradient is not None and i not in self._sparse]
        self._order = _order_of(given)
        comm = gradients.process_set.coordinator(gradients.name).comm
        self._options = gradients.options.for_ranks_of(comm)
        self._arrays: dict[int, Array] = {}
        self._also: list[int] = []  # gradients that are None here, but not on all ranks
        self._lock = threading.Lock()  # nodes that nothing orders run at once

    def run(self) -> list[Any]:
        """Return the reduced gradients."""
        given = self._given
        self._contexts: dict[int, Any] = {}
        sent = {index: self._to_send(index) for index in self._dense}
        slices: list[Any] = []
        specs = [Spec.like(sent[index]) for index in self._dense]
        for index in self._sparse:
            values, indices = given[index].values, tf.cast(given[index].indices, tf.int64)
            slices += [indices, values]
            specs += [Spec.rows_of(indices), Spec.rows_of(values)]
        if not specs:  # nothing but None: TensorFlow wants an output all the same
            specs = [Spec(tf.int64, ())]
        if not tf.executing_eagerly() and self._overlaps(sent):
            answers = call(self._end, [*slices, *self._gives(sent)], specs)
        else:
            answers = call(self._all_at_once, [*(sent[index] for index in self._dense), *slices], specs)
        results: list[Any] = [None] * len(given)
        remaining = iter(answers)
        for index in self._dense:
            results[index] = self._received(index, next(remaining))
        for index in self._sparse:
            indices, values = next(remaining), next(remaining)
            shape = given[index].dense_shape
            results[index] = tf.IndexedSlices(values, tf.cast(indices, given[index].indices.dtype), shape)
        for index in self._also:
            results[index] = self._received(index, next(remaining))
        return results

    # In the graph

    def _to_send(self, index: int) -> Any:
        gradient, options = self._given[index], self._options
        if options.compressor is not None:
            sent, self._contexts[index] = options.compressor.compress(gradient)
            return sent
        if options.predivide != 1 and not gradient.dtype.is_integer:
            gradient = gradient / tf.cast(options.predivide, gradient.dtype)
        return tf.cast(gradient, options.wire_dtype(dtype_name(gradient.dtype)))

    def _received(self, index: int, tensor: Any) -> Any:
        options = self._options
        if options.compressor is not None:
            return options.compressor.decompress(tensor, self._contexts.get(index))
        tensor = tf.cast(tensor, self._dtype(index))
        if options.predivide != 1 and not tensor.dtype.is_integer:
            tensor = tensor * tf.cast(options.predivide, tensor.dtype)
        return tensor

    def _dtype(self, index: int) -> Any:
        """Return the dtype of a gradient, which may be None here."""
        for known in (self._given[index], self._like[index]):
            if known is not None:
                return tf.as_dtype(known.dtype)
        return tf.as_dtype(self._reducer.gradients[index].dtype)

    def _overlaps(self, sent: Mapping[int, Any]) -> bool:
        """Tell whether each bucket is to have a node of its own: sizes must be known, and there must be several."""
        if not all(tensor.shape.is_fully_defined() for tensor in sent.values()):
            return False
        gradients, options = self._gradients, self._options
        overlap = overlap_pays_here(_threads()) if options.overlap is None else options.overlap
        described = self._describe({index: (tensor.dtype, tensor.shape) for index, tensor in sent.items()})
        groups = place_groups(gradients.groups, self._names)
        buckets = buckets_of(described, options, groups, self._order, self._sparse)
        self._nodes = [[i for i in bucket.parameters if i in sent] for bucket in buckets]
        self._nodes = [node for node in self._nodes if node]
        return bool(overlap) and len(self._nodes) > 1

    def _gives(self, sent: Mapping[int, Any]) -> list[Any]:
        """Make a node per bucket that gives its gradients; return tensors that `end` takes, so as to come after."""
        token = Spec(tf.int64, ())
        described = self._describe({index: (tensor.dtype, tensor.shape) for index, tensor in sent.items()})
        first: list[Any] = []
        tokens: list[Any] = []
        if not ordered():  # else it is one node less: the first one begins
            first = call(self._giving([], described), [], [token])
        for members in self._nodes:
            begins = described if not tokens and not first else None
            tokens += call(self._giving(members, begins), [*(sent[index] for index in members), *first], [token])
        return tokens

    def _giving(self, members: Sequence[int], begins: tuple[Gradient, ...] | None) -> Callable[..., list[Array]]:
        def give(*arrays: Array) -> list[Array]:
            with self._lock, self._gradients.statistics.exposing():
                if begins is not None:
                    self._begin(begins, eager=True)
                self._give(members, arrays)
            return [np.zeros((), np.int64)]

        return give

    # On the host

    def _all_at_once(self, *arrays: Array) -> list[Array]:
        count = len(self._dense)
        kinds = {i: (array.dtype, array.shape) for i, array in zip(self._dense, arrays[:count], strict=True)}
        kinds |= {i: (rows.dtype, rows.shape) for i, rows in zip(self._sparse, arrays[count + 1 :: 2], strict=True)}
        with self._gradients.statistics.exposing():
            self._begin(self._describe(kinds), eager=False)
            self._give(self._dense, arrays)
        return self._end(*arrays[count:])

    def _describe(self, kinds: Mapping[int, tuple[Any, Any]]) -> tuple[Gradient, ...]:
        """Return what each gradient is, by dtypes and shapes of those that are sent."""
        described = []
        for index, name in enumerate(self._names):
            like = self._like[index].values if isinstance(self._like[index], tf.IndexedSlices) else self._like[index]
            dtype, shape = kinds.get(index, (None, None))
            if like is None and dtype is None:
                described.append(Gradient(name, (0,), "float32", is_known=False))
                continue
            if like is not None and (dtype is None or self._options.compressor is None):
                dtype = like.dtype  # before it was cast for the way
            if shape is None or (index in self._sparse and like is not None):
                shape = like.shape
            kind = tf.as_dtype(dtype)
            pair = (2,) if kind.is_complex else ()
            described.append(Gradient(name, (*(n or 0 for n in shape), *pair), dtype_name(kind.real_dtype)))
        return tuple(described)

    def _begin(self, described: tuple[Gradient, ...], *, eager: bool) -> None:
        self._reducer, self._values = self._gradients.find(
            described, [*self._dense, *self._sparse], self._sparse, self._order
        )
        if self._reducer.active:
            self._reducer.end()  # of a run that failed: the others wait for this rank
        self._values.forget_all()
        self._reducer.begin(eager=eager)

    def _give(self, members: Sequence[int], arrays: Sequence[Array]) -> None:
        for index, array in zip(members, arrays, strict=False):
            self._values.give(index, array.view(array.real.dtype) if array.dtype.kind == "c" else array)
            self._reducer.ready(index)

    def _end(self, *slices: Array) -> list[Array]:
        reducer, values, gradients = self._reducer, self._values, self._gradients
        with gradients.statistics.exposing():
            for place, index in enumerate(self._sparse):
                values.give_rows(index, slices[2 * place], slices[2 * place + 1])
                reducer.ready(index)
            reducer.end(strict=self._strict)
        gradients.stepped(reducer)
        results: list[Array] = []
        for index in self._dense:
            array = values.result(index)
            assert array is not None, "this rank had it"
            results.append(_own(array, self._dtype(index)))
        for index in self._sparse:
            results += values.rows_result(index)
        self._also = []
        for index, gradient in enumerate(self._given):
            if gradient is None and (array := values.result(index)) is not None:
                self._also.append(index)
                results.append(_own(array, self._dtype(index)))
        values.forget_all()
        return results or [np.zeros((), np.int64)]


def _order_of(given: Sequence[Any]) -> list[int]:
    """Return the numbers of gradients as backward makes them: in a graph as it says, else in reverse order."""
    numbers = range(len(given) - 1, -1, -1)
    if tf.executing_eagerly():
        return list(numbers)
    graph = tf.compat.v1.get_default_graph()
    made = {operation: place for place, operation in enumerate(graph.get_operations())}

    def place(index: int) -> int:
        gradient = given[index]
        if gradient is None or isinstance(gradient, tf.IndexedSlices):
            return len(made)  # when all are there
        return 0 if gradient.op.type == "Placeholder" else made.get(gradient.op, 0)

    return sorted(numbers, key=place)


def _threads() -> int:
    """Return the threads on which TensorFlow computes."""
    return int(tf.config.threading.get_intra_op_parallelism_threads()) or cores_per_rank(commlib.world())


def _own(array: Array, dtype: Any) -> Array:
    """Return a result of this dtype, as an array that TensorFlow may adopt.

    It has to adopt the very object, by which a slot is known to be in use; else it gets a copy.
    """
    if dtype.is_complex:
        pairs = aligned_empty(array.shape, array.dtype)
        pairs[...] = array
        whole: Array = pairs.view(dtype.as_numpy_dtype).reshape(array.shape[:-1])
        return whole
    return array.copy() if array.dtype.kind == "V" and tf.executing_eagerly() else array
