"""Flattening of values between stages: the tensors, and a pickled spec of the containers around them."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from commlib.errors import UsageError


def flatten(values: Sequence[Any]) -> tuple[list[Tensor], str]:
    """Return the tensors in some values, and a spec from which `unflatten` rebuilds the values.

    Tensors may be in any picklable object: in containers, dataclasses, objects of any class. Raises UsageError for
    values that cannot be pickled.
    """
    if all(isinstance(value, Tensor) for value in values):
        return list(values), ""
    file = io.BytesIO()
    writer = _Writer(file)
    try:
        writer.dump(list(values))
    except Exception as error:
        kinds = ", ".join(sorted({type(value).__name__ for value in values if not isinstance(value, Tensor)}))
        raise UsageError(
            f"pipeline: the values that one stage sends to another ({kinds}) cannot be pickled "
            f"({type(error).__name__}: {error}): use tensors, tuples, dictionaries or objects of a module's classes "
            "between layers"
        ) from error
    return writer.tensors, base64.b64encode(file.getvalue()).decode()


def unflatten(tensors: list[Tensor], note: str) -> list[Any]:
    """Rebuild values from their tensors and a spec."""
    if not note:
        return tensors
    return _Reader(io.BytesIO(base64.b64decode(note)), tensors).load()  # type: ignore[no-any-return]


class _Writer(pickle.Pickler):
    """Writes a tensor as its index among all."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        """Return the index of a tensor; None for other objects."""
        if not isinstance(obj, Tensor):
            return None
        place = self._places.setdefault(id(obj), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(obj)
        return place


class _Reader(pickle.Unpickler):
    """Reads a spec that another rank of this job has written."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        """Return the tensor with an index."""
        return self._tensors[pid]
