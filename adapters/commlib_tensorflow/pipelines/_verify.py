"""Verification: compare a split model with the whole model before training; the model does not change."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.communicator import Communicator
from commlib.comparison.agreement import run_together
from commlib.comparison.parameter_check import check_agreement
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.group.single_rank import SingleRank
from commlib.pipeline.batch import rows_of
from commlib.pipeline.cut_check import ModelRun, compare_with_original, cut_failure, mode
from commlib.tensor_parallel.checks.compare import TOLERANCES
from commlib_tensorflow._bridge import to_array
from commlib_tensorflow.pipelines._batches import as_tensors, inputs_of, rows_in, take_rows
from commlib_tensorflow.pipelines._parts import MASK, SplitModel
from commlib_tensorflow.pipelines._side_effects import prevent_side_effects
from commlib_tensorflow.pipelines._split import Nodes
from commlib_tensorflow.pipelines._stage_functions import StageFunctions
from commlib_tensorflow.pipelines._steps import StepRunner
from commlib_tensorflow.tensor._penalties import whole_penalties

_Computed = tuple[dict[str, tf.Tensor], tf.Tensor]
"""Values by name, and the losses that layers add."""


def check_cut(comm: Communicator, nodes: Nodes, cut: SplitModel, x: Any, *, everywhere: bool) -> None:
    """Compare stages, one after another, with the whole model on a batch, in training and in evaluation.

    Compared are the values that cross cuts, the outputs, the gradients of all weights, and the values that layers
    write. On rank 0, or everywhere; x is needed there. A mode is skipped if the whole model itself fails in it, or
    gives different results in two runs. Raises UsageError on all ranks if anything differs. Collective.
    """

    def check() -> None:
        if comm.rank and not everywhere:
            return
        inputs = inputs_of(cut.graph, x)
        skipped = [_compare_mode(nodes, cut, inputs, training=training) for training in (True, False)]
        if all(skipped):
            warnings.warn(f"pipeline: the split model is not compared with the whole model: {skipped[0]}", stacklevel=5)

    run_together(comm, check)


def _compare_mode(nodes: Nodes, cut: SplitModel, inputs: Sequence[tf.Tensor], *, training: bool) -> str:
    """Compare in one mode; return why nothing can be compared, if so."""
    graph = cut.graph
    names = [name for name in dict.fromkeys(n for part in cut.parts for n in part.gives) if not name.endswith(MASK)]
    every = keras.Model(graph.inputs, [nodes.tensors[name] for name in names], name=graph.name)

    def whole() -> _Computed:
        values = every(list(inputs), training=training)
        flat = values if isinstance(values, list | tuple) else [values]
        return dict(zip(names, flat, strict=True)), _sum(every.losses)

    try:
        expected = _run(graph, cut, _with_variables(graph, whole))
    except Exception as error:
        return f"it does not run {mode(training)} ({type(error).__name__}: {str(error)[:300]})"
    try:
        own = _run(graph, cut, _in_stages(cut, inputs, training=training))
    except Exception as error:
        raise UsageError(cut_failure(training, error)) from error
    try:
        compare_with_original(SingleRank(), expected, own, when=mode(training))
    except UsageError:
        if _differs(expected, _run(graph, cut, _with_variables(graph, whole))):
            return f"it returns different values in each run {mode(training)}"
        raise
    return ""


_Program = Callable[[], tuple[_Computed, list[Any], list[Any]]]
"""Returns the computed values, the gradients of the trainable variables, and the values of all variables."""


def _run(graph: Any, cut: SplitModel, program: _Program) -> ModelRun:
    """Run a program without side effects, and record its results."""
    stages = list(reversed(list(enumerate(cut.parts))))
    producers = {name: number for number, part in stages for name in part.gives}
    with prevent_side_effects([graph], graph.variables):
        (values, added), gradients, after = tf.function(program, autograph=False)()
        values_of = {f"the output of {name}": to_array(value) for name, value in values.items()}
        state = [_array(value) for value in after or [variable.value for variable in graph.variables]]
    return ModelRun(
        values_of | {"what layers add to the loss": to_array(added)},
        {
            variable.path: None if gradient is None else _array(gradient)
            for variable, gradient in zip(graph.trainable_variables, gradients, strict=True)
        },
        {variable.path: value for variable, value in zip(graph.variables, state, strict=True)},
        {f"the output of {name}": producers[name] for name in values}
        | {variable.path: number for number, part in stages for variable in part.variables},
    )


def _array(value: Any) -> Array:
    return np.array(to_array(tf.convert_to_tensor(value)))


def _with_variables(graph: Any, compute: Callable[[], _Computed]) -> _Program:
    """Let a model use and write its variables as usual; their values are read after the run."""

    def program() -> tuple[_Computed, list[Any], list[Any]]:
        with tf.GradientTape() as tape:
            computed = compute()
            root = _root(*computed)
        return computed, tape.gradient(root, [v.value for v in graph.trainable_variables]), []

    return program


def _in_stages(cut: SplitModel, inputs: Sequence[tf.Tensor], *, training: bool) -> _Program:
    """Run the stages one after another, as a pipeline does."""
    graph = cut.graph

    def program() -> tuple[_Computed, list[Any], list[Any]]:
        weights = [tf.identity(variable.value) for variable in graph.trainable_variables]
        now = dict(zip(map(id, graph.trainable_variables), weights, strict=True))
        now |= {id(v): tf.identity(v.value) for v in graph.variables if id(v) not in now}
        values: dict[str, Any] = dict(zip(cut.inputs, inputs, strict=True))
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            added = []
            for number, part in enumerate(cut.parts):
                functions = StageFunctions(
                    number, part, wanted=(), outputs=(), loss=None, regularized=(), shared=(), again=False, eager=True
                )
                taken_now = [name for link, names in cut.values.items() if link.target == number for name in names]
                given = {name: values[name] for name in (*taken_now, *(cut.inputs if number == 0 else ()))}
                weights_now, state = (
                    [now.get(id(v), v.value) for v in own] for own in (functions.trainable, functions.state)
                )
                results, extra, changed = functions.call(weights_now, state, given, training=training)
                values |= {name: tf.identity(value) for name, value in results.items()}  # like messages: without masks
                added += [] if extra is None else [extra]
                pairs = zip(functions.variables, changed, strict=True)
                now |= {id(variable): value for variable, value in pairs if value is not None}
            regularized = [v for v in graph.trainable_variables if v.regularizer is not None]
            added += whole_penalties(regularized, [v.regularizer(now[id(v)]) for v in regularized])
            outputs = {name: values[name] for part in cut.parts for name in part.gives if not name.endswith(MASK)}
            computed = outputs, _sum(added)
            root = _root(*computed)
        return computed, tape.gradient(root, weights), [now[id(v)] for v in graph.variables]

    return program


def _root(values: Mapping[str, tf.Tensor], added: tf.Tensor) -> tf.Tensor:
    """Return a number that depends on every element of every value."""
    terms = [added]
    for value in values.values():
        if value.dtype.is_floating:
            flat = tf.reshape(_float64(value), (-1,))
            terms.append(tf.reduce_sum(flat * tf.cos(tf.cast(tf.range(tf.size(flat)), tf.float64))))
    return tf.add_n(terms)


def _sum(losses: Sequence[Any]) -> tf.Tensor:
    return tf.add_n([tf.zeros((), tf.float64), *(tf.reduce_sum(_float64(loss)) for loss in losses)])


def _float64(value: Any) -> tf.Tensor:
    return tf.cast(value, tf.float64)


def _differs(one: ModelRun, other: ModelRun) -> bool:
    try:
        compare_with_original(SingleRank(), one, other)
    except UsageError:
        return True
    return False


# A batch through the pipeline


def check_batch(
    comm: Communicator, steps: StepRunner, variables: Sequence[Any], values: Iterable[Array], batch: Any, loss: Any
) -> None:
    """Compare the pipeline's predictions for a batch with those of the whole model for its microbatches. Collective.

    variables: of the whole model, to compute with; values: their values in the pipeline. loss: as compiled, or None; it
    is compared, too, with the losses that layers add, if the batch has a target. Raises UsageError on all ranks if
    anything differs.
    """
    x, y = unpack_batch(batch)
    graph, whole = steps.graph, dict[str, Array]()
    with prevent_side_effects([graph], variables):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        inputs = inputs_of(graph, x)
        parts = rows_of(rows_in(inputs, "x"), steps.pipe.schedule.microbatches)
        nest = partial(keras.tree.pack_sequence_as, graph.input)
        expected = [graph(nest(take_rows(inputs, part)), training=False) for part in parts if part.start < part.stop]
        outputs = [tf.concat(own, 0) for own in zip(*map(keras.tree.flatten, expected), strict=True)]
        whole |= {f"the output {name}": to_array(one) for name, one in zip(graph.output_names, outputs, strict=True)}
        has_loss = loss is not None and y is not None
        if has_loss:
            value = loss(as_tensors(y, "y"), keras.tree.flatten(graph(nest(inputs), training=False)), None)
            whole["the loss"] = np.array(float(value) + float(_sum(graph.losses)), keras.config.floatx())
    with prevent_side_effects([graph], list(steps.variables.values())):
        outputs_of_stages = steps.outputs.share(
            steps.pipe, steps.run(x, None, None, has_loss=False, keeps_outputs=True).outputs
        )
    own = {f"the output {name}": to_array(one) for name, one in zip(graph.output_names, outputs_of_stages, strict=True)}
    if has_loss:
        with prevent_side_effects([graph], list(steps.variables.values())):
            own["the loss"] = np.array(steps.run(x, y, None).loss, keras.config.floatx())
    # Results in shorter floats are rounded at other points when operations are fused, whatever the output dtype.
    kinds = {str(layer.compute_dtype) for layer in graph._flatten_layers()} & {"float16", "bfloat16", "float32"}
    tolerance = max((TOLERANCES[kind] for kind in kinds), default=None)
    compare_with_original(comm, ModelRun(whole), ModelRun(own), when="in an evaluation", tolerance=tolerance)


def unpack_batch(batch: Any) -> tuple[Any, Any]:
    """Return x and y of a batch as `verify=` takes it."""
    return keras.utils.unpack_x_y_sample_weight(batch)[:2] if isinstance(batch, tuple) else (batch, None)


def check_same_batch(comm: Communicator, batch: Any) -> None:
    """Raise MismatchError on all ranks unless they have the same batch. Collective."""
    leaves = [np.asarray(leaf) for leaf in keras.tree.flatten(batch) if leaf is not None]
    lines = [f"a value of the batch: {one.shape} {one.dtype} {zlib.crc32(one.tobytes()):08x}" for one in leaves]
    check_agreement(comm, "verify", lines)
