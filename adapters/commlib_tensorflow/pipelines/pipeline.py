"""Pipeline: train a Keras model whose stages are on the ranks of a group, a batch at a time, as one process would."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.optim.clipping import check_finite, check_limit, check_norm_type, clip_factor
from commlib.pipeline.choice import check_batch_norm, check_example, choose_stages
from commlib.pipeline.losses import Details, Weigh
from commlib.pipeline.pipe import AnySchedule, Codecs, Pipe
from commlib.pipeline.recompute import Checkpoint
from commlib.pipeline.rows import WHOLE, rows_option
from commlib.pipeline.schedule.auto import LayerCosts
from commlib.pipeline.synchronized import check_synchronized
from commlib.sharding.shards import world_ranks
from commlib_tensorflow._shards import whole_of
from commlib_tensorflow.pipelines._batches import are_arrays, inputs_of, shuffled, split_rows
from commlib_tensorflow.pipelines._compiled import lines_of
from commlib_tensorflow.pipelines._in_fit import together
from commlib_tensorflow.pipelines._logs import Logs
from commlib_tensorflow.pipelines._measured import layer_costs
from commlib_tensorflow.pipelines._optimizer_state import keep_only, made_anew, put_states, states_of, warn_of_saving
from commlib_tensorflow.pipelines._parts import cut, functional
from commlib_tensorflow.pipelines._recompute import recompute_in
from commlib_tensorflow.pipelines._replicas import Gradients, by_stages, check_replicas, note, reduced
from commlib_tensorflow.pipelines._split import Nodes, Split, counts_of, of_units, units_to_measure
from commlib_tensorflow.pipelines._steps import Result, Steps
from commlib_tensorflow.pipelines._untouched import untouched
from commlib_tensorflow.pipelines._updates import (
    Updates,
    check_optimizer,
    norm_over,
    scale_of,
    scaled,
)
from commlib_tensorflow.pipelines._verify import check_alike, check_batch, check_cut, given
from commlib_tensorflow.pipelines._whole import WholeModel
from commlib_tensorflow.sync_batch_norm import SyncBatchNormalization
from commlib_tensorflow.tensor.checking import check_stages


def pipeline(
    model: Any,
    comm: Communicator,
    *,
    schedule: AnySchedule = "1f1b",
    microbatches: int,
    loss: Any = None,
    split: Split = "auto",
    stages: int | None = None,
    checkpoint: Checkpoint = "none",
    batch_norm: str = "microbatch",
    codec: Codecs = None,
    weigh: Weigh = None,
    rows: Mapping[str, Any] | None = None,
    optimizer: Any = None,
    every: int | None = None,
    example: Any = None,
    memory: int | None = None,
    verify: Any = None,
) -> Pipeline:
    """Put the stages of a Keras model on the ranks of `comm`, such as `mesh["pp"]`. The same call on every rank.

        pipe = ct.pipeline(model, mesh["pp"], schedule="1f1b", microbatches=8)
        pipe.compile(optimizer="adam", loss="mse", metrics=["mae"])
        pipe.fit(x, y, epochs=3)

    or, a step at a time, with `loss=` and `optimizer=` here instead of compile:

        loss = pipe.step(x, y); pipe.apply_gradients()

    model: a keras.Sequential, a functional model, or a list of layers that begins with a keras.Input; the pipeline has
    its layers, not copies. schedule: a name ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipev",
    "breadth_first", "pipedream", "pipedream_2bw"), the path of a CSV file, or a Schedule. microbatches: into how many
    parts a batch is cut, along the first dimension. loss: as compile() takes it, of (target, output).
    split: "auto" (even bytes of weights), "time" (even time, as measured), or how many operations each stage has, or
    the names of the layers with which the later stages begin, or a function of the model that returns one of these.
    stages: in all, where a rank has several.
    schedule="auto" chooses by simulated time, from what each part of the model is measured to cost, with at most
    `memory` bytes of activations on a rank: `pipe.why` says why. Both need example=, an x of as many rows as a
    microbatch has, on rank 0. Where there is an example, rank 0 compares the stages, one after another, with the whole
    model: values, gradients and what layers write, in training and in evaluation. verify: a batch, x or (x, y), whole
    and the same on every rank: all ranks compare so, and an evaluation by the pipeline, too. Nothing of the model
    changes.
    checkpoint: what is kept of activations between forward and backward: "none" is computed again, "selective"
    (products are kept, but those within loops), or "full": only a stage's inputs are kept; or one of these words for
    each of some layers, by patterns of their names, {"block*": "full", "*.attention": "selective"}, or a function of a
    layer's name and the layer: each such layer is computed again for itself. Schedules that split
    backwards compute again whatever is not kept. batch_norm: "microbatch" updates moving statistics with each
    microbatch, "batch" once with those of the whole batch.
    codec: how activations and their gradients travel, such as "bf16" or "int8"; or a mapping by the stages between
    which they do: {(0, 1): "bf16", (1, 0): "int8"}. weigh: how many terms a microbatch's loss is the mean of, where
    Keras' own losses do not say it: a function of its target and, if it takes them, `inputs` and `sample_weight`; or
    "rows", or "sum" of a loss that is a sum.
    rows: in which dimension of x, y and output they are, if not in the first: see `commlib.pipeline.rows`; such as
    {"x": (0, "whole"), "output": 1}.
    optimizer: as compile() takes it; of replicas, a DistributedOptimizer(..., mesh=mesh). every: microbatches between
    updates, in schedules that update weights while they run; they use the compiled optimizer.

    Collective. Raises UsageError for what makes no sense on this rank, or on all ranks if a check finds that anything
    differs, MismatchError on all ranks if they ask for different things, ScheduleError for a schedule that cannot run.
    """
    check_batch_norm(batch_norm)
    if isinstance(weigh, Mapping):
        raise UsageError(
            f"pipeline: weigh is a dict, of {', '.join(map(str, weigh))}: a loss of Keras is one number and no dict of "
            "summands: say what its microbatches count, and let a layer add any other summand by add_loss"
        )
    graph = functional(model)
    if isinstance(model, list | tuple):
        model = graph
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
        with untouched([graph], graph.variables):
            costs = layer_costs(cut(graph, nodes, units), x)
        return replace(costs, keeps_inputs=recompute == "full")

    chosen = choose_stages(
        comm, schedule, microbatches, split=split(model) if callable(split) else split, stages=stages, every=every,
        memory=memory, measure=measure, count=partial(counts_of, nodes),
    )  # fmt: skip
    pieces = cut(graph, nodes, of_units(units, chosen.counts) if chosen.is_measured else chosen.counts)
    if verify is not None:
        check_alike(comm, verify)
        check_cut(comm, nodes, pieces, given(verify)[0], everywhere=True)
    elif comm.broadcast_object(example is not None):
        check_cut(comm, nodes, pieces, example, everywhere=False)
    steps = Steps(
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


def _together(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let an error that comes out of a method on one rank be told to all."""

    @wraps(method)
    def told(self: Any, *args: Any, **options: Any) -> Any:
        with self.pipe.together():
            return method(self, *args, **options)

    return told


def _telling(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let an error between batches, such as a callback's, be told to all ranks, too."""

    @wraps(method)
    def told(self: Any, *args: Any, **options: Any) -> Any:
        with self.pipe.telling(method.__name__):
            return method(self, *args, **options)

    return told


@dataclass(slots=True)
class _Own:
    """What a pipeline has beside its layers; Keras is not to look into it."""

    steps: Steps
    whole: WholeModel
    logs: Logs
    updates: Updates
    why: str


class Pipeline(keras.Model):  # type: ignore[misc]  # Keras has no types
    """This rank's stages of a model, as a Keras model. Made by `pipeline`.

    All ranks call `fit`, `evaluate`, `predict`, `save` and the others alike, with the same arguments: x is looked at on
    the rank of the first stage, y on that of the last. What they return, and what callbacks see, is the same on all.
    Variables, and the optimizer, are those of this rank's stages.
    """

    def __init__(self, name: str, steps: Steps, whole: WholeModel, *, why: str = "") -> None:
        super().__init__(name=name)
        self._own = _Own(steps, whole, Logs(None, super()._flatten_metrics_in_order), Updates(None, eager=False), why)
        self.optimizer = None
        self.parts = steps.parts
        self.output_names = list(steps.graph.output_names)
        self.built = True
        self._prepare()

    # A step at a time

    @_together
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

        Gradients are added to those that are in `gradients`, as one process would compute them on the whole batch; of
        an optimizer that scales losses, they are scaled. x: a tensor, a list of them or a dict by the names of the
        inputs, needed on the rank of the first stage; y and sample_weight: needed on that of the last. cut: False
        if they are lists of at most as many microbatches as the schedule has, each of its own shapes. details, outputs:
        return `Details`, with the batch's outputs if they are asked for, and no metrics: these are of `fit`.
        Raises UsageError on all ranks where the losses of microbatches do not come to that of the batch.
        """
        wants = details or outputs
        result = self._train(x, y, sample_weight, cut=cut, keeps_losses=wants, keeps_outputs=outputs)
        loss = tf.constant(result.loss, keras.config.floatx())
        if not wants:
            return loss
        own = [result.losses.get(number, math.nan) for number in range(self.pipe.schedule.microbatches)]
        losses = self.pipe.comm.broadcast_object(own, self.pipe.last)
        return Details(loss, losses, {}, None if result.outputs is None else self._own.steps.nest(result.outputs))

    @property
    def gradients(self) -> list[tf.Tensor | None]:
        """The gradients of `trainable_variables`, in their order; None where there is none."""
        return [self._own.steps.gradients.get(id(variable)) for variable in self.trainable_variables]

    @gradients.setter
    def gradients(self, gradients: Sequence[tf.Tensor | None]) -> None:
        pairs = zip(self.trainable_variables, gradients, strict=True)
        self._own.steps.gradients = {id(v): tf.convert_to_tensor(g) for v, g in pairs if g is not None}

    @_together
    def apply_gradients(self) -> None:
        """Update this rank's weights with the gradients by the compiled optimizer, and forget the gradients."""
        if self.optimizer is None:
            raise UsageError("apply_gradients: there is no optimizer: give optimizer= to pipeline() or to compile()")
        self._update(self.trainable_variables, self.gradients)
        self.zero_gradients()

    def zero_gradients(self) -> None:
        """Forget the gradients."""
        self._own.steps.gradients = {}

    @_together
    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> tf.Tensor:
        """Scale gradients so that the norm of those of all stages is `max_norm` at most; return what it was.

        norm_type: 2, any number above 0, or inf. A weight that several stages share counts once. The same bits on all
        ranks. Collective: a DistributedOptimizer's gradients are reduced first. Raises UsageError on all ranks for a
        norm that is infinite or NaN, if that is an error; else all gradients become NaN, as tf.clip_by_global_norm's.
        """
        scale = scale_of(self.optimizer)
        limit = check_limit("clip_grad_norm", "max_norm", max_norm)
        norm_type = check_norm_type("clip_grad_norm", norm_type)
        gradients = reduced(self.optimizer, self.trainable_variables, self.gradients)
        norm = self._norm(gradients, norm_type) / scale
        if error_if_nonfinite:
            check_finite("clip_grad_norm", norm)
        self.gradients = scaled(gradients, clip_factor(norm, limit, infinite_is_nan=True))
        note(self.optimizer, self.gradients)
        return tf.constant(norm, tf.float64)

    # Keras

    def compile(self, optimizer: Any = "rmsprop", loss: Any = None, **options: Any) -> None:
        """Set optimizer, loss and metrics, as `keras.Model.compile` does. The same call on every rank.

        Raises UsageError for jit_compile=True, for an optimizer with a dynamic loss scale, for a global_clipnorm where
        gradients are not complete when the optimizer is given them, for one that reduces over different stages, and for
        a loss of which microbatches' own tell nothing; MismatchError on all ranks if a weight that stages on several
        ranks share is trainable on some of them only.
        """
        if options.pop("jit_compile", "auto") is True:
            raise UsageError("pipeline: jit_compile=True: stages are compiled by TensorFlow alone; leave it out")
        optimizer = keras.optimizers.get(optimizer)
        schedule = self._own.steps.pipe.schedule
        check_optimizer(optimizer, ranks=schedule.ranks, flushes=not schedule.every)
        self._own.steps.losses_of(loss)  # raises UsageError
        super().compile(optimizer=optimizer, loss=self.loss if loss is None else loss, jit_compile=False, **options)
        check_optimizer(self.optimizer, ranks=schedule.ranks, flushes=not schedule.every)
        check_replicas(self.optimizer, self.pipe.comm)
        keep_only(self.optimizer, list(self._own.steps.variables.values()), self.trainable_variables)
        warn_of_saving(self.optimizer, self.pipe.comm.rank)
        self._prepare()

    @_telling
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

        An error that comes out of it on one rank, such as a callback's or a generator's, is told to all ranks, which
        raise PeerError. Arrays are shuffled alike on all ranks. What yields batches has to do so itself: a seed that is
        the same. All ranks stop after an epoch if a callback of any of them sets `stop_training`; within one, all have
        to.
        """
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_rows((x, y, sample_weight), validation_split)
        with self.pipe.together():  # the ranks meet again, if a batch failed
            is_shuffled = shuffle and are_arrays(x)
            seed = self.pipe.comm.broadcast_object(int(np.random.randint(2**31)), 0) if is_shuffled else 0
        if is_shuffled:
            x, y, sample_weight = shuffled((x, y, sample_weight), batch_size or 32, seed), None, None
            if validation_data is not None:
                options.setdefault("validation_batch_size", batch_size or 32)
            batch_size = None
        return super().fit(
            x=x, y=y, batch_size=batch_size, epochs=epochs, verbose=self._verbose(verbose),
            callbacks=together(callbacks, self, self._agree_to_stop),
            validation_data=validation_data, shuffle=False, class_weight=class_weight, sample_weight=sample_weight,
            **options,
        )  # fmt: skip

    @_telling
    def evaluate(self, x: Any = None, y: Any = None, *args: Any, verbose: Any = "auto", **options: Any) -> Any:
        """Return loss and metrics, as `keras.Model.evaluate` does, on every rank. Collective."""
        return super().evaluate(x, y, *args, verbose=self._verbose(verbose), **options)

    @_telling
    def predict(self, x: Any = None, *args: Any, verbose: Any = "auto", **options: Any) -> Any:
        """Return what the model gives, as `keras.Model.predict` does, on every rank. Collective."""
        return super().predict(x, *args, verbose=self._verbose(verbose), **options)

    @_together
    def train_step(self, data: Any) -> dict[str, float]:
        """Train on a batch; return the logs."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        reduce = partial(by_stages, self.optimizer, self.trainable_variables)
        result = self._train(x, y, sample_weight, keeps_outputs=self._own.logs.has_metrics, by_stages=reduce)
        if not self._own.steps.pipe.schedule.every:
            self.apply_gradients()
        return self._own.logs.add(result, self.pipe)

    @_together
    def test_step(self, data: Any) -> dict[str, float]:
        """Evaluate a batch; return the logs."""
        data = keras.utils.unpack_x_y_sample_weight(data)
        result = self._own.steps.run(*data, keeps_outputs=self._own.logs.has_metrics)
        return self._own.logs.add(result, self.pipe)

    @_together
    def predict_step(self, data: Any) -> Any:
        """Return what the model gives for a batch."""
        steps = self._own.steps
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        outputs = steps.run(x, None, None, has_loss=False, keeps_outputs=True).outputs
        return steps.nest(steps.shared(outputs))

    def make_train_function(self, force: bool = False) -> None:
        """Let fit take its steps outside of graphs: messages are no part of one."""
        self.train_function = self._each(self.train_step)

    def make_test_function(self, force: bool = False) -> None:
        """Let evaluate take its steps outside of graphs."""
        self.test_function = self._each(self.test_step)

    def make_predict_function(self, force: bool = False) -> None:
        """Let predict take its steps outside of graphs."""

        def function(batches: Iterable[Any]) -> Any:
            found = [self.predict_step(data) for data in batches]
            places = self._own.steps.nest(self._own.steps.places_of_outputs)
            return keras.tree.map_structure(
                lambda place, *parts: parts[0] if place == WHOLE else tf.concat(parts, place), places, *found
            )

        self.predict_function = function

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to be called: a batch goes through all ranks."""
        raise UsageError("a pipeline is not called: use fit, evaluate, predict or step(x, y), on every rank")

    def reset_metrics(self) -> None:
        """Forget the losses and metrics of batches before."""
        super().reset_metrics()
        self._own.logs.reset()

    def get_metrics_result(self) -> dict[str, Any]:
        """Return the loss and metrics of the batches so far: the same on every rank."""
        return dict(self._own.logs.latest)

    # Files

    def save(self, filepath: Any, overwrite: bool = True, zipped: bool | None = None, **options: Any) -> None:
        """Write the whole model to a file that `keras.models.load_model` reads, with or without commlib.

        It is compiled as this one, with the state of the optimizer. Rank 0 writes. Collective.
        """
        self._write(lambda model: model.save(filepath, overwrite=overwrite, zipped=zipped, **options))

    def save_weights(self, filepath: Any, overwrite: bool = True, **options: Any) -> None:
        """Write the whole model's weights, as `keras.Model.save_weights` does. Rank 0 writes. Collective."""
        self._write(lambda model: model.save_weights(filepath, overwrite=overwrite, **options))

    @_together
    def _write(self, write: Callable[[Any], None]) -> None:
        """Let rank 0 write a model like the whole one, compiled as this one, with the state of the optimizer."""
        own = states_of(self.optimizer, self._own.whole.order, whole_of)
        states = [state for states in self.pipe.comm.all_gather_object(own) for state in states]

        def compile_and_write(model: Any) -> None:
            if self.optimizer is not None:
                # Of the same loss and metrics, which need not be known by a name; the optimizer is of this rank alone.
                model.compile(**{**self._compile_config.config, "optimizer": made_anew(self.optimizer)})
                self._own.whole.put_optimizer_state(model, states)
            write(model)

        self._own.whole.write(self.pipe.comm, compile_and_write)

    def load_weights(self, filepath: Any, skip_mismatch: bool = False, **options: Any) -> None:
        """Read a whole model's weights, and keep those of this rank's stages. Every rank reads the file.

        As in Keras, an optimizer that is built takes what the file has of its state.
        """
        whole = self._own.whole
        model = whole.built()
        if skip_mismatch:  # what is skipped stays as it is
            for variable, value in zip(model.variables, whole.values(self.pipe.comm), strict=True):
                variable.assign(value)
        takes_state = self.optimizer is not None and self.optimizer.built
        if takes_state:
            model.compile(made_anew(self.optimizer), jit_compile=False)
            model.optimizer.build(model.trainable_variables)
            model.optimizer.iterations.assign(-1)  # it stays so if the file has no state
        model.load_weights(filepath, skip_mismatch=skip_mismatch, **options)
        whole.take(model, self._own.steps.variables)
        if takes_state and int(model.optimizer.iterations) >= 0:
            places = {id(variable): place for place, variable in enumerate(model.variables)}
            put_states(self.optimizer, states_of(model.optimizer, places, lambda _, value: value), whole.order)

    @_together
    def gather_weights(self) -> list[Array]:
        """Return the weights of the whole model, in the order of its `weights`, on every rank. Collective."""
        return self._own.whole.weights(self.pipe.comm)

    def _flatten_metrics_in_order(self, logs: dict[str, Any]) -> Any:
        return self._own.logs.listed(logs)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set this rank's weights: to as many values as `get_weights` gives, or to those of the whole model.

            pipe.set_weights(pipe.get_weights()); pipe.set_weights(pipe.gather_weights())

        As many as this rank has are its own, in the order of its `weights`; else they are those of the whole model, in
        the order of its own, of which each rank keeps what it has. Not collective. Raises UsageError for other numbers
        of values or other shapes, before any weight changes.
        """
        own, whole = self.weights, self._own.whole
        if len(weights) == len(own):
            pairs = list(zip(own, weights, strict=True))
            shapes = [tuple(variable.shape) for variable in own]
        elif len(weights) == whole.count:
            pairs, shapes = whole.pairs(weights), whole.shapes
        else:
            raise UsageError(
                f"pipeline: set_weights: got {len(weights)} values; expected {len(own)}, those of this rank's stages "
                f"(get_weights), or {whole.count}, those of the whole model (gather_weights); this is rank "
                f"{self.pipe.comm.rank} of {self.pipe.comm.size}"
            )
        for number, (value, shape) in enumerate(zip(weights, shapes, strict=True)):
            if np.shape(value) != shape:
                raise UsageError(
                    f"pipeline: set_weights: value {number} has shape {np.shape(value)}, expected {shape}; this is "
                    f"rank {self.pipe.comm.rank} of {self.pipe.comm.size}"
                )
        for variable, value in pairs:
            variable.assign(value)

    def quantize(self, *args: Any, **options: Any) -> Any:
        """Refuse: this rank has a part of the model only, which was cut as it was."""
        raise UsageError("pipeline: quantize the whole model, before pipeline() cuts it into stages")

    def export(self, *args: Any, **options: Any) -> Any:
        """Refuse, too."""
        raise UsageError(
            "a pipeline cannot be exported, for this rank has a part of the model only: save() writes the whole one, "
            "on all ranks; export what keras.models.load_model gives of that"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: this rank has a part of the model only, and the other ranks make no copy."""
        raise UsageError(
            "a pipeline cannot be copied or pickled: it is a part that this rank has with others. Keep the values of "
            "gather_weights() (or of save_weights(), a file), and give them to a pipeline made of another whole model"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuse, too."""
        return self.__reduce_ex__(4)

    def get_config(self) -> Any:
        """Refuse: this rank has a part of the model only."""
        raise UsageError("a pipeline has no configuration of its own: save() writes the whole model's, on all ranks")

    # The rest

    @_together
    def check(self, batch: Any) -> None:
        """Compare an evaluation of a batch with that of the whole model, without a trace. Collective."""
        whole, loss = self._own.whole, None if self._compile_loss is None else self._loss_of
        check_batch(self.pipe.comm, self._own.steps, whole.variables, whole.values(self.pipe.comm), batch, loss)

    def picture(self, *, width: int | None = None) -> str:
        """Draw the schedule. Not collective."""
        return self.pipe.picture(width=width)

    def close(self) -> None:
        """End this rank's part. The others are told."""
        self.pipe.close()

    @property
    def why(self) -> str:
        """Why this schedule was chosen, if it was."""
        return self._own.why

    @property
    def pipe(self) -> Pipe:
        """What runs the schedule."""
        return self._own.steps.pipe

    def _prepare(self) -> None:
        """Begin anew, after compile."""
        own = self._own
        has_losses = self._compile_loss is not None and len(self.output_names) > 1
        measure = self._measured if has_losses or self._compile_metrics is not None else None
        own.logs = Logs(measure, super()._flatten_metrics_in_order)
        own.updates = Updates(self.optimizer, eager=bool(self.run_eagerly))
        loss = None if self._compile_loss is None else self._loss_of
        kept = self._compile_metrics  # which a compile without metrics leaves as they are
        metrics = [getattr(kept, name, None) for name in ("_user_metrics", "_user_weighted_metrics")]
        own.steps.prepare(
            loss,
            own.steps.losses_of(self.loss),
            eager=bool(self.run_eagerly),
            update=self._update,
            compiled=lines_of(self.optimizer, self.loss, metrics),
            roots=[self, own.whole.model],
        )

    def _loss_of(self, target: Any, outputs: list[Any], sample_weight: Any) -> Any:
        """Return the compiled loss. What it keeps of each output is not of microbatches: see `_measured`."""
        with keras.StatelessScope():
            return self._compile_loss(target, self._own.steps.nest(outputs), sample_weight)

    def _measured(self, target: Any, outputs: list[Any], sample_weight: Any) -> dict[str, Any]:
        """Update the metrics with a whole batch, and return their values."""
        output = self._own.steps.nest(outputs)
        if self._compile_loss.metrics:  # those of several outputs
            self._compile_loss(target, output, sample_weight)
        if self._compile_metrics is not None:
            if not self._compile_metrics.built:
                self._compile_metrics.build(target, output)
                with tf.init_scope():  # they may have seen something before, as Keras forgets when it builds a model
                    self._compile_metrics.reset_state()
            self._compile_metrics.update_state(target, output, sample_weight)
        return super().get_metrics_result()  # type: ignore[no-any-return]

    def _train(self, x: Any, y: Any, sample_weight: Any, **options: Any) -> Result:
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

    def _each(self, step: Callable[[Any], dict[str, float]]) -> Callable[[Any], dict[str, float]]:
        """Return what takes as many steps as compile() says in an execution."""

        def function(iterator: Any) -> dict[str, float]:
            logs: dict[str, float] | None = None
            for _, data in zip(range(self.steps_per_execution), iterator, strict=False):
                logs = step(keras.tree.map_structure(_without_optional, data))
            if logs is None:
                raise StopIteration
            return logs

        return function

    @_together
    def _agree_to_stop(self, stops: bool) -> bool:
        rate = getattr(self.optimizer, "_learning_rate", None)  # a variable, unless it is a schedule
        is_set = isinstance(rate, keras.Variable) and bool(self.trainable_variables)
        return self._own.steps.agree_to_stop(stops, float(keras.ops.convert_to_numpy(rate)) if is_set else None)

    def _verbose(self, verbose: Any) -> Any:
        """Let only one rank print, unless it is said otherwise."""
        return 0 if verbose == "auto" and self.pipe.comm.rank else verbose


def _without_optional(leaf: Any) -> Any:
    """Return None for what a dataset says there is none of, as Keras does."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf
