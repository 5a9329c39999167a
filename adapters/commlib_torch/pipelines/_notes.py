"""Notes: what goes from one stage to another as tensors, and a note of what else there is around them."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from commlib.errors import UsageError


def flat(values: Sequence[Any]) -> tuple[list[Tensor], str]:
    """Return the tensors in some values, and a note from which `nested` makes the values again.

    Tensors may be anywhere in what can be pickled: in containers, dataclasses, objects of any class. Raises UsageError
    for what cannot.
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
            f"pipeline: what one stage gives to another ({kinds}) cannot be pickled ({type(error).__name__}: {error}): "
            "let tensors, tuples, dictionaries or objects of a module's classes come between layers"
        ) from error
    return writer.tensors, base64.b64encode(file.getvalue()).decode()


def nested(tensors: list[Tensor], note: str) -> list[Any]:
    """Return values, of their tensors and a note."""
    if not note:
        return tensors
    return _Reader(io.BytesIO(base64.b64decode(note)), tensors).load()  # type: ignore[no-any-return]


class _Writer(pickle.Pickler):
    """Writes a tensor as its place among all."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        """Return the place of a tensor; None for all else."""
        if not isinstance(obj, Tensor):
            return None
        place = self._places.setdefault(id(obj), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(obj)
        return place


class _Reader(pickle.Unpickler):
    """Reads what another rank of this job has written."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        """Return the tensor of a place."""
        return self._tensors[pid]
