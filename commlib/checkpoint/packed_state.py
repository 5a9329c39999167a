"""Packed state: nested state with arrays, as a file that is safe to read (it runs no code), and as a digest.

An adapter converts its tensors to `PackedTensor` bytes, so every dtype of any framework is restored bit for bit. The
state may also hold dictionaries, lists, tuples, numbers, strings and None.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO
from zipfile import BadZipFile, is_zipfile

import numpy as np

from commlib.dtypes import Array
from commlib.errors import UsageError

_LAYOUT = "layout"  # the arrays are "0", "1", ...


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensor:
    """A tensor. data: its bytes, uint8 [nbytes], in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: Array

    @classmethod
    def of(cls, array: Array) -> PackedTensor:
        """Pack a numpy array."""
        return cls(array.dtype.name, array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def array(self) -> Array:
        """Return a numpy array, if numpy knows the dtype."""
        return self.data.view(np.dtype(self.dtype)).reshape(self.shape)


def _layout(value: Any, arrays: list[Array], at: str) -> Any:
    """Convert nested state to JSON values, and append the bytes of its tensors to `arrays`. Raises UsageError."""
    if isinstance(value, np.ndarray):
        value = PackedTensor.of(value)
    if isinstance(value, PackedTensor):
        arrays.append(value.data)
        return ["tensor", value.dtype, list(value.shape), len(arrays) - 1]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str | int)]:
            raise UsageError(f"checkpoint: {at} has the key {odd[0]!r}: expected strings and integers")
        return ["dict", [[key, _layout(one, arrays, f"{at}[{key!r}]")] for key, one in value.items()]]
    if isinstance(value, list | tuple):
        items = [_layout(one, arrays, f"{at}[{number}]") for number, one in enumerate(value)]
        return ["tuple" if isinstance(value, tuple) else "list", items]
    if value is None or isinstance(value, bool | int | float | str):
        return ["value", value]
    raise UsageError(
        f"checkpoint: {at} is a {type(value).__name__}: expected tensors, numbers, strings, and lists, tuples and "
        "dictionaries of them"
    )


def _unfold(layout: Any, arrays: Callable[[int], Array]) -> Any:
    kind, *rest = layout
    if kind == "tensor":
        dtype, shape, number = rest
        return PackedTensor(dtype, tuple(shape), arrays(number))
    if kind == "dict":
        return {key: _unfold(one, arrays) for key, one in rest[0]}
    if kind == "value":
        return rest[0]
    items = [_unfold(one, arrays) for one in rest[0]]
    return tuple(items) if kind == "tuple" else items


def digest(state: Any, name: str) -> str:
    """Return a digest of a state's bits. `name` is its name in errors. Raises UsageError."""
    arrays: list[Array] = []
    layout = json.dumps(_layout(state, arrays, name))
    hasher = hashlib.blake2b(layout.encode(), digest_size=16)
    for array in arrays:
        hasher.update(array.data)
    return hasher.hexdigest()


def write(file: BinaryIO, state: Any, name: str) -> None:
    """Write state to a file: numpy's .npz, without pickles. Raises UsageError, OSError."""
    arrays: list[Array] = []
    layout = json.dumps(_layout(state, arrays, name)).encode()
    parts: dict[str, Any] = {str(number): array for number, array in enumerate(arrays)}
    parts[_LAYOUT] = np.frombuffer(layout, np.uint8)
    np.savez(file, **parts)


def read(file: BinaryIO) -> Any:
    """Read the state from a file of `write`, with `PackedTensor` tensors. Raises OSError, ValueError."""
    with open_npz(file) as parts:
        return _unfold(json.loads(parts[_LAYOUT].tobytes()), lambda number: parts[str(number)])


@contextmanager
def open_npz(file: BinaryIO) -> Iterator[Mapping[str, Array]]:
    """Open a file of arrays. Raises OSError; ValueError if it is damaged, or if it is another file.

    numpy's errors recommend to allow pickles, which could run any program.
    """
    try:
        if not is_zipfile(file):
            raise ValueError("it is not an npz file, or not complete")
        file.seek(0)
        with np.load(file, allow_pickle=False) as parts:
            yield parts
    except (ValueError, EOFError, BadZipFile) as error:
        if "allow_pickle" in str(error):
            raise ValueError("it has Python objects, which commlib neither writes nor loads") from None
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"it is damaged: {error}") from error
