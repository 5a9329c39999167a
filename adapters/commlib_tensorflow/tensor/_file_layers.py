"""Sharded layers and Keras' files: layers take their shards of unsharded files; shards are not written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import tensorflow as tf

from commlib.errors import UsageError
from commlib_tensorflow._shards import own_of, shard_of


@cache
def disguise_class(kind: type, plain: type) -> type:
    """Return a class of layers that are `kind`, but report class `plain` when they are cloned or saved."""
    bases = (kind,) if issubclass(kind, FileLayer) else (FileLayer, kind)
    known = property(lambda self: plain)
    from_config = classmethod(lambda cls, config: plain.from_config(config))  # type: ignore[attr-defined]  # layers have it
    return type(kind.__name__, bases, {"__doc__": kind.__doc__, "__class__": known, "from_config": from_config})


def refuse_configuration(name: str) -> UsageError:
    """Return the error for constructing a sharded layer from its configuration alone."""
    return UsageError(
        f"{name} needs the ranks of an axis, which a configuration cannot hold: to clone the model, construct it "
        "again; or shard a model of plain layers by parallelize, whose configuration is the unsharded model's"
    )


class FileLayer:
    """Sharded layer in files: take own shards of unsharded values; refuse to write a shard."""

    variables: list[Any]
    whole_by = (
        "save gather_model(model), on which all ranks call gather_model and one of them save or export; for a copy, "
        "shard a clone that was made before this model was sharded"
    )
    """The remedy in errors."""

    def save_own_variables(self, store: Any) -> None:
        """Refuse: the file would contain one rank's shard."""
        self.check_unsharded()
        super().save_own_variables(store)  # type: ignore[misc]

    def check_export(self) -> None:
        """Raise UsageError if an export, to be served by one process, would contain one rank's shard."""
        self.check_unsharded()

    def check_unsharded(self) -> None:
        """Raise UsageError if a file would contain one rank's shard."""
        for axis in self._axes():
            owner = f"rank {axis.rank} of {axis.comm.name}"
            raise UsageError(f"{owner} has a shard of this model: {self.whole_by}")

    def _axes(self) -> list[Any]:
        shards = [shard_of(variable) for variable in self.variables]
        return list(dict.fromkeys(shard.axis for shard in shards if shard is not None and shard.axis.size > 1))

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> Any:
        if save_type == "savedmodel":  # tf.saved_model.save
            self.check_export()
        children = super()._trackable_children(save_type, **options)  # type: ignore[misc]
        if save_type == "checkpoint" and (axes := self._axes()):
            own = _ShardLabel([f"rank {axis.rank} of {axis.size}" for axis in axes])
            children["commlib_part"] = vars(self).setdefault("_part", own)  # TensorFlow calls this several times
        return children

    def load_own_variables(self, store: Any) -> None:
        """Read an unsharded layer."""
        super().load_own_variables(ShardReader(store, self.variables))  # type: ignore[misc]


class _ShardLabel(tf.train.experimental.PythonState):  # type: ignore[misc]  # TensorFlow has no types
    """Label of a TensorFlow checkpoint with the rank of its shard: shards of other ranks may have the same shape."""

    def __init__(self, ranks: list[str]) -> None:
        self._text = ", ".join(ranks)

    def serialize(self) -> str:
        """Return the label of this rank's shard."""
        return self._text

    def deserialize(self, string_value: Any) -> None:
        """Refuse the shard of another rank."""
        theirs = tf.compat.as_text(string_value)
        if theirs != self._text:
            raise UsageError(
                f"{self._text} reads a checkpoint with the shard of {theirs}: use a separate path for each rank, with "
                "the same number of ranks, or save gather_model(model)"
            )


class ShardReader(Mapping[str, Any]):
    """A file's values for `variables`, by their numbers, from which this rank takes its shards."""

    def __init__(self, store: Any, variables: Sequence[Any]) -> None:
        self._store, self._variables = store, variables

    def __getitem__(self, key: str) -> Any:
        value = self._store[key]
        return own_of(self._variables[int(key)], value) if key.isdigit() else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.keys())

    def __len__(self) -> int:
        return len(self._store.keys())
