"""Scheme: reduce the gradients of a bucket in fewer bytes, and keep unsent values from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.dtypes import Array
from commlib.literals import Op

State = dict[str, dict[str, Array]]
"""The state of each parameter, by its name and the state's kind: {"layer.weight": {"residual": ...}}."""

COMMON = frozenset({"draws", "q", "step"})
"""The kinds of state that must be the same on all ranks that reduce together. Other kinds belong to each rank."""


@dataclass(frozen=True, slots=True)
class BucketPart:
    """The position of one parameter in the values of a bucket, in elements."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.count


class CodecRanks(Protocol):
    """The part of a communicator that moves compressed data."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Any, op: Op = "sum", *, out: Any = None) -> Any: ...

    def all_gather(self, x: Any, *, out: Any = None) -> Any: ...

    def all_gather_v(self, x: Any) -> Any: ...

    def all_to_all(self, x: Any, *, out: Any = None) -> Any: ...

    def watch(self, text: str) -> Callable[[], None]: ...


class SchemeReducer(Protocol):
    """The reduction of one bucket on one rank, with its state."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent in the last `reduce`."""
        ...

    def reduce(self, values: Array, flags: Array) -> bool:
        """Replace `values` by their sum over the ranks, and `flags` too; return whether the sum is finite. Collective.

        Both are float32, 1-D and on the reducer's device. The sum is an approximation with the same bits on all ranks.
        The elements between the parts become undefined. Flags, 0 or positive, are exact: positive afterwards if they
        were positive on any rank.
        """
        ...

    def commit(self) -> None:
        """Accept the last reduction, because the step that used it was taken."""
        ...

    def rollback(self) -> None:
        """Restore the state before the last `reduce`, because the step was skipped."""
        ...

    def state(self) -> State:
        """Return copies of the state, in the shapes of the parameters."""
        ...

    def load(self, state: Mapping[str, Mapping[str, Array]]) -> None:
        """Load the state of this bucket's parameters."""
        ...


@runtime_checkable
class Scheme(Protocol):
    """Description of a compression method: users pass it as `compression=`. Immutable."""

    @property
    def name(self) -> str:
        """Name that must be the same on all ranks."""
        ...

    @property
    def divisible(self) -> bool:
        """Whether a parameter may be cut into pieces that are compressed separately."""
        ...

    def reducer(
        self, comm: CodecRanks, parts: Sequence[BucketPart], *, key: str = "", device: Device = HOST
    ) -> SchemeReducer:
        """Return the reducer of a bucket with these parts. `key` gives each bucket different random numbers.

        device: the device of the bucket's values. Raises UsageError if the scheme cannot reduce there.
        """
        ...
