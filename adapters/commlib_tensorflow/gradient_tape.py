"""DistributedGradientTape: wrap tf.GradientTape, and reduce its gradients over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from commlib import horovod as core
from commlib.arguments import read_flag
from commlib.compress.casts import Compressing
from commlib.data_parallel.buckets import BUCKET_CAP_MIB, FIRST_BUCKET_MIB
from commlib.data_parallel.report import Reporting
from commlib.errors import UsageError
from commlib.horovod.mesh_sets import process_set_along
from commlib.mesh_groups import Mesh
from commlib.sharding.shard_replicas import axes_of_data, mesh_of
from commlib_tensorflow._host_calls import has_tangents, is_recorded, no_autograph
from commlib_tensorflow._local_gradients import add_local, places_of
from commlib_tensorflow._shards import mark_gradient, mark_local, shards_of
from commlib_tensorflow.compression import Compression
from commlib_tensorflow.errors import as_tensorflows
from commlib_tensorflow.gradients import TensorReducer

_shared_reducer: Callable[..., TensorReducer] = functools.lru_cache(maxsize=64)(TensorReducer)
"""A new tape is made in every step; the ranks' agreements outlive it."""

_NAME = "DistributedGradientTape"


@functools.lru_cache(maxsize=64)
def _data_ranks(mesh: Mesh) -> core.ProcessSet:
    """Return the ranks of a mesh that have the same shards. Collective over all ranks, once for each mesh."""
    return process_set_along(mesh, axes_of_data(mesh), _NAME)


class DistributedTape(tf.GradientTape, Reporting):  # type: ignore[misc]  # TensorFlow has no types
    """Tape that records like the wrapped one and reduces in `gradient`. `DistributedGradientTape` returns it."""

    def __init__(
        self, tape: tf.GradientTape, group: core.ProcessSet, settings: Mapping[str, Any], scale_local_gradients: bool
    ) -> None:  # fmt: skip
        # The wrapped tape does the recording, so there is no super().__init__().
        self._wrapped = tape
        self._group, self._settings = group, settings
        self._reducer = _shared_reducer(_NAME, process_set=group, **settings)
        self._scale_local_gradients = read_flag("scale_local_gradients", scale_local_gradients)
        self._local: dict[int, Any] = {}

    @property
    def reducer(self) -> TensorReducer:
        """The object that reduces the gradients of such tapes."""
        return self._reducer

    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of a variable on this rank: it is not reduced over the ranks."""
        self._local[_identity(source)] = source
        mark_local(source)

    @no_autograph
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the gradients with respect to `sources`, reduced over all ranks. Collective.

        Gradients of local sources stay on this rank, divided by the number of ranks unless scale_local_gradients=False.
        Sources that are sharded along an axis of a mesh determine the ranks, unless a process set was given.
        use_generic_names: variables are matched among ranks by their index in `sources` instead of their names.
        """
        if use_generic_names and isinstance(self._reducer.groups, tuple):
            raise UsageError("use_generic_names does not work with groups of variables, which are found by their names")
        gradients = self._wrapped.gradient(target, sources, output_gradients, unconnected_gradients)
        flat_sources, flat = tf.nest.flatten(sources), tf.nest.flatten(gradients)
        is_marked = any(shards_of(flat_sources))
        if not is_marked and not self._local:
            return tf.nest.pack_sequence_as(sources, self._reduce(flat, flat_sources, use_generic_names))
        copies = places_of(flat_sources)
        shared = [n for n, source in enumerate(flat_sources) if n not in copies and not self._is_local(source)]
        own, those = [flat[index] for index in shared], [flat_sources[index] for index in shared]
        self._set_ranks_from_marks(those)
        reduced = dict(zip(shared, self._reduce(own, those, use_generic_names, shared), strict=True))
        answer = add_local(self._reducer, flat, flat_sources, reduced, scale=self._scale_local_gradients)
        for gradient, source in zip(answer, flat_sources, strict=True):
            mark_gradient(gradient, source)
        return tf.nest.pack_sequence_as(sources, answer)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return the gradients as pairs (source, gradient): for local sources, and for all others. Collective.

        Both lists are in the order of `sources`, flattened.
        """
        gradients = self.gradient(target, sources, output_gradients, use_generic_names=use_generic_names)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True))
        return [p for p in pairs if self._is_local(p[0])], [p for p in pairs if not self._is_local(p[0])]

    def _set_ranks_from_marks(self, sources: Sequence[Any]) -> None:
        """Reduce over the ranks with the same shards, if sources are sharded on a mesh without a process set."""
        if self._group is core.global_process_set:
            shards = [("", shard) for shard in shards_of(sources) if shard is not None]
            if shards and (mesh := mesh_of(shards, self._reducer.size)) is not None:
                self._reducer = _shared_reducer(_NAME, process_set=_data_ranks(mesh), **self._settings)

    def _reduce(
        self,
        gradients: Sequence[Any],
        sources: Sequence[Any],
        use_generic_names: bool,
        numbers: Sequence[int] | None = None,
    ) -> list[Any]:
        """Return reduced gradients: with their derivatives in forward mode, and refusing those of reverse mode.

        numbers: the indices of these sources among all; None if these are all.
        """
        reducer, numbers = self._reducer, range(len(sources)) if numbers is None else numbers
        if use_generic_names:
            names = [f"source {number}" for number in numbers]
        else:
            names = [label(source, number) for source, number in zip(sources, numbers, strict=True)]
        if reducer.alone:
            return reducer(gradients, names, sources)
        given = [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients if one is not None]
        if not is_recorded(*given):
            return reducer(gradients, names, sources)
        if tf.executing_eagerly() and has_tangents(given):
            return reducer.reduce_with_tangents(gradients, names, sources)
        return _differentiate_once(gradients, reducer(gradients, names, sources))

    def _is_local(self, source: Any) -> bool:
        return _identity(source) in self._local

    # The rest of a tape

    def __enter__(self) -> DistributedTape:
        self._wrapped.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._wrapped.__exit__(*exception)


def _forward_method(name: str) -> Any:
    """Return a method that calls the wrapped tape's. A Jacobian is not reduced."""
    plain = getattr(tf.GradientTape, name)

    @functools.wraps(plain)
    def method(self: DistributedTape, *arguments: Any, **options: Any) -> Any:
        return getattr(self._wrapped, name)(*arguments, **options)

    return method


for _name in ("watch", "watched_variables", "stop_recording", "reset", "jacobian", "batch_jacobian"):
    setattr(DistributedTape, _name, _forward_method(_name))


@no_autograph
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressing = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = core.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: core.ProcessSet | None = None,
    scale_local_gradients: bool = True,
    *,
    bucket_cap_mib: float = BUCKET_CAP_MIB,
    first_bucket_mib: float = FIRST_BUCKET_MIB,
    overlap: bool | None = None,
    compress_within_node: bool = False,
) -> DistributedTape:
    """Return a tape that records like `gradtape`, and whose `gradient` is reduced over all ranks.

    Gradients of variables passed to `register_local_source` stay on this rank. Variables that are sharded along an axis
    of a mesh determine over which ranks the other gradients are reduced, too: then no `process_set` is needed, and the
    first call of `gradient` is collective over all ranks. See `TensorReducer` for the rest.

    Args:
        gradtape: The tape to wrap.
        device_dense: Unused; Horovod has it.
        device_sparse: Unused; Horovod has it.
        compression: A cast of Horovod; or "int8", "topk:ratio=0.01", "powersgd:rank=4", "auto", or a codec or scheme of
            `commlib.compress`: fewer bytes between nodes.
        sparse_as_dense: Whether sparse gradients are reduced as dense ones; otherwise they are gathered.
        op: Average, Sum or another one of `allreduce`.
        gradient_predivide_factor: The factor f: divide by f before the sum, and multiply by f / size afterwards.
        num_groups: The older name of `groups`.
        groups: A number of messages, or lists of variables that travel together; None: buckets.
        process_set: The ranks to reduce over; None: all.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.
        bucket_cap_mib: The size of a bucket, MiB.
        first_bucket_mib: The size of the first bucket, MiB.
        overlap: Whether buckets are sent while backward runs, otherwise at its end; None: if the group spans several
            nodes, or if each rank has more cores than the framework has threads.
        compress_within_node: Whether gradients are compressed between the ranks of a node, too.
    """
    if isinstance(gradtape, type) or not hasattr(gradtape, "gradient"):
        got = f"the class {gradtape.__name__}" if isinstance(gradtape, type) else type(gradtape).__name__
        raise UsageError(f"{_NAME}: expected a tf.GradientTape, got {got}")
    if num_groups and groups is not None:
        raise UsageError("num_groups is the former name of groups: give only one of them")
    group = core.process_set_of(process_set)
    settings: dict[str, Any] = {
        "op": core.resolve_op(op),
        "compression": compression,
        "compress_within_node": compress_within_node,
        "overlap": overlap,
        "bucket_cap_mib": bucket_cap_mib,
        "first_bucket_mib": first_bucket_mib,
        "gradient_predivide_factor": gradient_predivide_factor,
        "sparse_as_dense": sparse_as_dense,
        "groups": _group_names(groups) if groups is not None else num_groups or None,
    }

    return DistributedTape(gradtape, group, settings, scale_local_gradients)


@no_autograph
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressing = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = core.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: core.ProcessSet | None = None,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **more: Any,
) -> DistributedTape:
    """Return a `DistributedGradientTape` for which all weights of `local_layers`, one or several layers, are local.

    Args:
        gradtape: The tape to wrap.
        device_dense: Unused; Horovod has it.
        device_sparse: Unused; Horovod has it.
        compression: A cast of Horovod; or "int8", "topk:ratio=0.01", "powersgd:rank=4", "auto", or a codec or scheme of
            `commlib.compress`: fewer bytes between nodes.
        sparse_as_dense: Whether sparse gradients are reduced as dense ones; otherwise they are gathered.
        op: Average, Sum or another one of `allreduce`.
        gradient_predivide_factor: The factor f: divide by f before the sum, and multiply by f / size afterwards.
        num_groups: The older name of `groups`.
        groups: A number of messages, or lists of variables that travel together; None: buckets.
        process_set: The ranks to reduce over; None: all.
        local_layers: One or several layers whose gradients stay on their rank.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.
        **more: See `DistributedGradientTape`.

    Examples:
        tape = ct.PartialDistributedGradientTape(tape, local_layers=[model.layers[0]])
    """
    arguments = dict(locals())
    layers = layers_of(arguments.pop("local_layers"))
    tape = DistributedGradientTape(**arguments.pop("more"), **arguments)
    for layer in layers:
        for weight in layer.trainable_weights:
            tape.register_local_source(weight)
    return tape


def label(variable: Any, index: int) -> str:
    """Return a variable's name in messages and groups: its path, its name, or its index."""
    try:
        return str(getattr(variable, "path", None) or variable.name)
    except (AttributeError, ValueError):  # an eager tensor has no name
        return f"source {index}"


def layers_of(local_layers: Any) -> Iterable[Any]:
    """Return one or several layers as a list. Raises UsageError if one is not a layer."""
    if local_layers is None:
        return ()
    layers = list(local_layers) if isinstance(local_layers, list | tuple | set | frozenset) else [local_layers]
    for layer in layers:
        if not hasattr(layer, "trainable_weights"):
            raise UsageError(f"local_layers must be layers of Keras, got {type(layer).__name__}")
    return layers


def _differentiate_once(gradients: Sequence[Any], reduced: Sequence[Any]) -> list[Any]:
    """Return reduced gradients, which raise UsageError if a tape that watches `gradients` differentiates them.

    TensorFlow sees no gradient of the reduction, and would silently drop the second derivative.
    """
    answer = list(reduced)
    places = [
        place
        for place, pair in enumerate(zip(gradients, reduced, strict=True))
        if all(tf.is_tensor(one) for one in pair) and is_recorded(pair[0])
    ]
    if places:

        def passing(*_: Any) -> tuple[list[Any], Callable[..., Any]]:
            return [answer[place] for place in places], _refuse_gradient

        results = tf.custom_gradient(passing)(*(gradients[place] for place in places))
        for place, result in zip(places, results, strict=True):
            answer[place] = result
    return answer


def _refuse_gradient(*gradients: Any) -> Any:
    raise as_tensorflows(
        UsageError(
            f"{_NAME}: reduced gradients have no gradients: reduce those of a plain tf.GradientTape with "
            "grouped_allreduce, which differentiates"
        )
    )


def _group_names(groups: int | Sequence[Sequence[Any]]) -> int | tuple[tuple[str, ...], ...]:
    if isinstance(groups, int):
        return groups
    return tuple(tuple(v if isinstance(v, str) else label(v, 0) for v in group) for group in groups)


def _identity(source: Any) -> int:
    """Return a key that a keras.Variable shares with the tf.Variable inside it."""
    return id(getattr(source, "_value", source) if hasattr(source, "path") else source)
