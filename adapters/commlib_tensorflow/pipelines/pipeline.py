"""Pipeline: train a Keras model whose stages are on the ranks of a group, batch by batch, as one process would."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from commlib.errors import UsageError
from commlib.literals import BatchNormMode
from commlib.optim.clipping import check_finite, check_limit, check_norm_type, clip_factor
from commlib.pipeline.choice import check_batch_norm, check_example, choose_stages
from commlib.pipeline.losses import Details, Weigh
from commlib.pipeline.pipe import AnySchedule, Codecs, Split
from commlib.pipeline.recompute import Checkpoint
from commlib.pipeline.rows import rows_option
from commlib.pipeline.schedule.auto import LayerCosts
from commlib.pipeline.sync_check import check_synchronized
from commlib.ranks import Ranks, communicator_of
from commlib.sharding.shards import world_ranks
from commlib_tensorflow.pipelines._batches import are_arrays, inputs_of, shuffle_batches, split_rows
from commlib_tensorflow.pipelines._call_kinds import agree_to_stop
from commlib_tensorflow.pipelines._compile_settings import lines_of
from commlib_tensorflow.pipelines._compiled_model import CompiledModel
from commlib_tensorflow.pipelines._fit_callbacks import share_callbacks
from commlib_tensorflow.pipelines._layer_costs import layer_costs
from commlib_tensorflow.pipelines._logs import Logs
from commlib_tensorflow.pipelines._losses import CompiledLoss
from commlib_tensorflow.pipelines._optimizer_state import (
    keep_only,
    warn_of_saving,
)
from commlib_tensorflow.pipelines._partial_model import ModelPart, PartialModel, report_errors, share_errors
from commlib_tensorflow.pipelines._parts import cut, to_functional
from commlib_tensorflow.pipelines._recompute import recompute_in
from commlib_tensorflow.pipelines._replicas import (
    Gradients,
    check_replicas,
    note,
    reduce_over_replicas,
    start_by_stages,
)
from commlib_tensorflow.pipelines._side_effects import prevent_side_effects
from commlib_tensorflow.pipelines._split import Nodes, counts_of, of_units, units_to_measure
from commlib_tensorflow.pipelines._step_loops import PredictLoop, StepLoop
from commlib_tensorflow.pipelines._steps import BatchResult, StepRunner
from commlib_tensorflow.pipelines._updates import (
    Updates,
    check_optimizer,
    norm_over,
    scale_gradients,
    scale_of,
)
from commlib_tensorflow.pipelines._verify import check_batch, check_cut, check_same_batch, unpack_batch
from commlib_tensorflow.pipelines._whole_model import WholeModel
from commlib_tensorflow.sync_batch_norm import SyncBatchNormalization
from commlib_tensorflow.tensor.plan_check import check_stages


def pipeline(
    model: Any,
    ranks: Ranks,
    *,
    schedule: AnySchedule = "1f1b",
    microbatches: int,
    loss: Any = None,
    split: Split = "auto",
    stages: int | None = None,
    checkpoint: Checkpoint = "none",
    batch_norm: BatchNormMode = "microbatch",
    codec: Codecs = None,
    weigh: Weigh = None,
    rows: Mapping[str, Any] | None = None,
    optimizer: Any = None,
    every: int | None = None,
    example: Any = None,
    memory: int | None = None,
    verify: Any = None,
) -> Pipeline:
    """Put the stages of a Keras model on `ranks`, such as `mesh["pp"]`. The same call on every rank.

        pipe = ct.pipeline(model, mesh["pp"], schedule="1f1b", microbatches=8)
        pipe.compile(optimizer="adam", loss="mse", metrics=["mae"])
        pipe.fit(x, y, epochs=3)

    or, step by step, with `loss` and `optimizer` here instead of compile:

        loss = pipe.step(x, y); pipe.apply_gradients()

    Collective.

    Args:
        model: A keras.Sequential, a functional model, or a list of layers that begins with a keras.Input; the pipeline
            uses its layers, not copies.
        ranks: The ranks of the stages, such as `mesh["pp"]`.
        schedule: A name ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipev", "breadth_first", "pipedream",
            "pipedream_2bw"), the path of a CSV file, or a Schedule; "auto" chooses by simulated time, from the measured
            cost of each layer: `pipe.why` explains the choice.
        microbatches: The number of microbatches of a batch, cut along the first dimension.
        loss: As compile() takes it, of (target, output); None: compile() has it.
        split: "auto" (even bytes of weights), "time" (even time, as measured), the number of operations of each stage,
            the names of the layers with which the later stages begin, or a function of the model that returns one of
            these.
        stages: The total number of stages, if a rank has several; None: from the schedule.
        checkpoint: The activations kept between forward and backward: "none" recomputes nothing, "selective" keeps the
            results of products (except those within loops), "full" keeps only a stage's inputs; or one of these words
            for each of some layers, by patterns of their names, {"block*": "full", "*.attention": "selective"}, or a
            function of a layer's name and the layer: each such layer is recomputed separately. Schedules that split
            backwards recompute everything that is not kept.
        batch_norm: "microbatch" updates running statistics with each microbatch, "batch" once with those of the whole
            batch.
        codec: The compression of activations and their gradients, such as "bf16" or "int8"; or a mapping by link: {(0,
            1): "bf16", (1, 0): "int8"}; None: none.
        weigh: The number of terms in the mean of a microbatch's loss, where Keras' own losses do not determine it: a
            function of its target and, if it takes them, `inputs` and `sample_weight`; or "rows", or "sum" for a loss
            that is a sum.
        rows: The dimension of rows in x, y and output, if it is not the first: see `commlib.pipeline.rows`; for example
            {"x": (0, "whole"), "output": 1}.
        optimizer: As compile() takes it; for replicas, a DistributedOptimizer(..., mesh=mesh); None: compile() has it.
        every: The number of microbatches between updates, in schedules that update weights themselves.
        example: An x with the rows of one microbatch, on rank 0, which then compares the stages, one after another,
            with the whole model: values, gradients and the variables that layers write, in training and in evaluation.
            Needed by schedule="auto" and split="time".
        memory: With "auto": the most bytes of activations on a rank; None: any.
        verify: A complete batch, x or (x, y), the same on every rank: all ranks make the comparison of `example`, and
            compare an evaluation by the pipeline, too. The model does not change.

    Raises:
        UsageError: For arguments that are invalid on this rank, or on all ranks if a check finds a difference.
        MismatchError: On all ranks if their arguments differ.
        ScheduleError: For a schedule that cannot run.
    """
    check_batch_norm(batch_norm)
    if isinstance(weigh, Mapping):
        raise UsageError(
            f"pipeline: weigh is a dict, with {', '.join(map(str, weigh))}: a Keras loss is one number, not a dict of "
            "terms: pass the weight of its microbatches, and let a layer add any other term by add_loss"
        )
    graph = to_functional(model)
    if isinstance(model, list | tuple):
        model = graph
    comm = communicator_of(ranks, "pipeline")
    check_stages(comm, graph)
    norms = [layer for layer in graph._flatten_layers() if isinstance(layer, SyncBatchNormalization)]
    if norms:
        named = {f"layer {layer.name!r} ({type(layer).__name__})": layer.ranks for layer in norms}
        check_synchronized(comm, named, world_ranks(comm))
    nodes = Nodes(graph)
    recompute = recompute_in([node.operation for node in nodes.all], checkpoint)
    units = units_to_measure(nodes, comm.size)

    def measure() -> LayerCosts:
        x = inputs_of(graph, check_example(example))
        with prevent_side_effects([graph], graph.variables):
            costs = layer_costs(cut(graph, nodes, units), x)
        return replace(costs, keeps_inputs=recompute == "full")

    chosen = choose_stages(
        comm, schedule, microbatches, split=split(model) if callable(split) else split, stages=stages, every=every,
        memory=memory, measure=measure, count=partial(counts_of, nodes),
    )  # fmt: skip
    pieces = cut(graph, nodes, of_units(units, chosen.counts) if chosen.is_measured else chosen.counts)
    if verify is not None:
        check_same_batch(comm, verify)
        check_cut(comm, nodes, pieces, unpack_batch(verify)[0], everywhere=True)
    elif comm.broadcast_object(example is not None):
        check_cut(comm, nodes, pieces, example, everywhere=False)
    steps = StepRunner(
        comm,
        model,
        pieces,
        chosen.schedule,
        checkpoint=recompute,
        batch_norm=batch_norm,
        codec=codec,
        weigh=weigh,
        rows=rows_option(rows),
    )
    pipe = Pipeline(model.name, steps, WholeModel(model, pieces.parts, chosen.schedule.placement), why=chosen.why)
    if loss is not None or optimizer is not None:
        pipe.compile(optimizer=optimizer, loss=loss)
    if verify is not None and codec is None and rows is None:
        pipe.check(verify)
    return pipe


@dataclass(slots=True)
class _PipelineState:
    """State of a pipeline other than its layers, hidden from Keras."""

    steps: StepRunner
    logs: Logs
    updates: Updates
    why: str


class Pipeline(PartialModel):
    """This rank's stages of a model, as a Keras model. Made by `pipeline`.

    All ranks call `fit`, `evaluate`, `predict`, `save` and the others in the same order, with the same arguments: x is
    read on the rank of the first stage, y on the last stage's. Results, and the logs of callbacks, are the same on all
    ranks. Variables and the optimizer belong to this rank's stages.
    """

    def __init__(self, name: str, steps: StepRunner, whole: WholeModel, *, why: str = "") -> None:
        super().__init__(name, ModelPart(steps.pipe, whole, steps.variables))
        self._own = _PipelineState(
            steps, Logs(None, super()._flatten_metrics_in_order), Updates(None, eager=False), why
        )
        self.optimizer = None
        self.parts = steps.parts
        self.output_names = list(steps.graph.output_names)
        self.built = True
        self._prepare()

    # Single steps

    @share_errors
    def step(
        self,
        x: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        *,
        cut: bool = True,
        details: bool = False,
        outputs: bool = False,
    ) -> Any:
        """Run forward and backward on a batch; return its loss, a tensor, on every rank. Collective.

            loss = pipe.step(x, y)
            loss, losses, metrics, outputs = pipe.step(x, y, outputs=True)
            loss = pipe.step([x1, x2], [y1, y2], cut=False)

        The gradients of the whole batch, as one process would compute them, are added to `gradients`; if the optimizer
        scales losses, they are scaled. x: a tensor, a list of them or a dict by the names of the inputs, needed on the
        rank of the first stage; y and sample_weight: needed on the last stage's. cut: False if they are lists of at
        most as many microbatches as the schedule has, which may differ in shape. details, outputs: return `Details`,
        with the batch's outputs if requested, and without metrics, which only `fit` has.

        Raises UsageError on all ranks if the losses of microbatches do not add up to that of the batch.
        """
        wants = details or outputs
        result = self._train(x, y, sample_weight, cut=cut, keeps_losses=wants, keeps_outputs=outputs)
        loss = tf.constant(result.loss, keras.config.floatx())
        if not wants:
            return loss
        own = [result.losses.get(number, math.nan) for number in range(self.pipe.schedule.microbatches)]
        losses = self.pipe.comm.broadcast_object(own, self.pipe.last)
        return Details(
            loss, losses, {}, None if result.outputs is None else self._own.steps.outputs.nest(result.outputs)
        )

    @property
    def gradients(self) -> list[tf.Tensor | None]:
        """The gradients of `trainable_variables`, in their order; None where there is none."""
        return [self._own.steps.gradients.get(id(variable)) for variable in self.trainable_variables]

    @gradients.setter
    def gradients(self, gradients: Sequence[tf.Tensor | None]) -> None:
        pairs = zip(self.trainable_variables, gradients, strict=True)
        self._own.steps.gradients = {id(v): tf.convert_to_tensor(g) for v, g in pairs if g is not None}

    @share_errors
    def apply_gradients(self) -> None:
        """Update this rank's weights with the gradients by the compiled optimizer, then discard the gradients."""
        if self.optimizer is None:
            raise UsageError("apply_gradients: there is no optimizer: give optimizer= to pipeline() or to compile()")
        self._update(self.trainable_variables, self.gradients)
        self.zero_gradients()

    def zero_gradients(self) -> None:
        """Discard the gradients."""
        self._own.steps.gradients = {}

    @share_errors
    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> tf.Tensor:
        """Scale gradients so that their norm over all stages is at most `max_norm`; return the norm before.

        norm_type: 2, any number above 0, or inf. A weight that several stages share counts once. The result has the
        same bits on all ranks. Collective: a DistributedOptimizer's gradients are reduced first. For an infinite or NaN
        norm: raises UsageError on all ranks if error_if_nonfinite; otherwise all gradients become NaN, as in
        tf.clip_by_global_norm.
        """
        scale = scale_of(self.optimizer)
        limit = check_limit("clip_grad_norm", "max_norm", max_norm)
        norm_type = check_norm_type("clip_grad_norm", norm_type)
        gradients = reduce_over_replicas(self.optimizer, self.trainable_variables, self.gradients)
        norm = self._norm(gradients, norm_type) / scale
        if error_if_nonfinite:
            check_finite("clip_grad_norm", norm)
        self.gradients = scale_gradients(gradients, clip_factor(norm, limit, infinite_is_nan=True))
        note(self.optimizer, self.gradients)
        return tf.constant(norm, tf.float64)

    # Keras

    def compile(self, optimizer: Any = "rmsprop", loss: Any = None, **options: Any) -> None:
        """Set optimizer, loss and metrics, as `keras.Model.compile` does. The same call on every rank.

        Raises UsageError for jit_compile=True, for an optimizer with a dynamic loss scale, for a global_clipnorm if the
        optimizer gets incomplete gradients, for an optimizer that reduces over different stages, and for a loss that
        does not follow from those of microbatches; MismatchError on all ranks if a weight that stages on several ranks
        share is trainable on some of them only.
        """
        if options.pop("jit_compile", "auto") is True:
            raise UsageError("pipeline: jit_compile=True: stages are compiled by TensorFlow without XLA; leave it out")
        try:
            optimizer = keras.optimizers.get(optimizer)
        except ValueError as error:
            raise UsageError(f"pipeline: optimizer is {optimizer!r}, expected one of Keras 3, or its name") from error
        schedule = self._own.steps.pipe.schedule
        check_optimizer(optimizer, ranks=schedule.ranks, flushes=not schedule.every)
        self._own.steps.losses_of(loss)  # raises UsageError
        super().compile(optimizer=optimizer, loss=self.loss if loss is None else loss, jit_compile=False, **options)
        check_optimizer(self.optimizer, ranks=schedule.ranks, flushes=not schedule.every)
        check_replicas(self.optimizer, self.pipe.comm)
        keep_only(self.optimizer, list(self._own.steps.variables.values()), self.trainable_variables)
        warn_of_saving(self.optimizer, self.pipe.comm.rank)
        self._prepare()

    @report_errors
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        **options: Any,
    ) -> Any:
        """Train as `keras.Model.fit` does. Collective: the same arguments on every rank.

        If an error leaves this method on one rank, such as a callback's or a generator's, the other ranks raise
        PeerError with its text. Arrays are shuffled in the same order on all ranks. An iterable of batches has to
        shuffle itself, with the same seed on all ranks. All ranks stop after an epoch if a callback of any of them sets
        `stop_training`; within an epoch, all callbacks must set it.
        """
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_rows((x, y, sample_weight), validation_split)
        with self.pipe.together():  # resynchronises the ranks if a batch failed
            is_shuffled = shuffle and are_arrays(x)
            seed = self.pipe.comm.broadcast_object(int(np.random.randint(2**31)), 0) if is_shuffled else 0
        if is_shuffled:
            x, y, sample_weight = shuffle_batches((x, y, sample_weight), batch_size or 32, seed), None, None
            if validation_data is not None:
                options.setdefault("validation_batch_size", batch_size or 32)
            batch_size = None
        return super().fit(
            x=x, y=y, batch_size=batch_size, epochs=epochs, verbose=self._verbose(verbose),
            callbacks=share_callbacks(callbacks, self, self._agree_to_stop),
            validation_data=validation_data, shuffle=False, class_weight=class_weight, sample_weight=sample_weight,
            **options,
        )  # fmt: skip

    @report_errors
    def evaluate(self, x: Any = None, y: Any = None, *args: Any, verbose: Any = "auto", **options: Any) -> Any:
        """Return loss and metrics, as `keras.Model.evaluate` does, on every rank. Collective."""
        return super().evaluate(x, y, *args, verbose=self._verbose(verbose), **options)

    @report_errors
    def predict(self, x: Any = None, *args: Any, verbose: Any = "auto", **options: Any) -> Any:
        """Return the model's outputs, as `keras.Model.predict` does, on every rank. Collective."""
        return super().predict(x, *args, verbose=self._verbose(verbose), **options)

    @share_errors
    def train_step(self, data: Any) -> dict[str, float]:
        """Train on a batch; return the logs."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        reduce = partial(start_by_stages, self.optimizer, self.trainable_variables)
        result = self._train(x, y, sample_weight, keeps_outputs=self._own.logs.has_metrics, by_stages=reduce)
        if not self._own.steps.pipe.schedule.every:
            self.apply_gradients()
        return self._own.logs.add(result, self.pipe)

    @share_errors
    def test_step(self, data: Any) -> dict[str, float]:
        """Evaluate a batch; return the logs."""
        data = keras.utils.unpack_x_y_sample_weight(data)
        result = self._own.steps.run(*data, keeps_outputs=self._own.logs.has_metrics)
        return self._own.logs.add(result, self.pipe)

    @share_errors
    def predict_step(self, data: Any) -> Any:
        """Return the model's outputs for a batch."""
        steps = self._own.steps
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        outputs = steps.run(x, None, None, has_loss=False, keeps_outputs=True).outputs
        return steps.outputs.nest(steps.outputs.share(self.pipe, outputs))

    def make_train_function(self, force: bool = False) -> None:
        """Make fit take its steps outside of graphs, because messages cannot be part of one."""
        self.train_function = StepLoop(self, self.train_step)

    def make_test_function(self, force: bool = False) -> None:
        """Make evaluate take its steps outside of graphs."""
        self.test_function = StepLoop(self, self.test_step)

    def make_predict_function(self, force: bool = False) -> None:
        """Make predict take its steps outside of graphs."""
        self.predict_function = PredictLoop(self.predict_step, self._own.steps.outputs)

    def reset_metrics(self) -> None:
        """Reset the losses and metrics of earlier batches."""
        super().reset_metrics()
        self._own.logs.reset()

    def get_metrics_result(self) -> dict[str, Any]:
        """Return the loss and metrics of the batches so far: the same on every rank."""
        return dict(self._own.logs.latest)

    def _flatten_metrics_in_order(self, logs: dict[str, Any]) -> Any:
        return self._own.logs.listed(logs)

    # The rest

    @share_errors
    def check(self, batch: Any) -> None:
        """Compare an evaluation of a batch with that of the whole model, without side effects. Collective."""
        whole, loss = self._part.whole, None if self._compile_loss is None else self._compiled.loss
        check_batch(self.pipe.comm, self._own.steps, whole.variables, whole.values(self.pipe.comm), batch, loss)

    def picture(self, *, width: int | None = None) -> str:
        """Draw the schedule. Not collective."""
        return self.pipe.picture(width=width)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Close this rank's part, after an exception too."""
        self.close()

    def close(self) -> None:
        """Close this rank's part, and notify the other ranks."""
        self.pipe.close()

    @property
    def why(self) -> str:
        """Why this schedule was chosen, for schedule="auto"."""
        return self._own.why

    def _prepare(self) -> None:
        """Prepare for training, after compile."""
        own = self._own
        compiled = self._compiled
        own.logs = Logs(compiled.measure if compiled.has_metrics else None, super()._flatten_metrics_in_order)
        own.updates = Updates(self.optimizer, eager=bool(self.run_eagerly))
        own.steps.prepare(
            CompiledLoss(compiled.loss if compiled.has_loss else None, own.steps.losses_of(self.loss)),
            eager=bool(self.run_eagerly),
            update=self._update,
            compiled=lines_of(self.optimizer, self.loss, compiled.metrics),
            roots=[self, self._part.whole.model],
        )

    @property
    def _compiled(self) -> CompiledModel:
        return CompiledModel(self, self._own.steps.outputs.nest)

    def _train(self, x: Any, y: Any, sample_weight: Any, **options: Any) -> BatchResult:
        scale = scale_of(self.optimizer)
        if self._own.steps.pipe.schedule.every and self.optimizer is None:
            name = self._own.steps.pipe.schedule.name
            raise UsageError(f"pipeline: schedule {name} updates weights while it runs: give optimizer=, or compile()")
        return self._own.steps.run(x, y, sample_weight, is_training=True, scale=scale, **options)

    def _update(self, variables: Sequence[Any], gradients: Gradients) -> None:
        self._own.updates(variables, gradients, self._norm)

    def _norm(self, gradients: Gradients, norm_type: float = 2.0) -> float:
        tied = self._own.steps.tied
        pairs = zip(self.trainable_variables, gradients, strict=True)
        return norm_over(self.pipe.comm, [(v, g) for v, g in pairs if not tied.is_counted_elsewhere(v)], norm_type)

    @share_errors
    def _agree_to_stop(self, stops: bool) -> bool:
        rate = getattr(self.optimizer, "_learning_rate", None)  # a variable, unless it is a schedule
        is_set = isinstance(rate, keras.Variable) and bool(self.trainable_variables)
        return agree_to_stop(self.pipe.comm, stops, float(keras.ops.convert_to_numpy(rate)) if is_set else None)

    def _verbose(self, verbose: Any) -> Any:
        """Let only rank 0 print, unless the user requests more."""
        return 0 if verbose == "auto" and self.pipe.comm.rank else verbose
