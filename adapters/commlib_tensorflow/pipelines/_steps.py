"""StepRunner: run a batch through a pipeline of Keras stages, and return the same loss on every rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.communicator import Communicator
from commlib.comparison.agreement import describe
from commlib.comparison.parameter_check import check_agreement
from commlib.errors import MismatchError, UsageError
from commlib.pipeline.batch import NONE, BatchDigests, rows_of, shares, shares_in_updates
from commlib.pipeline.losses import MicrobatchWeights, Weigh, Weigher
from commlib.pipeline.pipe import Codecs, Pipe
from commlib.pipeline.rows import WHOLE, Rows, check_parts, each
from commlib.pipeline.schedule import Kind as Action
from commlib.pipeline.schedule import Schedule
from commlib_tensorflow._bridge import to_array, to_tensor
from commlib_tensorflow._placement import place_of
from commlib_tensorflow.devices import use_device_stream
from commlib_tensorflow.pipelines._batch_statistics import WholeBatchStatistics
from commlib_tensorflow.pipelines._batches import (
    as_tensors,
    cut_by_rows,
    cut_by_user,
    digest,
    inputs_of,
    join_microbatches,
    places_of,
    weights_as_tensors,
)
from commlib_tensorflow.pipelines._call_kinds import CallKind, agree_on_kind
from commlib_tensorflow.pipelines._compile_settings import options_of_layers
from commlib_tensorflow.pipelines._layer_checks import check_layers
from commlib_tensorflow.pipelines._losses import LossWeights
from commlib_tensorflow.pipelines._parts import MASK, SplitModel
from commlib_tensorflow.pipelines._recompute import LayerRecompute, recompute_text
from commlib_tensorflow.pipelines._replicas import ByStages
from commlib_tensorflow.pipelines._stages import Batch, TensorflowStage, TensorflowTensors
from commlib_tensorflow.pipelines._tied_weights import TiedWeights
from commlib_tensorflow.pipelines._trainable_state import TrainableState
from commlib_tensorflow.pipelines._variable_values import VariableValues

_FAILED = -2
"""Replaces a number of rows if the batch is invalid."""


@dataclass(slots=True)
class BatchResult:
    """Result of a batch.

    losses (of microbatches), outputs (flat), their masks, target and sample_weight: on the last stage's rank, if
    requested.
    """

    loss: float
    rows: int
    losses: dict[int, float] = field(default_factory=dict)
    outputs: list[tf.Tensor] | None = None
    masks: list[tf.Tensor | None] = field(default_factory=list)
    target: Any = None
    sample_weight: Any = None


class StepRunner:
    """This rank's stages, and the runner of batches. Construction is collective. model: the whole model."""

    def __init__(
        self,
        comm: Communicator,
        model: Any,
        pieces: SplitModel,
        schedule: Schedule,
        *,
        checkpoint: str | Sequence[LayerRecompute],
        batch_norm: str,
        codec: Codecs,
        weigh: Weigh,
        rows: Rows,
    ) -> None:
        self._where = rows
        self.graph, self._inputs, self._weigher = pieces.graph, pieces.inputs, Weigher(weigh)
        self._microbatches = schedule.microbatches
        self._masked = [name + MASK in pieces.masks for name in pieces.outputs]
        check_layers(pieces.parts, schedule.microbatches)
        own = schedule.stages_of(comm.rank)
        splits = any(action.kind is Action.I for program in schedule.programs for action in program)
        self._again = splits or (isinstance(checkpoint, str) and checkpoint != "none")
        self._keeps_products = checkpoint == "selective"
        layers_again = () if isinstance(checkpoint, str) or self._again else checkpoint
        self.parts = [pieces.parts[number] for number in own]
        # Of all stages, so that all ranks refuse the same model.
        self._statistics = WholeBatchStatistics(pieces.parts) if batch_norm == "batch" else None
        self._trainable = TrainableState(pieces.parts, model, f"rank {comm.rank} of {comm.size}")
        self.tied = TiedWeights.find(comm, pieces.parts, schedule.placement)
        if schedule.every and (self.tied.exist or schedule.stages > schedule.ranks):
            what = "layers that stages on several ranks share" if self.tied.exist else "several stages on a rank"
            raise UsageError(f"pipeline: schedule {schedule.name} updates stages one by one and takes no {what}")
        self.variables = {id(variable): variable for part in self.parts for variable in part.variables}
        """This rank's variables, by their id."""
        self._values, self._updates = VariableValues(self.variables.values()), bool(schedule.every)
        last = schedule.stages - 1
        self.stages = {number: self._stage(number, pieces, layers_again, is_last=number == last) for number in own}
        """This rank's stages, by number."""
        first_use = {id(v): number for number, part in reversed(list(enumerate(pieces.parts))) for v in part.variables}
        self._first_use = first_use
        self.gradients: dict[int, tf.Tensor] = {}
        """Sums over all steps so far, by the id of the variable."""
        lines = [
            f"split {pieces.counts}",
            f"codec {codec}",
            f"checkpoint {recompute_text(checkpoint)}",
            f"batch_norm {batch_norm}",
            str(rows),
            f"weigh {describe(weigh)}",
        ]
        for number, part in enumerate(pieces.parts):
            lines += [f"stage {number}: {_describe(variable)}" for variable in part.variables]
            lines += options_of_layers(number, part)
        self._place = place_of(self.variables.values())
        self._tensors = TensorflowTensors(self._place)
        self._loss: Any = None
        self._compiled: Sequence[str] = ()
        self._losses = self.losses_of(None)
        self.pipe = Pipe(comm, schedule, pieces.links, self.stages, self._tensors, codec=codec, lines=lines)
        """Runs the schedule."""
        self.tied.spread()

    def _stage(
        self, number: int, pieces: SplitModel, layers_again: Sequence[LayerRecompute], *, is_last: bool
    ) -> TensorflowStage:
        own = {id(layer) for layer in pieces.parts[number]._flatten_layers()}
        return TensorflowStage(
            number,
            pieces.parts[number],
            {link.source: names for link, names in pieces.values.items() if link.target == number},
            {link.target: names for link, names in pieces.values.items() if link.source == number},
            outputs=pieces.outputs if is_last else (),
            masks=pieces.masks if is_last else (),
            values=self._values,
            again=self._again,
            layers_again=[one for one in layers_again if id(one.layer) in own],
            keeps_products=self._keeps_products,
            statistics=self._statistics,
            versions=self._updates,
            checks_rows=self._weigher.checks_rows,
        )

    def losses_of(self, loss: Any) -> LossWeights:
        """Return the weights of microbatches for a loss of compile(). Raises UsageError for an invalid loss."""
        names, masked = self.graph.output_names, self._masked
        return LossWeights(loss, names, self._weigher, microbatches=self._microbatches, masked=masked)

    def prepare(
        self,
        loss: Any,
        losses: LossWeights,
        *,
        eager: bool,
        update: Callable[[Sequence[Any], Sequence[Any]], None],
        compiled: Sequence[str],
        roots: Sequence[Any],
    ) -> None:
        """Prepare for training: set the loss and its weights, the variables that are trainable now, and their update.

        compiled: lines that have to be the same on all ranks; they are compared when the next batch begins. roots: the
        models around the stages. Collective if stages on several ranks share weights.
        """
        self._trainable.settle()
        self._trainable.check_roots(roots)
        self._loss, self._losses = loss, losses
        self._compiled = [*compiled, *self._trainable.lines()]
        self.tied.settle()

        def update_stage(stage: TensorflowStage) -> None:
            stage.regularization(gradients=True)
            gradients, stage.batch.gradients = stage.batch.gradients, {}
            trainable = stage.functions.trainable
            self._values.updated()
            update(trainable, [gradients.get(id(variable)) for variable in trainable])

        self._complete = self._completed()
        shared = [variable for variable in self.variables.values() if self.tied.has(variable)]
        for number, stage in self.stages.items():
            regularized = [
                variable
                for variable in stage.part.trainable_variables
                if variable.regularizer is not None and self._first_use[id(variable)] == number
            ]
            stage.prepare(loss, regularized=regularized, shared=shared, eager=eager, update=update_stage)

    def _completed(self) -> dict[int, list[Any]]:
        """Return the variables whose gradients each stage completes, in the order of the stages' last gradients.

        Variables that other ranks share are left out.
        """
        last = self.pipe.runner.last_gradients
        outputs: dict[int, list[Any]] = {number: [] for number in sorted(self.stages, key=last.__getitem__)}
        owners = {id(v): number for number in outputs for v in self.stages[number].part.trainable_variables}
        for number, own in outputs.items():
            for variable in self.stages[number].part.trainable_variables:
                if owners[id(variable)] == number and not self.tied.has(variable):
                    own.append(variable)
        return outputs

    def run(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        *,
        is_training: bool = False,
        has_loss: bool = True,
        keeps_outputs: bool = False,
        keeps_losses: bool = False,
        cut: bool = True,
        scale: float = 1.0,
        by_stages: ByStages | None = None,
    ) -> BatchResult:
        """Run a batch; return its loss, on every rank. Gradients are added to `gradients`. Collective.

        cut: False if x, y and sample_weight are lists of microbatches. by_stages: may reduce gradients over replicas
        while stages still compute, if an optimizer applies them next.
        """
        schedule = self.pipe.schedule
        self._trainable.check_variables()
        if is_training:
            self._trainable.check()
        batch = Batch(is_training=is_training, has_loss=has_loss, keeps_outputs=keeps_outputs, scale=scale)
        rows, target, weight = self._begin(batch, x, y, sample_weight, cut=cut)
        if by_stages is not None and not schedule.every and not self.gradients:
            batch.reduction = by_stages(self._complete)
        self._values.begin()
        if self._statistics is not None:
            self._statistics.begin()
        for stage in self.stages.values():
            stage.batch = batch
        try:
            # A batch without rows runs as in one process: as a single empty microbatch.
            empty = {number for number, count in enumerate(batch.rows) if not count and (rows or number)}
            with nullcontext() if self._place is None else use_device_stream(self._place.device):
                if is_training:
                    self.pipe.train(empty)
                else:
                    self.pipe.forward(empty)
                self._tensors.end()
            loss = self._end(batch) if has_loss else 0.0
            self._values.end()
            result = BatchResult(loss, rows, target=target, sample_weight=weight)
            result.losses = {number: float(value) for number, value in batch.losses.items()} if keeps_losses else {}
            if keeps_outputs and self.pipe.comm.rank == self.pipe.last:
                result.outputs, result.masks = self._outputs(batch)
            return result
        finally:
            for stage in self.stages.values():
                stage.clear()
            self._values.begin()

    def _begin(self, batch: Batch, x: Any, y: Any, sample_weight: Any, *, cut: bool) -> tuple[int, Any, Any]:
        """Cut the batch, and agree on its rows. Raises UsageError on all ranks if the batch of one rank is invalid."""
        comm, first, last = self.pipe.comm, self.pipe.first, self.pipe.last
        counts, inputs, error = [NONE] * 2, None, None
        given = BatchDigests()
        compiled = zlib.crc32("\n".join(self._compiled).encode())
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
                outputs = len(self._masked) if cut else 0  # otherwise a list is one of microbatches
                sample_weight = weights_as_tensors(sample_weight, outputs)
                if first != last:
                    given = BatchDigests(y=digest(y), sample_weight=digest(sample_weight))
                if y is not None:
                    pairs, of_y = self._cut_y(y, sample_weight, cut=cut)
                    counts[1] = sum(of_y)
                    if comm.rank == last:
                        self._weigh(batch, x, pairs, of_y, cut=cut)
                elif comm.rank == last and self._loss is not None:
                    raise UsageError(f"pipeline: rank {comm.rank} has the last stage: pass y on it")
        except Exception as caught:
            error, counts = caught, [_FAILED] * 2
        every = agree_on_kind(comm, kind, [*counts, compiled, *given])
        if error is not None:
            raise error
        if batch.has_loss and len(set(every[:, 2])) > 1:
            check_agreement(comm, "pipeline: compile", self._compiled)
        failed = [rank for rank, numbers in enumerate(every) if numbers[0] == _FAILED]
        if failed:
            raise UsageError(f"pipeline: the batch of rank {failed[0]} is invalid: see the error on that rank")
        rows = int(every[first][0])
        if batch.has_loss and every[last][1] not in (rows, *([NONE] if self._loss is None else [])):
            raise UsageError(f"pipeline: x has {rows} rows on rank {first}, y has {every[last][1]} on rank {last}")
        if batch.has_loss:
            all_given = [BatchDigests(*map(int, numbers[3:])) for numbers in every]
            if fault := self.pipe.difference(all_given, lambda: digest(as_tensors(x, "x"))):
                raise UsageError(fault)
        batch.rows = self._counts(rows, of_x, of_y, cut=cut)
        batch.row_shares = shares_in_updates(batch.rows, self.pipe.schedule.every)
        if inputs is not None:
            batch.inputs = [{} if own is None else dict(zip(self._inputs, own, strict=True)) for own in inputs]
        return rows, y, sample_weight

    def _cut_x(self, x: Any, *, cut: bool) -> tuple[list[Any], list[int]]:
        """Return the inputs of each microbatch, and its number of rows."""
        graph, count = self.graph, self._microbatches
        if cut:
            return cut_by_rows(inputs_of(graph, x), count, "x", places_of(graph, x, self._where.x))
        check_parts(x, count, "x")
        return cut_by_user([inputs_of(graph, part) for part in x], count, "x", places_of(graph, x[0], self._where.x))

    def _cut_y(self, y: Any, sample_weight: Any, *, cut: bool) -> tuple[list[Any], list[int]]:
        """Return target and sample weight of each microbatch, and its number of rows."""
        where = self._where.y, 0
        if cut:
            return cut_by_rows((y, sample_weight), self._microbatches, "y", where)
        check_parts(y, self._microbatches, "y")
        weights = [None] * len(y) if sample_weight is None else sample_weight
        if not isinstance(weights, list | tuple) or len(weights) != len(y):
            raise UsageError(f"pipeline: sample_weight: expected a list of {len(y)} microbatches, like y")
        return cut_by_user(list(zip(y, weights, strict=True)), self._microbatches, "y", where)

    def _counts(self, rows: int, of_x: list[int], of_y: list[int], *, cut: bool) -> list[int]:
        """Return the rows of each microbatch. Raises UsageError on all ranks if x and y differ in rows."""
        if cut:
            return [part.stop - part.start for part in rows_of(rows, self._microbatches)]
        counts = self.pipe.comm.all_gather_object((of_x, of_y))
        of_x, of_y = counts[self.pipe.first][0], counts[self.pipe.last][1]
        if of_x != of_y:
            raise UsageError(
                f"pipeline: microbatches of x have {of_x} rows, microbatches of y {of_y}: both must come from one batch"
            )
        return of_x

    def agree_to_stop(self, stops: bool, rate: float | None) -> bool:
        """Return whether any rank wants to stop after an epoch. Collective.

        rate: the learning rate; None if there is none. Raises MismatchError on all ranks if ranks have different rates.
        """
        own = [int(stops), rate is not None, int(np.float64(rate or 0.0).view(np.int64))]
        every = agree_on_kind(self.pipe.comm, CallKind.END_EPOCH, [*own, *BatchDigests()])
        rates = {rank: float(bits.view(np.float64)) for rank, bits in enumerate(every[:, 2]) if every[rank, 1]}
        if len(set(rates.values())) > 1:
            text = ", ".join(f"{value:g} on rank {rank}" for rank, value in rates.items())
            raise MismatchError(
                f"pipeline: ranks have different learning rates after an epoch of fit: {text} (this is rank "
                f"{self.pipe.comm.rank} of {self.pipe.comm.size}): all ranks need the callbacks that set it"
            )
        return bool(every[:, 0].any())

    def _weigh(self, batch: Batch, x: Any, pairs: Sequence[Any], counts: list[int], *, cut: bool) -> None:
        """Set the weights of microbatches' losses, on the rank of the last stage."""
        losses = self._losses
        batch.targets = [None if pair is None else pair[0] for pair in pairs]
        batch.sample_weights = [None if pair is None else pair[1] for pair in pairs]
        inputs: Sequence[Any] = ()
        if losses.wants_inputs and x is not None:
            parted = cut_by_rows if cut else cut_by_user
            inputs = parted(as_tensors(x, "x"), self._microbatches, "x", self._where.x)[0]
        batch.weights = losses.weights(counts, batch.targets, batch.sample_weights, inputs)
        batch.shares = batch.weights.in_updates(self.pipe.schedule.every)
        batch.looks = losses.wants_check(batch.targets, counts)

    def _end(self, batch: Batch) -> float:
        """Complete gradients and loss, and assign the new states of layers to the variables."""
        schedule = self.pipe.schedule
        flushes = batch.is_training and not schedule.every
        for number, stage in self.stages.items():
            if number not in batch.penalties:
                batch.penalties[number] = stage.regularization(gradients=flushes)
        own = sum(value for _, value in sorted(batch.penalties.items()))
        of_rows = shares(batch.rows)
        for (_, number), (values, sums) in sorted(batch.extras.items()):
            own += float(np.where(np.array(sums, bool), 1.0, of_rows[number]) @ to_array(values))
        if batch.losses:
            assert batch.weights is not None
            in_batch = batch.weights.in_batch()
            own += sum(float(value) * in_batch[number] for number, value in sorted(batch.losses.items()))
        if batch.is_training and self._statistics is not None:
            self._statistics.end()
        if flushes:
            self.tied.add_up(batch.gradients)
            if batch.reduction is not None:
                batch.gradients = batch.reduction.finish(batch.gradients)
            for key, gradient in batch.gradients.items():
                self.gradients[key] = self.gradients[key] + gradient if key in self.gradients else gradient
        fault = next((stage.fault for stage in self.stages.values() if stage.fault), "")
        fault = fault or (self._fault(batch) if batch.looks else "")
        has_any = bool(batch.losses or batch.extras or any(one.functions.regularized for one in self.stages.values()))
        reports = self.pipe.comm.all_gather(np.array([[own, float(bool(fault)), float(has_any)]]))
        if reports[:, 1].any():
            self.pipe.refuse(self.pipe.comm.broadcast_object(fault, int(reports[:, 1].argmax())))
        if self._loss is None and not reports[:, 2].any():
            self.pipe.refuse("pipeline: there is no loss: give loss= to pipeline() or to compile()")
        return float(sum(reports[:, 0]))

    def _fault(self, batch: Batch) -> str:
        """Return an error text if the losses of microbatches disagree with the loss of some of them together; or ""."""
        numbers = sorted(batch.outputs)
        if len(numbers) < 2 or batch.weights is None:
            return ""
        weights = MicrobatchWeights(tuple(batch.weights.terms[number] for number in numbers), batch.weights.is_sum)
        if numbers[0] not in batch.losses:
            return ""
        try:
            again, whole = (float(self._loss_together(batch, some)) for some in (numbers[:1], numbers))
        except Exception:  # a loss that fails for several microbatches cannot be compared
            return ""
        losses = [batch.losses.get(number, tf.zeros((), tf.float64)) for number in numbers]
        return self._losses.fault(again, whole, losses, weights)

    def _loss_together(self, batch: Batch, numbers: Sequence[int]) -> Any:
        """Return the loss of some microbatches as one."""
        outputs, masks = self._outputs(batch, numbers)
        for output, mask in zip(outputs, masks, strict=True):
            if mask is not None:
                output._keras_mask = mask  # Keras looks for the mask in this attribute
        target = _concatenate([batch.targets[n] for n in numbers], self._where.y)
        weight = _concatenate([batch.sample_weights[n] for n in numbers], 0)
        return self._loss(target, outputs, weight)

    def _outputs(
        self, batch: Batch, numbers: Sequence[int] | None = None
    ) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
        """Return the concatenated outputs of some microbatches, or of all, and their masks."""
        parts = [batch.outputs[number] for number in (sorted(batch.outputs) if numbers is None else numbers)]
        rows = [batch.rows[number] for number in (sorted(batch.outputs) if numbers is None else numbers)]
        count, places = len(self._masked), self.places_of_outputs
        every = [*places, *(place for place, is_masked in zip(places, self._masked, strict=True) if is_masked)]
        whole = [
            join_microbatches(own, rows, place) for own, place in zip(zip(*parts, strict=True), every, strict=True)
        ]
        masks = iter(whole[count:])
        return whole[:count], [next(masks) if is_masked else None for is_masked in self._masked]

    @property
    def places_of_outputs(self) -> list[Any]:
        """The row dimension of each output."""
        where = self._where.output
        if isinstance(where, dict):
            where = {key: where.get(key, 0) for key in self.graph.output}
        dims = keras.tree.flatten(where) if isinstance(where, dict | list | tuple) else [where] * len(self._masked)
        if len(dims) != len(self._masked):
            raise UsageError(f"pipeline: rows={self._where.output} does not match the {len(self._masked)} outputs")
        return dims

    def shared(self, outputs: list[tf.Tensor] | None) -> list[tf.Tensor]:
        """Return the last stage's outputs on every rank. Collective."""
        comm, last = self.pipe.comm, self.pipe.last
        arrays = [] if outputs is None else [to_array(output) for output in outputs]
        specs = comm.broadcast_object([(array.shape, array.dtype) for array in arrays], last)
        if comm.rank != last:
            arrays = [np.empty(shape, dtype) for shape, dtype in specs]
        for array in arrays:
            comm.broadcast(array, last)
        return outputs if outputs is not None else [to_tensor(array) for array in arrays]

    def nest(self, outputs: Sequence[Any]) -> Any:
        """Return outputs with the nesting of the model's: a single tensor if there is only one."""
        nested = keras.tree.pack_sequence_as(self.graph.output, list(outputs))
        return nested[0] if isinstance(nested, list | tuple) and len(nested) == 1 else nested


def _concatenate(values: Sequence[Any], where: Any) -> Any:
    """Concatenate nested tensors of several microbatches."""

    def one(place: Any, *leaves: Any) -> Any:
        return (
            leaves[0] if leaves[0] is None or not len(leaves[0].shape) or place == WHOLE else tf.concat(leaves, place)
        )

    return each(one, where, *values)


def _describe(variable: Any) -> str:
    """Describe a variable without the numbers in its name: Keras counts the objects that a process has made."""
    return f"{variable.name.rstrip('0123456789')} {tuple(variable.shape)} {variable.dtype}"
