"""One reduction of many gradients: in a graph what each run of the nodes does that a `GradientReducer` has made.

Dense gradients travel in buckets, each one grouped operation by name; sparse ones (tf.IndexedSlices) are gathered in
one. In a graph each bucket may be started as soon as its gradients are there, while backward goes on:

    gradients of the last variables -> start 0 --+
    gradients of earlier ones       -> start 1 --+-> finish -> reduced gradients
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from commlib import horovod as core
from commlib.data_parallel.report import all_reduce_bytes
from commlib_tensorflow._bridge import Array
from commlib_tensorflow._graph import Spec, call, ordered
from commlib_tensorflow._layout import Layout


class OneReduction:
    """One call of a `GradientReducer`; in a graph what each run of that call does."""

    def __init__(self, reducer: Any, layout: Layout, given: list[Any]) -> None:
        self._reducer, self._layout = reducer, layout
        self._given = given
        self._buckets = [[i for i in bucket if given[i] is not None] for bucket in layout.buckets]
        self._sparse = [i for i in layout.sparse if given[i] is not None]
        self._pending: dict[int, Any] = {}

    def run(self) -> list[Any]:
        """Return the reduced gradients."""
        reducer, given = self._reducer, self._given
        sent, contexts = {}, {}
        for index in (i for bucket in self._buckets for i in bucket):
            sent[index], contexts[index] = reducer.compression.compress(given[index])
        slices: list[Any] = []
        specs = [Spec.like(sent[index]) for bucket in self._buckets for index in bucket]
        for index in self._sparse:
            slices += [given[index].values, given[index].indices]
            specs += [Spec.rows_of(given[index].values), Spec.rows_of(given[index].indices)]
        if not specs:  # nothing but None: TensorFlow wants an output all the same
            specs = [Spec(tf.int64, ())]
        if not tf.executing_eagerly() and len(self._buckets) > 1 and reducer.overlaps():
            results = call(self._finish_after_starts, [*self._starts(sent), *slices], specs)
        else:
            dense = [sent[index] for bucket in self._buckets for index in bucket]
            results = call(self._all_at_once, [*dense, *slices], specs)
        reduced: list[Any] = [None] * len(given)
        answers = iter(results)
        for index in (i for bucket in self._buckets for i in bucket):
            reduced[index] = reducer.compression.decompress(next(answers), contexts[index])
        for index in self._sparse:
            values, indices = next(answers), next(answers)
            if reducer.op == core.Average:
                values = values / tf.cast(reducer.size, values.dtype)
            reduced[index] = tf.IndexedSlices(values, indices, given[index].dense_shape)
        return reduced

    # In the graph

    def _starts(self, sent: dict[int, Any]) -> list[Any]:
        """Make a node per bucket that starts its reduction; return tensors that `finish` takes, so as to come after."""
        # Where nothing orders the nodes they would all want to agree first: that is one before them then.
        first = [] if ordered() else call(self._agree, [], [Spec(tf.int64, ())])
        tokens: list[Any] = []
        for number, bucket in enumerate(self._buckets):
            tokens += call(self._starter(number), [*(sent[index] for index in bucket), *first], [Spec(tf.int64, ())])
        return tokens

    # On the host

    def _agree(self) -> list[Array]:
        self._reducer.agree(self._layout)
        return [np.zeros((), np.int64)]

    def _starter(self, number: int) -> Any:
        def start(*given: Array) -> list[Array]:
            arrays = given[: len(self._buckets[number])]
            with self._reducer.statistics.exposing():
                # TensorFlow may use the memory of its tensors again as soon as this returns.
                copies = [self._reducer.pool.empty(array.shape, array.dtype) for array in arrays]
                for copy, array in zip(copies, arrays, strict=True):
                    copy[...] = array
                self._launch(number, copies, copies, blocking=False)
            self._reducer.statistics.early_launches += 1
            return [np.zeros((), np.int64)]

        return start

    def _finish_after_starts(self, *arrays: Array) -> list[Array]:
        with self._reducer.statistics.exposing():
            results = self._finish(arrays[len(self._buckets) :])
        self._reducer.stepped()
        return results

    def _all_at_once(self, *arrays: Array) -> list[Array]:
        with self._reducer.statistics.exposing():
            first = 0
            for number, bucket in enumerate(self._buckets):
                inputs = arrays[first : first + len(bucket)]
                first += len(bucket)
                outputs = [self._reducer.pool.empty(array.shape, array.dtype) for array in inputs]
                self._launch(number, inputs, outputs, blocking=True)
            results = self._finish(arrays[first:])
        self._reducer.stepped()
        return results

    def _launch(self, number: int, inputs: Sequence[Array], outputs: Sequence[Array], *, blocking: bool) -> None:
        reducer = self._reducer
        reducer.agree(self._layout)
        # None is an empty array in its place, so that ranks which disagree about it are told.
        places = [index in self._buckets[number] for index in self._layout.buckets[number]]
        start: Any = core.start_allreduce
        marker: Any = np.uint8
        if reducer.scheme:
            marker = np.float32  # codecs are for floats
            start = partial(
                core.start_compressed_allreduce, compression=reducer.scheme, within_node=reducer.within_node
            )
        work = start(
            _with_markers(inputs, places, marker),
            _with_markers(outputs, places, marker),
            f"{reducer.name}.{number}",
            blocking=blocking,
            **reducer.options,
        )
        self._pending[number] = work, outputs

    def _finish(self, slices: Sequence[Array]) -> list[Array]:
        reducer = self._reducer
        gathering = None
        if self._layout.sparse:
            reducer.agree(self._layout)
            places = [index in self._sparse for index in self._layout.sparse for _ in range(2)]
            gathering = core.start_allgather(
                _with_markers(slices, places), f"{reducer.name}.sparse", process_set=reducer.process_set, blocking=True
            )
        started = time.perf_counter()
        pending, self._pending = self._pending, {}
        failure: Exception | None = None
        results: list[Array] = []
        for number in range(len(self._buckets)):
            work, outputs = pending[number]
            try:
                work.wait()
                results += outputs
            except Exception as error:  # the others are under way on all ranks: their names must be free afterwards
                failure = failure or error
        if gathering is not None:
            try:
                gathered = gathering.wait()
                results += [array for array, place in zip(gathered, places, strict=True) if place]
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        statistics = reducer.statistics
        statistics.hide((work for work, _ in pending.values()), time.perf_counter() - started)
        for number, (_, outputs) in pending.items():
            self._count(number, outputs)
        for array in slices:
            statistics.nbytes += array.nbytes
            statistics.count((reducer.size - 1) * array.nbytes, (reducer.size - 1) * array.nbytes)
        return results or [np.zeros((), np.int64)]

    def _count(self, number: int, arrays: Sequence[Array]) -> None:
        """Count the bytes of a bucket that was reduced."""
        reducer = self._reducer
        sent, uncompressed = reducer.sent_bytes(number)
        nbytes = sum(array.nbytes for array in arrays)
        if not uncompressed:  # it travelled as an ordinary all-reduce
            given = (self._given[index].dtype.size for index in self._buckets[number])
            whole = sum(array.size * itemsize for array, itemsize in zip(arrays, given, strict=True))
            sent, uncompressed = (all_reduce_bytes(reducer.size, count) for count in (nbytes, whole))
        reducer.statistics.nbytes += nbytes
        reducer.statistics.count(sent, uncompressed)


def _with_markers(arrays: Sequence[Array], places: Sequence[bool], marker: Any = np.uint8) -> list[Array]:
    """Return one array per place: the next of `arrays` if there is one for it, else an empty one."""
    given = iter(arrays)
    return [next(given) if place else np.empty((0,), marker) for place in places]
