"""StepRunner: run a batch through a pipeline of Keras stages, and return the same loss on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.communicator import Communicator
from commlib.comparison.agreement import describe
from commlib.pipeline.batch import shares
from commlib.pipeline.losses import Weigh, Weigher
from commlib.pipeline.pipe import Codecs, Pipe
from commlib.pipeline.rows import Rows
from commlib.pipeline.schedule import Schedule
from commlib_tensorflow._bridge import to_array
from commlib_tensorflow._placement import place_of
from commlib_tensorflow.devices import use_device_stream
from commlib_tensorflow.pipelines._batch_reader import BatchReader
from commlib_tensorflow.pipelines._batch_statistics import WholeBatchStatistics
from commlib_tensorflow.pipelines._layer_checks import check_layers
from commlib_tensorflow.pipelines._loss_check import fault_in
from commlib_tensorflow.pipelines._losses import CompiledLoss, LossWeights
from commlib_tensorflow.pipelines._model_outputs import ModelOutputs
from commlib_tensorflow.pipelines._own_stages import check_updates, lines_of, stages_of
from commlib_tensorflow.pipelines._parts import MASK, SplitModel
from commlib_tensorflow.pipelines._recompute import LayerRecompute, recompute_text
from commlib_tensorflow.pipelines._replicas import ByStages
from commlib_tensorflow.pipelines._stages import Batch, TensorflowStage, TensorflowTensors
from commlib_tensorflow.pipelines._tied_weights import TiedWeights
from commlib_tensorflow.pipelines._trainable_state import TrainableState
from commlib_tensorflow.pipelines._variable_values import VariableValues


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
        self.graph, self._weigher, self._where = pieces.graph, Weigher(weigh), rows
        self.outputs = ModelOutputs(pieces.graph, [name + MASK in pieces.masks for name in pieces.outputs], rows.output)
        """The model's outputs."""
        check_layers(pieces.parts, schedule.microbatches)
        self.parts = [pieces.parts[number] for number in schedule.stages_of(comm.rank)]
        # Of all stages, so that all ranks refuse the same model.
        self._statistics = WholeBatchStatistics(pieces.parts) if batch_norm == "batch" else None
        self._trainable = TrainableState(pieces.parts, model, f"rank {comm.rank} of {comm.size}")
        self.tied = TiedWeights.find(comm, pieces.parts, schedule.placement)
        check_updates(schedule, self.tied)
        self.variables = {id(variable): variable for part in self.parts for variable in part.variables}
        """This rank's variables, by their id."""
        self._values = VariableValues(self.variables.values())
        self.stages = stages_of(
            pieces, schedule, comm.rank, checkpoint=checkpoint, values=self._values, statistics=self._statistics,
            checks_rows=self._weigher.checks_rows,
        )  # fmt: skip
        """This rank's stages, by number."""
        stages = list(enumerate(pieces.parts))
        self._first_use = {id(variable): number for number, part in reversed(stages) for variable in part.variables}
        self.gradients: dict[int, tf.Tensor] = {}
        """Sums over all steps so far, by the id of the variable."""
        lines = [
            f"split {pieces.counts}",
            f"codec {codec}",
            f"checkpoint {recompute_text(checkpoint)}",
            f"batch_norm {batch_norm}",
            str(rows),
            f"weigh {describe(weigh)}",
            *lines_of(pieces.parts),
        ]
        self._place = place_of(self.variables.values())
        self._tensors = TensorflowTensors(self._place)
        self._compiled: Sequence[str] = ()
        self.pipe = Pipe(comm, schedule, pieces.links, self.stages, self._tensors, codec=codec, lines=lines)
        """Runs the schedule."""
        self._reader = BatchReader(self.pipe, pieces, rows)
        self._loss = CompiledLoss(None, self.losses_of(None))
        self.tied.spread()

    def losses_of(self, loss: Any) -> LossWeights:
        """Return the weights of microbatches for a loss of compile(). Raises UsageError for an invalid loss."""
        names, count = self.graph.output_names, self.pipe.schedule.microbatches
        return LossWeights(loss, names, self._weigher, microbatches=count, masked=self.outputs.masked)

    def prepare(
        self,
        loss: CompiledLoss,
        *,
        eager: bool,
        update: Callable[[Sequence[Any], Sequence[Any]], None],
        compiled: Sequence[str],
        roots: Sequence[Any],
    ) -> None:
        """Prepare for training: set the loss, the variables that are trainable now, and their update.

        compiled: lines that have to be the same on all ranks; they are compared when the next batch begins. roots: the
        models around the stages. Collective if stages on several ranks share weights.
        """
        self._trainable.settle()
        self._trainable.check_roots(roots)
        self._loss = loss
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
            stage.prepare(loss.function, regularized=regularized, shared=shared, eager=eager, update=update_stage)

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
        rows, target, weight = self._reader.read(batch, x, y, sample_weight, self._loss, self._compiled, cut=cut)
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
                result.outputs, result.masks = self.outputs.join(batch)
            return result
        finally:
            for stage in self.stages.values():
                stage.clear()
            self._values.begin()

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
        fault = fault or (fault_in(batch, self._loss, self.outputs, self._where.y) if batch.looks else "")
        has_any = bool(batch.losses or batch.extras or any(one.functions.regularized for one in self.stages.values()))
        reports = self.pipe.comm.all_gather(np.array([[own, float(bool(fault)), float(has_any)]]))
        if reports[:, 1].any():
            self.pipe.refuse(self.pipe.comm.broadcast_object(fault, int(reports[:, 1].argmax())))
        if self._loss.function is None and not reports[:, 2].any():
            self.pipe.refuse("pipeline: there is no loss: give loss= to pipeline() or to compile()")
        return float(sum(reports[:, 0]))
