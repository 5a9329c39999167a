"""Broadcast variables or objects of one rank to all ranks, or gather objects of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from commlib import horovod as core
from commlib.arguments import list_of
from commlib.errors import UsageError
from commlib.horovod.mesh_sets import process_set_along
from commlib.ranks import Ranks
from commlib.sharding.shard_replicas import axes_of_data, find_acting_rank, mesh_of
from commlib.sharding.shards import check_same_shard
from commlib.tensor_verbs import check_ordered, choose_root
from commlib_tensorflow._bridge import as_tensor
from commlib_tensorflow._host_calls import is_ordered, no_autograph, operation_name
from commlib_tensorflow._local_gradients import places_of
from commlib_tensorflow._recorded_verbs import ordered, run
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow.named_verbs._autograd import broadcast_tensors

__all__ = (
    "BroadcastGlobalVariablesHook", "allgather_object", "broadcast_global_variables", "broadcast_object",
    "broadcast_object_fn", "broadcast_variables",
)  # fmt: skip


@no_autograph
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: core.ProcessSet | None = None,
    inplace: bool = False,
) -> Any:
    """Assign the values of rank `root_rank` to variables (tf.Variable or keras.Variable) on all ranks. Collective.

    All values travel in one operation; every rank passes variables of the same shapes and dtypes in the same order.
    Experts differ between ranks and are not changed. If some variables are sharded along an axis of a mesh, all
    variables of the call are broadcast among the ranks with the same shards: each gets the values of the rank at
    `root_rank`'s coordinates along the other axes. Returns an operation in a graph of TensorFlow 1, None otherwise.
    `inplace` has no effect: values are always assigned.

    Args:
        variables: Variables of tf or Keras.
        root_rank: The global rank whose values the others get.
        process_set: The participating ranks; None: all.
        inplace: Unused; Horovod has it.

    Raises:
        UsageError: For sharded variables if some of the ranks have other shards.
    """
    given = list_of("broadcast_variables", "variables, such as model.variables", variables)
    local = set(places_of(given))
    shared = [variable for place, variable in enumerate(given) if place not in local]
    if not shared:
        return None
    shards = [(getattr(variable, "path", ""), shard_of(variable)) for variable in shared]
    is_given = not (process_set is None or process_set is core.global_process_set)
    if not is_given and (mesh := mesh_of(shards, core.require_world().size)) is not None:
        axes = axes_of_data(mesh)
        process_set = process_set_along(mesh, axes, "broadcast_variables")
        root_rank = find_acting_rank(mesh, axes, root_rank)
    check_same_shard("broadcast_variables", shards, core.process_set_of(process_set).ranks or ())
    tensors = []
    for position, variable in enumerate(shared):
        label = getattr(variable, "path", None) or getattr(variable, "name", None) or f"entry {position}"
        if not hasattr(variable, "assign"):
            raise UsageError(f"broadcast_variables: {label} is a {type(variable).__name__}, expected a variable")
        try:
            tensors.append(as_tensor(variable))
        except UsageError as error:
            raise UsageError(f"broadcast_variables: {label}: {error}") from error
    name = operation_name("BroadcastVariables", None)
    values = broadcast_tensors(tensors, root_rank, name, core.process_set_of(process_set))
    updates = [variable.assign(value) for variable, value in zip(shared, values, strict=True)]
    return None if is_ordered() else tf.group(*updates)


@no_autograph
def broadcast_global_variables(root_rank: int) -> Any:
    """Return an operation that broadcasts all variables of a graph of TensorFlow 1.

    Args:
        root_rank: The global rank whose values the others get.

    Raises:
        RuntimeError: In eager mode, where TensorFlow has no list of all variables.

    Examples:
        with tf.compat.v1.Session() as session:
            session.run(ct.broadcast_global_variables(0))
    """
    if is_ordered():
        raise RuntimeError(
            "broadcast_global_variables does not work in eager mode, where TensorFlow keeps no list of all variables: "
            "use broadcast_variables(model.variables, root_rank), and the same for optimizer.variables"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]  # TensorFlow has no types
    """Broadcasts all variables of a graph of TensorFlow 1 after a MonitoredSession has initialised or restored them.

    Args:
        root_rank: The global rank whose values the others get.
        device: Unused; Horovod has it.

    Examples:
        hooks = [ct.BroadcastGlobalVariablesHook(0)]
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self._broadcast: Any = None

    def begin(self) -> None:
        """Add the operation, before the graph is finalised."""
        if self._broadcast is None or self._broadcast.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self._broadcast = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the broadcast."""
        session.run(self._broadcast)


@no_autograph
def broadcast_object(
    obj: Any,
    root_rank: int | None = None,
    session: Any = None,
    name: str | None = None,
    process_set: core.ProcessSet | None = None,
    *,
    root: int | None = None,
    ranks: Ranks | None = None,
) -> Any:
    """Return rank `root_rank`'s picklable object on all ranks. `session` exists for compatibility with Horovod.

    With `ranks` it is the ordered verb on those ranks, and `root` is a rank among them.

    Args:
        obj: A picklable object.
        root_rank: The global rank whose values the others get.
        session: Unused; Horovod has it.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        process_set: The participating ranks; None: all.
        root: With `ranks`: the rank among them whose values the others get.
        ranks: A communicator, mesh or process set: then this is the ordered verb on these ranks.
    """
    source = choose_root(root_rank, root)
    if ranks is not None:
        check_ordered(name, process_set)
        return run(ordered.broadcast_object(obj, source, ranks=ranks))
    return core.broadcast_object(obj, source, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: core.ProcessSet | None = None,
) -> Callable[[Any], Any]:
    """Return a function that calls `broadcast_object` on its argument.

    Args:
        root_rank: The global rank whose values the others get.
        session: Unused; Horovod has it.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        process_set: The participating ranks; None: all.

    Examples:
        >>> ct.broadcast_object_fn(root_rank=1)(f"rank {comm.rank}")
        'rank 1'
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@no_autograph
def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: core.ProcessSet | None = None
) -> list[Any]:
    """Return the picklable objects of all ranks, in rank order. `session` exists for compatibility with Horovod.

    Args:
        obj: A picklable object.
        session: Unused; Horovod has it.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        process_set: The participating ranks; None: all.
    """
    return core.allgather_object(obj, name, process_set)
