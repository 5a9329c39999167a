"""Broadcast: send the tensors of one rank to all, under names, in few messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from commlib.arguments import list_of
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.horovod.operations import allgather_object, broadcast_object, start_broadcast
from commlib.horovod.process_sets import ProcessSet, process_set_of, require_world

PACK_BYTES = 8 * 2**20
"""Smaller tensors are packed into messages of up to this size."""


class BroadcastRanks(Protocol):
    """Broadcasts tensors among ranks: a Communicator, or `NamedRanks`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather_object(self, obj: Any) -> list[Any]: ...

    def broadcast_object(self, obj: Any, root: int = 0) -> Any: ...

    def broadcast(self, x: Any, root: int = 0) -> Any: ...


class NamedRanks:
    """The ranks of a process set, with operations by name; roots are ranks of the world."""

    def __init__(self, name: str, process_set: ProcessSet | None) -> None:
        self._name, self._process_set = name, process_set_of(process_set)
        self._process_set.coordinator(name)  # raises on ranks outside the set
        self.rank: int = require_world().rank
        self.size: int = self._process_set.size() or 1

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks."""
        return allgather_object(obj, f"{self._name}.agreement", self._process_set)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return the root's object."""
        return broadcast_object(obj, root, f"{self._name}.object", self._process_set)

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """Overwrite an array with the root's."""
        name = f"{self._name}.values"
        return start_broadcast([x], root, name, process_set=self._process_set, blocking=True).wait()


def name_values(call: str, values: Mapping[str, Any] | Iterable[Any]) -> list[tuple[str, Any]]:
    """Return pairs (name, value) from a mapping, from pairs, or from values, which are named "tensor 0" and so on.

    Raises UsageError for anything else. call: its name, for errors.
    """
    if isinstance(values, Mapping):
        return list(values.items())
    items = list_of(call, "a mapping or an iterable of tensors, such as model.state_dict()", values)
    for item in items:
        if isinstance(item, tuple) and len(item) != 2:
            raise UsageError(f"{call}: expected pairs (name, tensor), got a tuple of {len(item)} values")
    return [item if isinstance(item, tuple) else (f"tensor {n}", item) for n, item in enumerate(items)]


def plan_packs(sizes: Iterable[int], limit: int = PACK_BYTES) -> Iterator[list[int]]:
    """Yield the indices of each message's tensors, in order. `sizes` are bytes; one above `limit` is sent alone."""
    pack: list[int] = []
    total = 0
    for number, nbytes in enumerate(sizes):
        if pack and total + nbytes > limit:
            yield pack
            pack, total = [], 0
        pack.append(number)
        total += nbytes
    if pack:
        yield pack


def broadcast_pack(arrays: Sequence[Array], root: int, ranks: BroadcastRanks) -> None:
    """Overwrite contiguous arrays of any dtypes with the root's, as one message of bytes. Collective."""
    views = [array.reshape(-1).view(np.uint8) for array in arrays]
    if len(views) == 1:
        ranks.broadcast(views[0], root)
        return
    is_root = ranks.rank == root
    message = np.concatenate(views) if is_root else np.empty(sum(map(len, views)), np.uint8)
    ranks.broadcast(message, root)
    bounds = itertools.accumulate(map(len, views), initial=0)
    for view, start in zip(views, bounds, strict=False):
        if not is_root:
            view[:] = message[start : start + len(view)]
