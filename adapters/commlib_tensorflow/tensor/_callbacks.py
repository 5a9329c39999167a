"""Callbacks that save a sharded model: rank 0 of the axis runs Keras' own, with a model that writes unsharded files.

The other ranks serve it: they gather their shards, read the same files, and set the same attributes. If all replicas
have callbacks for the same files, one rank of all replicas writes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from commlib.communicator import Communicator
from commlib.comparison.agreement import run_together
from commlib.errors import UsageError
from commlib.horovod.callbacks import BestModel
from commlib.sharding.sharding import Sharding
from commlib.sharding.shards import world_ranks
from commlib_tensorflow._keras_reduction import DistributedMixin, replace
from commlib_tensorflow._shards import shards_in
from commlib_tensorflow.tensor.state import gather_model

_KEEPERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)
_HOOKS = ("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_train_batch_end")
_PLAIN = (bool, int, float, str, np.generic, type(None))


def watch_callbacks() -> None:
    """Make Keras' callbacks that save models handle sharded models from now on."""
    replace(keras.callbacks.CallbackList, "set_model", _wrap_set_model)
    replace(keras.callbacks.CallbackList, "on_train_begin", _wrap_train_begin)


def _wrap_set_model(original: Any) -> Any:
    @functools.wraps(original)
    def set_model(self: Any, model: Any) -> None:
        comm = _shard_ranks(model)
        if comm is not None:
            names = [type(one).__name__ for one in self.callbacks if _saves_model(one)]
            every = comm.all_gather_object(names)
            if any(other != every[0] for other in every):
                raise UsageError(
                    f"fit: callbacks that save a sharded model are {every} on the ranks of {comm.name}: pass the same "
                    "ones to all of them; one rank writes"
                )
            self.callbacks[:] = [SharedCallback(one, comm) if _saves_model(one) else one for one in self.callbacks]
        original(self, model)

    return set_model


def _wrap_train_begin(original: Any) -> Any:
    @functools.wraps(original)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        model = next((one.model for one in self.callbacks), None)
        if (everyone := _replica_ranks(model)) is not None:
            _share_files([one for one in self.callbacks if isinstance(one, SharedCallback)], model, everyone)
        original(self, logs)

    return on_train_begin


def _share_files(callbacks: list[SharedCallback], model: Any, everyone: Communicator) -> None:
    """Let one rank of all replicas run the callbacks that have the same files in each. Collective over all replicas.

    Raises UsageError on all ranks if only some callbacks of replicas have the same files.
    """
    own = [(type(one.callback).__name__, _files_of(one.callback)) for one in callbacks]
    axis = _shard_ranks(model)
    every = everyone.all_gather_object((own, world_ranks(axis)[0] if axis is not None else -1))
    if all(other == own for other, _ in every):
        for one in callbacks:
            one.comm = everyone
            one.set_model(model)
        return
    users: dict[Any, set[int]] = {}
    for given, replica in every:
        for one in given:
            users.setdefault(one, set()).add(replica)
    shared = [one for one, replicas in users.items() if len(replicas) > 1]
    if shared:
        name, path = shared[0]
        raise UsageError(
            f"fit: {name} writes {path} in several replicas of a sharded model, but their ranks have other callbacks "
            f"too: pass the same ones to all ranks of {everyone.name}, and one writes, or use a path for each replica"
        )


def _files_of(callback: Any) -> str:
    return os.fspath(getattr(callback, "filepath", "") or getattr(callback, "backup_dir", ""))


def _replica_ranks(model: Any) -> Communicator | None:
    """Return all ranks of the replicas that train a sharded model together; None for a single replica."""
    comm = _shard_ranks(model)
    optimizer = getattr(model, "optimizer", None)
    mesh = None if comm is None else comm.cached.get("mesh")
    if mesh is None or not isinstance(getattr(optimizer, "inner_optimizer", optimizer), DistributedMixin):
        return None
    everyone: Communicator = mesh.comm
    return everyone if comm is not None and everyone.size > comm.size else None


def _saves_model(callback: Any) -> bool:
    return type(callback) in _KEEPERS or isinstance(callback, BestModel)


def _shard_ranks(model: Any) -> Communicator | None:
    """Return the ranks with the shards of a model, if it is sharded over one axis and `save` is Keras' own."""
    if not isinstance(model, keras.Model) or type(model).save is not keras.Model.save:
        return None
    shards = [shard for _, shard in shards_in(model) if shard.axis.size > 1]
    axes = list(dict.fromkeys(shard.axis for shard in shards))
    if len({axis.comm for axis in axes}) != 1 or not all(isinstance(shard.sharding, Sharding) for shard in shards):
        return None
    return axes[0].comm


class SharedCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Lets rank 0 run a callback of Keras for all ranks."""

    def __init__(self, callback: Any, comm: Communicator) -> None:
        super().__init__()
        self.callback, self.comm = callback, comm

    def set_model(self, model: Any) -> None:
        """Set the model."""
        super().set_model(model)
        self.callback.set_model(UnshardedFiles(model, self.comm) if self.comm.rank == 0 else model)

    def set_params(self, params: Any) -> None:
        """Set the parameters of `fit`."""
        super().set_params(params)
        self.callback.set_params(params)

    def run(self, hook: str, *args: Any, **options: Any) -> None:
        """Run a hook on rank 0, and serve it on the others; then copy rank 0's callback state to all. Collective."""
        if hook == "on_train_batch_end" and getattr(self.callback, "save_freq", None) == "epoch":
            return  # the hook does nothing in this case
        raised = self._lead(hook, *args, **options) if self.comm.rank == 0 else self._follow()
        if raised is not None:
            raise raised

    def _lead(self, hook: str, *args: Any, **options: Any) -> Exception | None:
        raised = None
        try:
            getattr(self.callback, hook)(*args, **options)
        except Exception as error:
            raised = error
        known = {name: value for name, value in vars(self.callback).items() if isinstance(value, _PLAIN)}
        self.comm.broadcast_object(("", known, "" if raised is None else f"{type(raised).__name__}: {raised}"))
        return raised

    def _follow(self) -> Exception | None:
        raised: Exception | None = None
        while True:
            what, *given = self.comm.broadcast_object(None)
            if not what:
                break
            try:
                _ACTIONS[what](self.model, self.comm, *given)
            except Exception as error:
                raised = error
        known, text = given
        vars(self.callback).update(known)
        if not text:
            return None
        return raised or UsageError(f"{type(self.callback).__name__}, on rank 0 of {self.comm.name}: {text}")


def _hook(name: str) -> Callable[..., None]:
    def run(self: SharedCallback, *args: Any, **options: Any) -> None:
        self.run(name, *args, **options)

    run.__name__, run.__doc__ = name, "Run this hook of the callback, if it has one."
    return run


for _name in _HOOKS:
    setattr(SharedCallback, _name, _hook(_name))


class UnshardedFiles:
    """A sharded model on rank 0, for a callback: it saves the unsharded model, gathered from all ranks."""

    def __init__(self, model: Any, comm: Communicator) -> None:
        vars(self).update(_model=model, _comm=comm)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._request("set", name, value)

    def save(self, *args: Any, **options: Any) -> None:
        """Save the unsharded model as Keras does."""
        self._request("gather").save(*args, **options)

    def save_weights(self, *args: Any, **options: Any) -> None:
        """Save the weights of the unsharded model as Keras does."""
        self._request("gather").save_weights(*args, **options)

    def load_weights(self, *args: Any, **options: Any) -> None:
        """Load weights of the unsharded model, on all ranks."""
        self._request("load", args, options)

    def _request(self, what: str, *given: Any) -> Any:
        self._comm.broadcast_object((what, *given))
        return _ACTIONS[what](self._model, self._comm, *given)


def _gather(model: Any, comm: Communicator) -> Any:
    return gather_model(model)


def _load(model: Any, comm: Communicator, args: Any, options: Any) -> None:
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    run_together(comm, lambda: model.load_weights(*args, **options))


def _set(model: Any, comm: Communicator, name: str, value: Any) -> None:
    setattr(model, name, value)


_ACTIONS: dict[str, Callable[..., Any]] = {"gather": _gather, "load": _load, "set": _set}
