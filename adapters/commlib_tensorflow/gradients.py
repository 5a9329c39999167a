"""TensorReducer: reduce the gradients of many variables, for `DistributedGradientTape` and the optimizers.

Dense gradients go into buckets; sparse ones (tf.IndexedSlices) are gathered. Ranks reduce in program order, as in
PyTorch. They reduce by name over a process set of the user, in a graph that does not order its nodes, and in calls that
were first made while a rank had joined.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from commlib import horovod as core
from commlib.compress.casts import Compressing
from commlib.compress.choice import CompressionChoice
from commlib.data_parallel.buckets import BUCKET_CAP_MIB, FIRST_BUCKET_MIB
from commlib.data_parallel.groups import read_groups
from commlib.data_parallel.options import Options
from commlib.dtypes import DTYPES
from commlib.errors import UsageError
from commlib.horovod.mesh_sets import process_set_along
from commlib.named_gradients.gradients import CallSpec, NamedGradients
from commlib.sharding.shard_replicas import axes_of_data, mesh_of
from commlib.sharding.shards import check_same_shard
from commlib_tensorflow._bridge import as_tensor, dtype_name
from commlib_tensorflow._eager_call import EagerCall
from commlib_tensorflow._gradient_tensors import (
    cast_like,
    compress_tensors,
    count_threads,
    decompress_tensors,
    describe_gradients,
    dtype_of_result,
    place_of_gradients,
)
from commlib_tensorflow._graph_call import GraphCall, order_of
from commlib_tensorflow._host_calls import is_ordered, no_autograph
from commlib_tensorflow._shards import shards_of
from commlib_tensorflow.compression import Compression
from commlib_tensorflow.devices import types
from commlib_tensorflow.named_verbs.operations import grouped_allreduce

Groups = int | Sequence[Sequence[str]] | None


_SUPPORTED = frozenset(map(tf.as_dtype, DTYPES))
_MOST_CALLS = 64


class TensorReducer(NamedGradients):
    """Reduces gradients over the ranks of a process set. Calls are collective; `name` is the reducer's in errors.

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
        self._eager_calls: dict[Any, EagerCall] = {}
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
        given = self._check(gradients, names)
        if self.alone:
            return given
        if any(shards_of(like)):
            self.settle_ranks(names, like)
            if self.alone:
                return given
        if not self._in_buckets:
            return self._one_by_one(given)
        eager, contexts = tf.executing_eagerly(), None
        if like and not eager:  # a slot has its variable's dtype, and so does its result
            given = [cast_like(*pair) for pair in zip(given, like, strict=True)]
        like = like or given
        if strict is None or self.compressor is not None:  # a compressor may fail on zeros that no rank has
            strict = () if eager else range(len(given))
        if self.compressor is not None:
            given, contexts = compress_tensors(self.compressor, given)
            like = [variable if one is None else one for one, variable in zip(given, like, strict=True)]
        if eager:
            results = self._find_call(given, names, like, strict).run(given)
        else:
            spec = self._spec(given, names, strict)
            results = GraphCall(self, spec, given, like, given_if, self._wire_options()).run()
        return results if contexts is None else decompress_tensors(self.compressor, results, contexts)

    def by_parts(self, names: Sequence[str], variables: Sequence[Any], order: Sequence[int]) -> EagerCall:
        """Start a reduction of dense gradients that are passed part by part, in this order. Eagerly, and collective.

        order: the numbers of all variables. Gradients that only some ranks pass raise MismatchError.
        """
        everything = range(len(names))
        spec = CallSpec(names, everything, (), order, count_threads(), strict=True, in_order=self.in_order)
        call = self._make_call(spec, variables, variables)
        call.start()
        return call

    @property
    def in_order(self) -> bool:
        """Whether ranks reduce in program order, where the graph allows it: not over a process set of the user."""
        return self.process_set is core.global_process_set or self.process_set.is_implied

    def _find_call(
        self, given: Sequence[Any], names: Sequence[str], like: Sequence[Any], strict: Collection[int]
    ) -> EagerCall:
        """Return the call for eager tensors of these kinds."""
        place = place_of_gradients(like) if types() else None
        kinds = [
            (one.dtype, tuple(one.shape), variable.dtype) if isinstance(one, tf.Tensor) else _kind_of(one, variable)
            for one, variable in zip(given, like, strict=True)
        ]
        key = (self.process_set.coordinator(self.name), place, *names, *strict, *kinds)
        call = self._eager_calls.get(key)
        if call is None:
            if len(self._eager_calls) >= _MOST_CALLS:
                self._eager_calls.clear()
            call = self._eager_calls[key] = self._make_call(self._spec(given, names, strict), given, like)
        return call

    def _spec(self, given: Sequence[Any], names: Sequence[str], strict: Collection[int]) -> CallSpec:
        sparse = [index for index, gradient in enumerate(given) if isinstance(gradient, tf.IndexedSlices)]
        dense = [index for index, gradient in enumerate(given) if gradient is not None and index not in sparse]
        in_order = self.in_order and is_ordered()
        return CallSpec(list(names), dense, sparse, order_of(given), count_threads(), strict, in_order)

    def _make_call(self, spec: CallSpec, given: Sequence[Any], like: Sequence[Any]) -> EagerCall:
        rows = [one.values if isinstance(one, tf.IndexedSlices) else one for one in given]
        sent = {index: (one.dtype, one.shape) for index, one in enumerate(rows) if one is not None}
        place = place_of_gradients(like)
        kinds = describe_gradients(spec, sent, like, place)
        dtypes = [dtype_of_result(*pair) for pair in zip(given, like, strict=True)]
        return EagerCall(self, spec, kinds, dtypes, place, self._wire_options())

    def _wire_options(self) -> Options:
        """Return the options that apply to tensors on the wire: a user's compressor has made its own."""
        options = self.options_here()
        return options if self.compressor is None else replace(options, predivide=1.0)

    def reduce_with_tangents(
        self, gradients: Sequence[Any], names: Sequence[str], like: Sequence[Any] = ()
    ) -> list[Any]:
        """Do the same as a call, eagerly, with results that have derivatives in forward mode.

        All ranks pass the same gradients. Raises UsageError for sparse ones, and for compression beyond a cast.
        """
        given = self._check(gradients, names)
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
        marks = shards_of(variables)
        if not any(marks):
            return
        shards = list(zip(names, marks, strict=False))
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

    def _check(self, gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """Return gradients as tensors. Raises UsageError."""
        known = tf.Tensor if tf.executing_eagerly() else ()  # a graph captures eager tensors
        return [
            one if one is None or (isinstance(one, known) and one.dtype in _SUPPORTED) else self._convert(one, name)
            for one, name in zip(gradients, names, strict=True)
        ]

    def _convert(self, gradient: Any, name: str) -> Any:
        try:
            if isinstance(gradient, tf.IndexedSlices):
                dtype_name(gradient.values.dtype)
                return tf.convert_to_tensor(gradient) if self.options.sparse_as_dense else gradient
            return as_tensor(gradient)
        except UsageError as error:
            raise UsageError(f"{self.name}: the gradient of {name}: {error}") from error


def _kind_of(gradient: Any, variable: Any) -> tuple[Any, ...]:
    """Return what a reducer's description of a gradient depends on, if it is None or sparse."""
    if variable is None:
        return ()
    if gradient is variable:
        return type(gradient), gradient.values.dtype, tuple(gradient.values.shape)
    return type(gradient), variable.dtype, tuple(variable.shape)  # whatever the number of rows
