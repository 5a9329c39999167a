"""DistributedGradientTape: tf.GradientTape whose gradients are combined over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from commlib import horovod as core
from commlib.data_parallel import Statistics, StepReport
from commlib.errors import UsageError
from commlib_tensorflow._graph import as_written
from commlib_tensorflow.compression import Compression, GradientCompressing
from commlib_tensorflow.gradients import Gradients

_shared_reducer: Callable[..., Gradients] = functools.lru_cache(maxsize=64)(Gradients)
"""A tape is made anew in every step; what ranks have agreed on outlives it."""


class DistributedTape(tf.GradientTape):  # type: ignore[misc]  # TensorFlow has no types
    """What `DistributedGradientTape` returns: records as the tape that it was made from, and reduces in `gradient`."""

    def __init__(self, tape: tf.GradientTape, reducer: Gradients, scale_local_gradients: bool) -> None:
        # What a tape records to is the other one's business, so there is no super().__init__().
        self._wrapped = tape
        self._reducer = reducer
        self._scale_local_gradients = scale_local_gradients
        self._local: dict[int, Any] = {}

    @property
    def report(self) -> StepReport | None:
        """What communication cost in the last step of such tapes; None before the first one, and on a single rank."""
        return self._reducer.report

    @property
    def statistics(self) -> Statistics:
        """What all reductions of such tapes cost since the start."""
        return self._reducer.statistics

    def register_local_source(self, source: Any) -> None:
        """Note that a variable is this rank's own: its gradient is not combined with those of other ranks."""
        self._local[_identity(source)] = source

    @as_written
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the gradients with respect to `sources`, combined over all ranks. Collective.

        Those of local sources are this rank's own, divided by the number of ranks unless scale_local_gradients=False.
        use_generic_names: variables are compared among ranks by their places in `sources`, and not by their names.
        """
        if use_generic_names and isinstance(self._reducer.groups, tuple):
            raise UsageError("use_generic_names does not go with groups of variables, which are found by their names")
        gradients = self._wrapped.gradient(target, sources, output_gradients, unconnected_gradients)
        flat_sources = tf.nest.flatten(sources)
        flat = tf.nest.flatten(gradients)
        shared = [index for index, source in enumerate(flat_sources) if not self._is_local(source)]
        names = [f"source {i}" if use_generic_names else label(flat_sources[i], i) for i in shared]
        reduced = self._reducer([flat[index] for index in shared], names, [flat_sources[index] for index in shared])
        answer = [self._scaled(gradient) for gradient in flat]
        for index, gradient in zip(shared, reduced, strict=True):
            answer[index] = gradient
        return tf.nest.pack_sequence_as(sources, answer)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return what `gradient` does as pairs (source, gradient): those of local sources, and all others. Collective.

        Each in the order of `sources`, flat.
        """
        gradients = self.gradient(target, sources, output_gradients, use_generic_names=use_generic_names)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True))
        return [p for p in pairs if self._is_local(p[0])], [p for p in pairs if not self._is_local(p[0])]

    def _is_local(self, source: Any) -> bool:
        return _identity(source) in self._local

    def _scaled(self, gradient: Any) -> Any:
        if gradient is None or not self._scale_local_gradients:
            return gradient
        size = self._reducer.size
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(size, gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(size, gradient.dtype)

    # The rest of a tape

    def __enter__(self) -> DistributedTape:
        self._wrapped.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._wrapped.__exit__(*exception)

    def watch(self, tensor: Any) -> None:
        """Record what is computed from `tensor`."""
        self._wrapped.watch(tensor)

    def watched_variables(self) -> Any:
        """Return the variables that are watched."""
        return self._wrapped.watched_variables()

    def stop_recording(self) -> Any:
        """Return a context manager that suspends recording."""
        return self._wrapped.stop_recording()

    def reset(self) -> None:
        """Forget what was recorded."""
        self._wrapped.reset()

    def jacobian(self, *arguments: Any, **options: Any) -> Any:
        """Return this rank's own Jacobian."""
        return self._wrapped.jacobian(*arguments, **options)

    def batch_jacobian(self, *arguments: Any, **options: Any) -> Any:
        """Return this rank's own Jacobian per example."""
        return self._wrapped.batch_jacobian(*arguments, **options)


@as_written
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: GradientCompressing = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = core.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: core.ProcessSet | None = None,
    scale_local_gradients: bool = True,
    compress_within_node: bool = False,
    overlap: bool | None = None,
) -> DistributedTape:
    """Return a tape that records as `gradtape` does and whose `gradient` is combined over all ranks.

    op: Average, Sum or another one of `allreduce`. groups: a number of groups, or lists of variables whose gradients
    travel together; num_groups is its former name. By default gradients travel in buckets. See `Gradients` for
    the rest. Gradients of variables given to `register_local_source` stay this rank's own.
    """
    if num_groups and groups is not None:
        raise UsageError("num_groups is the former name of groups: give one of them")
    reducer = _shared_reducer(
        "DistributedGradientTape",
        op=core.resolve_op(op),
        compression=compression,
        compress_within_node=compress_within_node,
        overlap=overlap,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        groups=_by_name(groups) if groups is not None else num_groups or None,
        process_set=core.process_set_of(process_set),
    )
    return DistributedTape(gradtape, reducer, scale_local_gradients)


@as_written
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: GradientCompressing = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = core.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: core.ProcessSet | None = None,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    compress_within_node: bool = False,
    overlap: bool | None = None,
) -> DistributedTape:
    """Return a `DistributedGradientTape` for which all weights of `local_layers`, a layer or several, are local."""
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        compress_within_node,
        overlap,
    )
    for layer in _layers(local_layers):
        for weight in layer.trainable_weights:
            tape.register_local_source(weight)
    return tape


def label(variable: Any, index: int) -> str:
    """Return what a variable is called in messages and groups: its path, its name, or its place."""
    try:
        return str(getattr(variable, "path", None) or variable.name)
    except (AttributeError, ValueError):  # an eager tensor has no name
        return f"source {index}"


def _layers(local_layers: Any) -> Iterable[Any]:
    if local_layers is None:
        return ()
    layers = list(local_layers) if isinstance(local_layers, list | tuple | set) else [local_layers]
    for layer in layers:
        if not hasattr(layer, "trainable_weights"):
            raise UsageError(f"local_layers must be layers of Keras, got {type(layer).__name__}")
    return layers


def _by_name(groups: int | Sequence[Sequence[Any]]) -> int | tuple[tuple[str, ...], ...]:
    if isinstance(groups, int):
        return groups
    return tuple(tuple(v if isinstance(v, str) else label(v, 0) for v in group) for group in groups)


def _identity(source: Any) -> int:
    """Return what a keras.Variable and the tf.Variable within have in common."""
    return id(getattr(source, "_value", source) if hasattr(source, "path") else source)
