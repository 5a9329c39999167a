"""BatchReader: cut the batch of a rank into microbatches, and agree with the other ranks on its rows."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from commlib.comparison.parameter_check import check_agreement
from commlib.errors import UsageError
from commlib.pipeline.batch import NONE, BatchDigests, rows_of, shares_in_updates
from commlib.pipeline.pipe import Pipe
from commlib.pipeline.rows import Rows, check_parts
from commlib_tensorflow.pipelines._batches import (
    as_tensors,
    cut_by_rows,
    cut_by_user,
    digest,
    inputs_of,
    places_of,
    weights_as_tensors,
)
from commlib_tensorflow.pipelines._call_kinds import CallKind, agree_on_kind
from commlib_tensorflow.pipelines._losses import CompiledLoss, LossWeights
from commlib_tensorflow.pipelines._parts import SplitModel
from commlib_tensorflow.pipelines._stages import Batch

_FAILED = -2
"""Replaces a number of rows if the batch is invalid."""


class BatchReader:
    """Reads the batches of one rank. rows: where the rows of x and y are."""

    def __init__(self, pipe: Pipe, pieces: SplitModel, rows: Rows) -> None:
        self._pipe, self._rows, self._microbatches = pipe, rows, pipe.schedule.microbatches
        self._graph, self._inputs, self._outputs = pieces.graph, pieces.inputs, len(pieces.outputs)

    def read(
        self,
        batch: Batch,
        x: Any,
        y: Any,
        sample_weight: Any,
        loss: CompiledLoss,
        compiled: Sequence[str],
        *,
        cut: bool,
    ) -> tuple[int, Any, Any]:
        """Cut a batch, and agree on its rows; return their number, the targets and the sample weights. Collective.

        compiled: lines that have to be the same on all ranks. cut: False if the arguments are lists of microbatches.
        Raises UsageError on all ranks if the batch of one rank is invalid.
        """
        pipe = self._pipe
        comm, first, last = pipe.comm, pipe.first, pipe.last
        counts, inputs, error = [NONE] * 2, None, None
        given = BatchDigests()
        compiled_digest = zlib.crc32("\n".join(compiled).encode())
        of_x: list[int] = []
        of_y: list[int] = []
        kind = CallKind.TRAIN if batch.is_training else CallKind.EVALUATE if batch.has_loss else CallKind.PREDICT
        kind = kind if cut else CallKind.TRAIN_PARTS
        try:
            if comm.rank == first:
                if x is None:
                    raise UsageError(f"pipeline: rank {comm.rank} has the first stage: pass x on it")
                inputs, of_x = self._cut_x(x, cut=cut)
                counts[0] = sum(of_x)
            if comm.rank in (first, last) and batch.has_loss:
                y = as_tensors(y, "y")
                outputs = self._outputs if cut else 0  # otherwise a list is one of microbatches
                sample_weight = weights_as_tensors(sample_weight, outputs)
                if first != last:
                    given = BatchDigests(y=digest(y), sample_weight=digest(sample_weight))
                if y is not None:
                    pairs, of_y = self._cut_y(y, sample_weight, cut=cut)
                    counts[1] = sum(of_y)
                    if comm.rank == last:
                        self._weigh(batch, loss.weights, x, pairs, of_y, cut=cut)
                elif comm.rank == last and loss.function is not None:
                    raise UsageError(f"pipeline: rank {comm.rank} has the last stage: pass y on it")
        except Exception as caught:
            error, counts = caught, [_FAILED] * 2
        every = agree_on_kind(comm, kind, [*counts, compiled_digest, *given])
        if error is not None:
            raise error
        if batch.has_loss and len(set(every[:, 2])) > 1:
            check_agreement(comm, "pipeline: compile", compiled)
        failed = [rank for rank, numbers in enumerate(every) if numbers[0] == _FAILED]
        if failed:
            raise UsageError(f"pipeline: the batch of rank {failed[0]} is invalid: see the error on that rank")
        rows = int(every[first][0])
        if batch.has_loss and every[last][1] not in (rows, *([NONE] if loss.function is None else [])):
            raise UsageError(f"pipeline: x has {rows} rows on rank {first}, y has {every[last][1]} on rank {last}")
        if batch.has_loss:
            all_given = [BatchDigests(*map(int, numbers[3:])) for numbers in every]
            if fault := pipe.difference(all_given, lambda: digest(as_tensors(x, "x"))):
                raise UsageError(fault)
        batch.rows = self._counts(rows, of_x, of_y, cut=cut)
        batch.row_shares = shares_in_updates(batch.rows, pipe.schedule.every)
        if inputs is not None:
            batch.inputs = [{} if own is None else dict(zip(self._inputs, own, strict=True)) for own in inputs]
        return rows, y, sample_weight

    def _cut_x(self, x: Any, *, cut: bool) -> tuple[list[Any], list[int]]:
        """Return the inputs of each microbatch, and its number of rows."""
        graph, count = self._graph, self._microbatches
        if cut:
            return cut_by_rows(inputs_of(graph, x), count, "x", places_of(graph, x, self._rows.x))
        check_parts(x, count, "x")
        return cut_by_user([inputs_of(graph, part) for part in x], count, "x", places_of(graph, x[0], self._rows.x))

    def _cut_y(self, y: Any, sample_weight: Any, *, cut: bool) -> tuple[list[Any], list[int]]:
        """Return target and sample weight of each microbatch, and its number of rows."""
        where, count = (self._rows.y, 0), self._microbatches
        if cut:
            return cut_by_rows((y, sample_weight), count, "y", where)
        check_parts(y, count, "y")
        weights = [None] * len(y) if sample_weight is None else sample_weight
        if not isinstance(weights, list | tuple) or len(weights) != len(y):
            raise UsageError(f"pipeline: sample_weight: expected a list of {len(y)} microbatches, like y")
        return cut_by_user(list(zip(y, weights, strict=True)), count, "y", where)

    def _counts(self, rows: int, of_x: list[int], of_y: list[int], *, cut: bool) -> list[int]:
        """Return the rows of each microbatch. Raises UsageError on all ranks if x and y differ in rows."""
        if cut:
            return [part.stop - part.start for part in rows_of(rows, self._microbatches)]
        counts = self._pipe.comm.all_gather_object((of_x, of_y))
        of_x, of_y = counts[self._pipe.first][0], counts[self._pipe.last][1]
        if of_x != of_y:
            raise UsageError(
                f"pipeline: microbatches of x have {of_x} rows, microbatches of y {of_y}: both must come from one batch"
            )
        return of_x

    def _weigh(
        self, batch: Batch, losses: LossWeights, x: Any, pairs: Sequence[Any], counts: list[int], *, cut: bool
    ) -> None:
        """Set the weights of microbatches' losses, on the rank of the last stage."""
        batch.targets = [None if pair is None else pair[0] for pair in pairs]
        batch.sample_weights = [None if pair is None else pair[1] for pair in pairs]
        inputs: Sequence[Any] = ()
        if losses.wants_inputs and x is not None:
            parted = cut_by_rows if cut else cut_by_user
            inputs = parted(as_tensors(x, "x"), self._microbatches, "x", self._rows.x)[0]
        batch.weights = losses.weights(counts, batch.targets, batch.sample_weights, inputs)
        batch.shares = batch.weights.in_updates(self._pipe.schedule.every)
        batch.looks = losses.wants_check(batch.targets, counts)
