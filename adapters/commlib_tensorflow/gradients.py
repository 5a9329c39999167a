"""Gradients of many variables reduced in few operations: what `DistributedGradientTape` and the optimizer share.

Dense gradients travel in buckets, each one grouped operation by name; sparse ones (tf.IndexedSlices) are gathered in
one. In a graph each bucket may be started as soon as its gradients are there, while backward goes on:

    gradients of the last variables -> start 0 --+
    gradients of earlier ones       -> start 1 --+-> finish -> reduced gradients

Buckets are in reverse order of variables, because backward makes gradients roughly so, and because a traced function
runs its stateful nodes in the order in which they were made: a start whose gradients come late holds up those behind.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import commlib
from commlib import horovod as core
from commlib.compress.crossing import split_piece
from commlib.data_parallel import Statistics, StepClock, StepReport, cores_per_rank
from commlib.data_parallel.report import all_reduce_bytes
from commlib.errors import MismatchError, UsageError
from commlib_tensorflow._bridge import Array, as_tensor, dtype_name
from commlib_tensorflow._graph import Spec, as_written, call
from commlib_tensorflow._layout import Groups, Layout, checked_groups, compatible, make_layout, spec_of
from commlib_tensorflow._pool import Pool
from commlib_tensorflow.compression import Compression, GradientCompressing, resolve


class GradientReducer:
    """Combines gradients over the ranks of a process set. Collective when called, under operations named `name`.

    op is that of `allreduce`, and so may compression be. It may also be a name such as "int8" or "powersgd:rank=4", or
    a codec or scheme of `commlib.compress`: then buckets are compressed between nodes (with compress_within_node
    between all ranks), and what is lost is added to the next step's gradients.

    gradient_predivide_factor: with op Average, gradients are divided by it before they are added and by size / factor
    after. sparse_as_dense: tf.IndexedSlices are made dense first; else each is gathered from all ranks. groups: a
    number of groups, or lists of variables' names that travel together; by default gradients travel in buckets of up to
    4 MiB, the first one of 1 MiB. overlap: whether a traced function starts each bucket as soon as it is complete;
    None decides by where the ranks are and the cores they have.
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
    ) -> None:
        op = core.resolve_op(op)
        if gradient_predivide_factor <= 0:
            raise UsageError(f"gradient_predivide_factor must be positive, got {gradient_predivide_factor}")
        if gradient_predivide_factor != 1.0 and op != core.Average:
            raise UsageError(f"gradient_predivide_factor is for op=Average only, got op={op.name.capitalize()}")
        self.name = name
        self.op = op
        self.compression, self.scheme = resolve(compression)
        self.within_node = compress_within_node
        self.sparse_as_dense = sparse_as_dense
        self.groups = checked_groups(groups)
        self.process_set = core.process_set_of(process_set)
        self.options: dict[str, Any] = {
            "op": op,
            "prescale_factor": 1.0 / gradient_predivide_factor,
            "postscale_factor": gradient_predivide_factor,
            "process_set": self.process_set,
        }
        self.pool = Pool()
        self.statistics = Statistics()
        self.report: StepReport | None = None
        """What the last step cost, a step being from the end of one reduction to that of the next."""
        self._clock = StepClock()
        self._overlap = overlap
        self._layouts: dict[tuple[str, ...], list[Layout]] = {}
        self._agreed: set[tuple[str, ...]] = set()
        self._loaded: dict[str, Any] = {}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.process_set.size() or 1

    @as_written
    def __call__(self, gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """Return the gradients combined over all ranks, in the same order. Eagerly or in a traced function.

        None stays None: it must be None on all ranks. Raises MismatchError on every rank where ranks have different
        gradients; UsageError for what is no gradient.
        """
        if len(gradients) != len(names):
            raise UsageError(f"{self.name}: {len(gradients)} gradients but {len(names)} names")
        given = [self._checked(gradient, name) for gradient, name in zip(gradients, names, strict=True)]
        if self.size == 1:
            return given
        layout = self._layout(given, names)
        dense = {index for bucket in layout.buckets for index in bucket}
        # A gradient keeps the place that it had at first, whatever it is now.
        given = [_as_dense(g) if index in dense else _as_slices(g) for index, g in enumerate(given)]
        return _Reduction(self, layout, given).run()

    def stepped(self) -> None:
        """Note that all gradients of a step were reduced."""
        self.statistics.reductions += 1
        self.report = self._clock.step(self.statistics)

    def agree(self, layout: Layout) -> None:
        """Compare this rank's layout with the others', once. Collective then.

        With different layouts ranks would start different operations, and wait for each other for ever.
        """
        if layout.lines in self._agreed:
            return
        lines = [self.name, *layout.lines, f"groups {self.groups}"]
        digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")
        # Shapes are compared, and a rank that has joined takes part: so the digest travels as the shape of nothing.
        nothing = np.empty((0, digest), np.uint8)
        name = f"{self.name}.agreement"
        try:
            work = core.start_allreduce(
                [nothing], [nothing], name, op=core.Sum, process_set=self.process_set, blocking=True
            )
            work.wait()
        except MismatchError as error:
            everyone = core.allgather_object((core.rank(), lines), name, self.process_set)
            raise MismatchError(f"{self.name}: {_first_difference(everyone)}") from error
        self._agreed.add(layout.lines)

    def compression_state(self) -> dict[str, Any]:
        """Return what compression remembers on this rank, by the names of variables."""
        state: dict[str, Any] = dict(self._loaded)
        for names, layouts in self._layouts.items():
            for number, bucket in enumerate(layouts[0].buckets):
                for part, known in self._remembered().state(f"{self.name}.{number}").items():
                    place, piece = split_piece(part)
                    state[names[bucket[int(place)]] + piece] = known
        return state

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `compression_state` returned on this rank. Before the first step, or between two."""
        self._loaded = dict(state)
        for names, layouts in self._layouts.items():
            self._recall(names, layouts[0])

    def _recall(self, names: Sequence[str], layout: Layout) -> None:
        """Give what was loaded to the buckets in which its variables travel."""
        pieces: dict[str, list[str]] = {}
        for key in self._loaded:
            name, piece = split_piece(key)
            pieces.setdefault(name, []).append(piece)
        for number, bucket in enumerate(layout.buckets):
            known = {
                f"{place}{piece}": self._loaded[names[index] + piece]
                for place, index in enumerate(bucket)
                for piece in pieces.get(names[index], ())
            }
            if known:
                self._remembered().load(f"{self.name}.{number}", known)

    def sent_bytes(self, number: int) -> tuple[int, int]:
        """Return what this rank last sent of a compressed bucket, and what float32 would have taken; 0, 0 if none."""
        return self._remembered().sent_bytes(f"{self.name}.{number}") if self.scheme else (0, 0)

    def _remembered(self) -> Any:
        return self.process_set.coordinator(self.name).compressed

    def overlaps(self) -> bool:
        """Return whether buckets should be started while backward runs."""
        if self._overlap is None:
            cores = cores_per_rank(commlib.world())
            threads = tf.config.threading.get_intra_op_parallelism_threads() or cores
            # As commlib.data_parallel.overlap_pays, which is collective: ranks may trace at different times.
            self._overlap = core.local_size() < core.size() or cores > threads
        return self._overlap

    def _layout(self, given: Sequence[Any], names: Sequence[str]) -> Layout:
        """Return the layout for gradients of these names, dtypes and shapes."""
        specs = [spec_of(gradient) for gradient in given]
        known = self._layouts.setdefault(tuple(names), [])
        for layout in known:
            if all(map(compatible, layout.specs, specs)):
                return layout
        known.append(make_layout(given, names, self.groups))
        if self._loaded and len(known) == 1:
            self._recall(names, known[0])
        return known[-1]

    def _checked(self, gradient: Any, name: str) -> Any:
        if gradient is None:
            return None
        try:
            if isinstance(gradient, tf.IndexedSlices):
                dtype_name(gradient.values.dtype)
                return _as_dense(gradient) if self.sparse_as_dense else gradient
            return as_tensor(gradient)
        except UsageError as error:
            raise UsageError(f"{self.name}: the gradient of {name}: {error}") from error


class _Reduction:
    """One call of a reducer; in a graph what each run of that call does."""

    def __init__(self, reducer: GradientReducer, layout: Layout, given: list[Any]) -> None:
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
        tokens: list[Any] = []
        for number, bucket in enumerate(self._buckets):
            tokens += call(self._starter(number), [sent[index] for index in bucket], [Spec(tf.int64, ())])
        return tokens

    # On the host

    def _starter(self, number: int) -> Any:
        def start(*arrays: Array) -> list[Array]:
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
        ran = sum(work.seconds for work, _ in pending.values())
        reducer.statistics.hidden_seconds += max(0.0, ran - (time.perf_counter() - started))
        for number, (_, outputs) in pending.items():
            self._count(number, outputs)
        for array in slices:
            self._count_bytes(array.nbytes, (reducer.size - 1) * array.nbytes, (reducer.size - 1) * array.nbytes)
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
        self._count_bytes(nbytes, sent, uncompressed)

    def _count_bytes(self, nbytes: int, sent: int, uncompressed: int) -> None:
        statistics = self._reducer.statistics
        statistics.nbytes += nbytes
        statistics.sent_bytes += sent
        statistics.uncompressed_bytes += uncompressed


def _as_dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def _as_slices(gradient: Any) -> Any:
    if gradient is None or isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape = tf.shape(gradient)
    return tf.IndexedSlices(gradient, tf.range(shape[0], dtype=tf.int64), shape)


def _with_markers(arrays: Sequence[Array], places: Sequence[bool], marker: Any = np.uint8) -> list[Array]:
    """Return one array per place: the next of `arrays` if there is one for it, else an empty one."""
    given = iter(arrays)
    return [next(given) if place else np.empty((0,), marker) for place in places]


def _first_difference(everyone: Sequence[tuple[int, Sequence[str]]]) -> str:
    reference, first = everyone[0]
    for rank, lines in everyone:
        for expected, got in zip(first, lines, strict=False):
            if expected != got:
                return f"on rank {reference} {expected}, but on rank {rank} {got}"
        if len(lines) != len(first):
            return f"rank {reference} has {len(first) - 2} gradients, but rank {rank} has {len(lines) - 2}"
    return "ranks disagreed about their gradients, and do not any more"
