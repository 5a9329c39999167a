"""StepRunner: run batches through a pipeline of torch stages, with the same loss on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.pipeline.batch import shares_in_updates
from commlib.pipeline.losses import CheckSchedule, Details
from commlib.pipeline.pipe import Pipe
from commlib.pipeline.rows import Rows
from commlib.pipeline.schedule import Kind
from commlib_torch._autograd import backward_passes
from commlib_torch._guards import Guards
from commlib_torch.devices import use_device_streams
from commlib_torch.pipelines._batch_statistics import WholeBatchStatistics
from commlib_torch.pipelines._batches import arguments, cut_by_rows, cut_by_user, digest
from commlib_torch.pipelines._first_comparison import FirstComparison
from commlib_torch.pipelines._graphs import OuterGraphs
from commlib_torch.pipelines._hooks import registrations
from commlib_torch.pipelines._losses import LossWeights
from commlib_torch.pipelines._model_layers import ModelLayers
from commlib_torch.pipelines._results import details_of, loss_of, outputs_of
from commlib_torch.pipelines._shared_buffers import SharedBuffers
from commlib_torch.pipelines._stage_module import StageModule
from commlib_torch.pipelines._stages import Batch, TorchStage, TorchTensors, in_mode
from commlib_torch.pipelines._tied_weights import TiedWeights

_NOTHING = nullcontext()


class StepRunner:
    """Runs batches through this rank's stages. module: owns them. has_extras: layers have losses of their own.

    on_meta: weights are still on the meta device, and must be moved before the first batch.
    """

    def __init__(
        self,
        module: StageModule,
        pipe: Pipe,
        stages: Mapping[int, TorchStage],
        tensors: TorchTensors,
        *,
        losses: LossWeights,
        tied: TiedWeights,
        shared_buffers: SharedBuffers,
        rows: Rows,
        has_extras: bool,
        on_meta: bool,
    ) -> None:
        self._module, self._pipe, self._stages, self._tensors = module, pipe, stages, tensors
        self._losses, self._tied, self._shared_buffers = losses, tied, shared_buffers
        self._where, self._has_extras, self._on_meta = rows, has_extras, on_meta
        self._splits = any(action.kind is Kind.I for program in pipe.schedule.programs for action in program)
        self._batch, self._rows = Batch(), list[int]()
        self._looks, self._checks_rows = CheckSchedule(), losses.weigher.checks_rows
        self.statistics: WholeBatchStatistics | None = None
        """Computes running statistics of whole batches, if requested."""
        self.readings = Guards()
        """Values that the forwards of a traced model have read, and which must not change."""
        self.layers: ModelLayers | None = None
        """The layers of the model when it was split."""
        self.comparison: FirstComparison | None = None
        """The comparison of the first batch, while it is pending."""

    def train(self, x: Any, y: Any, *, details: bool, **options: Any) -> Tensor | Details:
        """Run forward and backward on a batch, and return its loss, or details. Collective."""
        self._check_loss(x)
        graphs = OuterGraphs()
        if self._pipe.comm.rank == self._pipe.first:
            x = graphs.detach(x)
        of_x = len(graphs.origins)
        if self._pipe.comm.rank == self._pipe.last:
            y = graphs.detach(y)
        with self._batch_of(x, y, is_training=True, **options) as empty, backward_passes.shared(self._pipe.comm):
            self._batch.of_x, self._batch.of_y = graphs.origins[:of_x], graphs.origins[of_x:]
            self._tied.begin(self._pipe.comm)
            with (
                registrations.counting() if self._splits else _NOTHING,
                self._shared_buffers.check_unchanged(),
                self.statistics.step() if self.statistics is not None else _NOTHING,
                self._tied.separate_gradients(),
                backward_passes.as_one(self._pipe.comm, self._module),
                use_device_streams(),
            ):
                self._pipe.train(empty)
                graphs.backward()
            self._tied.add_up(self._pipe.comm)
            return self._result(details=details, outside=len(backward_passes.started))

    def evaluate(self, x: Any, y: Any, *, details: bool, **options: Any) -> Tensor | Details:
        """Return the loss of a batch in evaluation mode, or details. Collective."""
        self._check_loss(x)
        with self._in_evaluation(), self._batch_of(x, y, **options) as empty:
            with use_device_streams():
                self._pipe.forward(empty)
            return self._result(details=details)

    def predict(self, x: Any, *, cut: bool) -> Any:
        """Return the model's output for a batch in evaluation mode. Collective."""
        with self._in_evaluation(), self._batch_of(x, None, cut=cut, wants_outputs=True) as empty:
            with use_device_streams():
                self._pipe.forward(empty)
            return outputs_of(self._pipe, self._batch, self._rows, self._where.output, self._fault())

    def _fault(self) -> str:
        """Return the description of a row dependence in this rank's stages, if there is one."""
        return next(filter(None, [stage.look.fault() for stage in self._stages.values()]), "")

    def _check_loss(self, x: Any) -> None:
        """Raise UsageError on all ranks if there is no loss, or if x is missing."""
        if self._losses.loss is None:
            self._check_x(x)
            raise UsageError(
                "pipeline: there is no loss: pass loss= to pipeline(), a function of (output, target), or of the "
                "output alone if step is called without y, such as loss=lambda output: output.loss; or call predict"
            )

    def _check_x(self, x: Any) -> None:
        rank = self._pipe.comm.rank
        if rank == self._pipe.first and x is None:
            raise UsageError(f"pipeline: rank {rank} has the first stage: pass x on it")

    def _in_evaluation(self) -> Any:
        return in_mode(list(self._module.children()), training=False)

    def _result(self, *, details: bool, outside: int = 0) -> Tensor | Details:
        loss, reduces = loss_of(self._pipe, self._batch, self._rows, self._losses, self._fault(), outside=outside)
        if reduces:
            backward_passes.end_shared(self._pipe.comm)
        return details_of(self._pipe, self._batch, self._rows, self._where.output, loss) if details else loss

    @contextmanager
    def _batch_of(self, x: Any, y: Any, **options: Any) -> Iterator[set[int]]:
        """Run a batch within the context. All ranks get an error of any rank, and its state is discarded."""
        was_meta = self._on_meta
        if was_meta:  # ranks agree again on the devices of values
            self._tensors.find(self._first())
            self._pipe.reopen_next()
        with self._pipe.together():
            # Before any error that is local to one rank: all ranks count the same batches.
            is_due = self._looks.is_due(())
            looks = self._pipe.schedule.microbatches > 1 and self._checks_rows and is_due
            try:
                self.readings.check()
                if self.layers is not None:
                    self.layers.check()
                if was_meta:
                    self._refuse_meta()
                empty = self._begin(x, y, looks_at_rows=looks, **options)
                if is_due and not self._batch.wants_outputs:
                    self._pipe.compare_batches(partial(digest, x), partial(digest, y))
                is_compared = self.comparison is not None and self.comparison.compare(self._batch.inputs, self._rows)
                yield empty
                if is_compared and self.comparison is not None:
                    # after a failed batch, all ranks treat the next one as the first
                    self.comparison.end()
                    self.comparison = None
            finally:
                for stage in self._stages.values():
                    stage.clear()
                self._batch = Batch()

    def _begin(
        self,
        x: Any,
        y: Any,
        *,
        looks_at_rows: bool,
        is_training: bool = False,
        wants_outputs: bool = False,
        keeps_outputs: bool = False,
        scale: float = 1.0,
        cut: bool = True,
    ) -> set[int]:
        """Cut the batch; return which microbatches are empty, on the first stage's rank."""
        schedule, rank = self._pipe.schedule, self._pipe.comm.rank
        batch = Batch(is_training=is_training, wants_outputs=wants_outputs, keeps_outputs=keeps_outputs, scale=scale)
        parted = partial(cut_by_rows if cut else cut_by_user, microbatches=schedule.microbatches)
        empty: set[int] = set()
        rows: list[int] = []
        if rank == self._pipe.first:
            self._check_x(x)
            parts, rows = parted(x, what="x", where=self._where.x)
            batch.inputs = [arguments(part) for part in parts]
            empty = {number for number, count in enumerate(rows) if not count}
            if len(empty) == len(rows):
                empty.discard(0)  # empty outputs still need a shape, and an empty loss gives zero gradients
        if rank == self._pipe.last and not wants_outputs:
            if y is None and x is None:
                raise UsageError(f"pipeline: rank {rank} has the last stage: pass y on it, or x if the loss needs no y")
            inputs, of_x = parted(x, what="x", where=self._where.x) if x is not None else ((), [])
            targets, of_y = parted(y, what="y", where=self._where.y) if y is not None else ([None] * len(of_x), of_x)
            if of_x and of_x != of_y:
                raise UsageError(f"pipeline: x has {sum(of_x)} rows, and y {sum(of_y)}: pass x and y of one batch")
            rows = of_y
            batch.losses = self._losses.begin(rows, targets, inputs, schedule.every)
        self._rows = rows
        batch.looks_at_rows = looks_at_rows
        if looks_at_rows or (self._has_extras and is_training):
            batch.rows = self._pipe.broadcast_rows(rows)
            batch.row_shares = shares_in_updates(batch.rows, schedule.every)
        for stage in self._stages.values():
            stage.batch = batch
            if stage.weights is not None:
                stage.weights.begin()
        self._batch = batch
        return empty

    def _first(self) -> nn.Parameter | None:
        return next((parameter for _, parameter in self._module.named_parameters()), None)

    def _refuse_meta(self) -> None:
        """Raise UsageError, on all ranks, if weights are still on the meta device."""
        meta = [name for name, parameter in self._module.named_parameters() if parameter.is_meta]
        if first := next((name for names in self._pipe.comm.all_gather_object(meta[:1]) for name in names), ""):
            raise UsageError(
                f"pipeline: {first} is on device meta: call to_empty(device=...) and load_state_dict, or "
                "load_state_dict(..., assign=True), on all ranks before the first batch"
            )
        self._on_meta = False
