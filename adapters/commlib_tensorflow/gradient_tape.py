"""DistributedGradientTape: wrap tf.GradientTape, and combine its gradients over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from commlib import horovod as core
from commlib.compress.casts import Compressing
from commlib.data_parallel import BUCKET_CAP_MIB, FIRST_BUCKET_MIB, Reporting
from commlib.errors import UsageError
from commlib.horovod.mesh_sets import process_set_along
from commlib.mesh_groups import Mesh
from commlib.sharding.same_parts import axes_of_data, mesh_of
from commlib_tensorflow._graph import no_autograph
from commlib_tensorflow._local_shards import places_of
from commlib_tensorflow._local_shards import reduced as reduced_apart
from commlib_tensorflow._shards import leave_here, mark_gradient, shard_of
from commlib_tensorflow.compression import Compression
from commlib_tensorflow.gradients import Gradients, scaled

_shared_reducer: Callable[..., Gradients] = functools.lru_cache(maxsize=64)(Gradients)
"""A tape is made anew in every step; what ranks have agreed on outlives it."""

_NAME = "DistributedGradientTape"


@functools.lru_cache(maxsize=64)
def _along(mesh: Mesh) -> core.ProcessSet:
    """Return the ranks of a mesh that have the same parts. Collective over all ranks, once for each mesh."""
    return process_set_along(mesh, axes_of_data(mesh), _NAME)


class DistributedTape(tf.GradientTape, Reporting):  # type: ignore[misc]  # TensorFlow has no types
    """Record as the tape that it was made from, and reduce in `gradient`. `DistributedGradientTape` returns it."""

    def __init__(
        self, tape: tf.GradientTape, make: Callable[[core.ProcessSet], Gradients], group: core.ProcessSet,
        scale_local_gradients: bool,
    ) -> None:  # fmt: skip
        # What a tape records to is the other one's business, so there is no super().__init__().
        self._wrapped = tape
        self._make, self._group = make, group
        self._reducer = make(group)
        self._scale_local_gradients = scale_local_gradients
        self._local: dict[int, Any] = {}

    @property
    def reducer(self) -> Gradients:
        """What reduces the gradients of such tapes."""
        return self._reducer

    def register_local_source(self, source: Any) -> None:
        """Note that a variable is this rank's own: its gradient is not combined with those of other ranks."""
        self._local[_identity(source)] = source
        leave_here(source)

    @no_autograph
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
        Sources that are divided along an axis of a mesh know over which ranks, unless a process set was given.
        use_generic_names: variables are compared among ranks by their places in `sources`, and not by their names.
        """
        if use_generic_names and isinstance(self._reducer.groups, tuple):
            raise UsageError("use_generic_names does not go with groups of variables, which are found by their names")
        gradients = self._wrapped.gradient(target, sources, output_gradients, unconnected_gradients)
        flat_sources = tf.nest.flatten(sources)
        flat = tf.nest.flatten(gradients)
        apart = places_of(flat_sources)
        shared = [n for n, source in enumerate(flat_sources) if n not in apart and not self._is_local(source)]
        self._ask_marks([flat_sources[index] for index in shared])
        names = [f"source {i}" if use_generic_names else label(flat_sources[i], i) for i in shared]
        reduced = self._reducer([flat[index] for index in shared], names, [flat_sources[index] for index in shared])
        factor = 1 / self._reducer.size if self._scale_local_gradients else 1.0
        answer = [scaled(gradient, factor) for gradient in flat]
        for index, gradient in zip(shared, reduced, strict=True):
            answer[index] = gradient
        if apart:
            op = "sum" if self._reducer.op == core.Sum else "mean"
            own, theirs = [flat[index] for index in apart], [flat_sources[index] for index in apart]
            for index, gradient in zip(apart, reduced_apart(own, theirs, op, self._reducer.size), strict=True):
                answer[index] = gradient
        for gradient, source in zip(answer, flat_sources, strict=True):
            mark_gradient(gradient, source)
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

    def _ask_marks(self, sources: Sequence[Any]) -> None:
        """Reduce over the ranks with the same parts of sources, where these know their mesh and nobody said another."""
        if self._group is core.global_process_set:
            shards = [("", shard) for source in sources if (shard := shard_of(source)) is not None]
            if shards and (mesh := mesh_of(shards, self._reducer.size)) is not None:
                self._reducer = self._make(_along(mesh))

    def _is_local(self, source: Any) -> bool:
        return _identity(source) in self._local

    # The rest of a tape

    def __enter__(self) -> DistributedTape:
        self._wrapped.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._wrapped.__exit__(*exception)


def _passed_on(name: str) -> Any:
    """Return a method that calls the one of the wrapped tape. A Jacobian is this rank's own."""
    plain = getattr(tf.GradientTape, name)

    @functools.wraps(plain)
    def method(self: DistributedTape, *arguments: Any, **options: Any) -> Any:
        return getattr(self._wrapped, name)(*arguments, **options)

    return method


for _name in ("watch", "watched_variables", "stop_recording", "reset", "jacobian", "batch_jacobian"):
    setattr(DistributedTape, _name, _passed_on(_name))


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
    compress_within_node: bool = False,
    overlap: bool | None = None,
    *,
    bucket_cap_mib: float = BUCKET_CAP_MIB,
    first_bucket_mib: float = FIRST_BUCKET_MIB,
) -> DistributedTape:
    """Return a tape that records as `gradtape` does and whose `gradient` is combined over all ranks.

    op: Average, Sum or another one of `allreduce`. groups: a number of groups, or lists of variables whose gradients
    travel together; num_groups is its former name. By default gradients travel in buckets. See `Gradients` for
    the rest. Gradients of variables given to `register_local_source` stay this rank's own. Variables that are divided
    along an axis of a mesh know over which ranks the others are reduced, too: then no process_set needs to be given,
    and the first call of `gradient` is collective over all ranks.
    """
    if num_groups and groups is not None:
        raise UsageError("num_groups is the former name of groups: give one of them")
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
        "groups": _by_name(groups) if groups is not None else num_groups or None,
    }

    def make(group: core.ProcessSet) -> Gradients:
        return _shared_reducer(_NAME, process_set=group, **settings)

    return DistributedTape(gradtape, make, group, scale_local_gradients)


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
    """Return a `DistributedGradientTape` for which all weights of `local_layers`, a layer or several, are local."""
    arguments = dict(locals())
    layers = layers_of(arguments.pop("local_layers"))
    tape = DistributedGradientTape(**arguments.pop("more"), **arguments)
    for layer in layers:
        for weight in layer.trainable_weights:
            tape.register_local_source(weight)
    return tape


def label(variable: Any, index: int) -> str:
    """Return what a variable is called in messages and groups: its path, its name, or its place."""
    try:
        return str(getattr(variable, "path", None) or variable.name)
    except (AttributeError, ValueError):  # an eager tensor has no name
        return f"source {index}"


def layers_of(local_layers: Any) -> Iterable[Any]:
    """Return a layer or several as a list. Raises UsageError for what is none."""
    if local_layers is None:
        return ()
    layers = list(local_layers) if isinstance(local_layers, list | tuple | set | frozenset) else [local_layers]
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
