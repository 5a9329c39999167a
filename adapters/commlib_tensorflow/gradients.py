"""Gradients of many variables reduced in few operations: what `DistributedGradientTape` and the optimizer share.

Buckets are in reverse order of variables, because backward makes gradients roughly so, and because a traced function
runs its stateful nodes in the order in which they were made: a start whose gradients come late holds up those behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import commlib
from commlib import horovod as core
from commlib.compress.bucket import split_piece
from commlib.data_parallel import Statistics, StepClock, StepReport, cores_per_rank
from commlib.errors import MismatchError, UsageError
from commlib_tensorflow._bridge import as_tensor, dtype_name
from commlib_tensorflow._graph import as_written
from commlib_tensorflow._layout import Groups, Layout, checked_groups, compatible, make_layout, spec_of
from commlib_tensorflow._one_reduction import OneReduction
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

    @property
    def alone(self) -> bool:
        """Whether this rank reduces with no other one, as one that is not in the process set, like Horovod's."""
        return self.size == 1 or self.process_set.included() is False

    @as_written
    def __call__(self, gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """Return the gradients combined over all ranks, in the same order. Eagerly or in a traced function.

        None stays None: it must be None on all ranks. Raises MismatchError on every rank where ranks have different
        gradients; UsageError for what is no gradient.
        """
        if len(gradients) != len(names):
            raise UsageError(f"{self.name}: {len(gradients)} gradients but {len(names)} names")
        given = [self._checked(gradient, name) for gradient, name in zip(gradients, names, strict=True)]
        if self.alone:
            return given
        layout = self._layout(given, names)
        dense = {index for bucket in layout.buckets for index in bucket}
        # A gradient keeps the place that it had at first, whatever it is now.
        given = [_as_dense(g) if index in dense else _as_slices(g) for index, g in enumerate(given)]
        return OneReduction(self, layout, given).run()

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


def _as_dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def _as_slices(gradient: Any) -> Any:
    if gradient is None or isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape = tf.shape(gradient)
    return tf.IndexedSlices(gradient, tf.range(shape[0], dtype=tf.int64), shape)


def _first_difference(everyone: Sequence[tuple[int, Sequence[str]]]) -> str:
    reference, first = everyone[0]
    for rank, lines in everyone:
        for expected, got in zip(first, lines, strict=False):
            if expected != got:
                return f"on rank {reference} {expected}, but on rank {rank} {got}"
        if len(lines) != len(first):
            return f"rank {reference} has {len(first) - 2} gradients, but rank {rank} has {len(lines) - 2}"
    return "ranks disagreed about their gradients, and do not any more"
