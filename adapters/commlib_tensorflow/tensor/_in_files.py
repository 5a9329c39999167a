"""Divided layers in Keras' files: what is read is the whole, of which they take their parts; parts are not written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import tensorflow as tf

from commlib.errors import UsageError
from commlib_tensorflow._shards import own_of, shard_of


@cache
def kept_as(kind: type, plain: type) -> type:
    """Return a class of layers that are `kind`, and say that they are `plain` to who clones them, or their files."""
    bases = (kind,) if issubclass(kind, InFiles) else (InFiles, kind)
    known = property(lambda self: plain)
    made = classmethod(lambda cls, config: plain.from_config(config))  # type: ignore[attr-defined]  # layers have it
    return type(kind.__name__, bases, {"__doc__": kind.__doc__, "__class__": known, "from_config": made})


def refuse_configuration(name: str) -> UsageError:
    """Return the error for a layer, of a class with this name, that is to be made from its configuration alone."""
    return UsageError(
        f"{name} is made with the ranks of an axis, which no configuration has: for a clone call what made the model "
        "once more; or divide a model of plain layers by parallelize, whose configuration is the whole's"
    )


class InFiles:
    """A divided layer: take own parts of what is read; refuse to write them as if they were all."""

    variables: list[Any]
    whole_by = (
        "save gather_model(model), on which all ranks call gather_model and one of them save or export; for a copy, "
        "divide a clone that was made before this was divided"
    )
    """What to do instead, for errors."""

    def save_own_variables(self, store: Any) -> None:
        """Refuse: a file would have one rank's part."""
        self.check_whole()
        super().save_own_variables(store)  # type: ignore[misc]

    def check_export(self) -> None:
        """Raise UsageError where what is exported, to be served by one process, would have one rank's part."""
        self.check_whole()

    def check_whole(self) -> None:
        """Raise UsageError where a file would have one rank's part."""
        for axis in self._axes():
            whose = f"rank {axis.rank} of {axis.comm.name}"
            raise UsageError(f"{whose} has a part of this model: {self.whole_by}")

    def _axes(self) -> list[Any]:
        shards = [shard_of(variable) for variable in self.variables]
        return list(dict.fromkeys(shard.axis for shard in shards if shard is not None and shard.axis.size > 1))

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> Any:
        if save_type == "savedmodel":  # tf.saved_model.save
            self.check_export()
        children = super()._trackable_children(save_type, **options)  # type: ignore[misc]
        if save_type == "checkpoint" and (axes := self._axes()):
            own = _PartOf([f"rank {axis.rank} of {axis.size}" for axis in axes])
            children["commlib_part"] = vars(self).setdefault("_part", own)  # TensorFlow asks several times
        return children

    def load_own_variables(self, store: Any) -> None:
        """Read a whole layer."""
        super().load_own_variables(Parts(store, self.variables))  # type: ignore[misc]


class _PartOf(tf.train.experimental.PythonState):  # type: ignore[misc]  # TensorFlow has no types
    """What a checkpoint of TensorFlow says of whose part it has: parts of other ranks may have the same shape."""

    def __init__(self, ranks: list[str]) -> None:
        self._text = ", ".join(ranks)

    def serialize(self) -> str:
        """Say whose part this is."""
        return self._text

    def deserialize(self, string_value: Any) -> None:
        """Refuse the part of another rank."""
        theirs = tf.compat.as_text(string_value)
        if theirs != self._text:
            raise UsageError(
                f"{self._text} reads a checkpoint with the part of {theirs}: give each rank a path of its own, with as "
                "many ranks, or save gather_model(model)"
            )


class Parts(Mapping[str, Any]):
    """A file's values for `variables`, by their numbers, of which this rank takes its parts."""

    def __init__(self, store: Any, variables: Sequence[Any]) -> None:
        self._store, self._variables = store, variables

    def __getitem__(self, key: str) -> Any:
        value = self._store[key]
        return own_of(self._variables[int(key)], value) if key.isdigit() else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.keys())

    def __len__(self) -> int:
        return len(self._store.keys())
