"""Scheme: reduce the gradients of a bucket in fewer bytes, and remember from step to step what was not sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.dtypes import Array

State = dict[str, dict[str, Array]]
"""What is remembered of each parameter, by its name and by what it is: {"layer.weight": {"residual": ...}}."""

COMMON = frozenset({"draws", "q", "step"})
"""What of it is the same on all ranks that reduce together, and must be: the rest is each rank's own."""


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter's place in the values of a bucket. Units: elements."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.count


class Comm(Protocol):
    """Move compressed data between ranks. A Communicator is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Any, op: str = "sum", *, out: Any = None) -> Any: ...

    def all_gather(self, x: Any, *, out: Any = None) -> Any: ...

    def all_gather_v(self, x: Any) -> Any: ...

    def all_to_all(self, x: Any, *, out: Any = None) -> Any: ...

    def watch(self, text: str) -> Callable[[], None]: ...


class Reducer(Protocol):
    """The reduction of one bucket on one rank, with its state."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank handed to messages in the last `reduce`."""
        ...

    def reduce(self, values: Array, flags: Array) -> bool:
        """Replace `values` by their sum over the ranks, and `flags` too; return whether the sum is finite. Collective.

        Both are float32, 1-D and on the device that the reducer was made for. The sum is an approximation, the same
        bits on all ranks; what lies between the parts may become anything. Flags, 0 or positive, are exact: positive
        afterwards if they were on any rank.
        """
        ...

    def commit(self) -> None:
        """Note that the step which used the last reduction was taken."""
        ...

    def rollback(self) -> None:
        """Note that the step was skipped: what is remembered is what it was before the last `reduce`."""
        ...

    def state(self) -> State:
        """Return copies of what is remembered, in the shapes of the parameters."""
        ...

    def load(self, state: Mapping[str, Mapping[str, Array]]) -> None:
        """Take over what is known of this bucket's parameters."""
        ...


@runtime_checkable
class Scheme(Protocol):
    """Describe how to compress: users give it as `compression=`. Immutable."""

    @property
    def name(self) -> str:
        """What all ranks must agree on."""
        ...

    @property
    def divisible(self) -> bool:
        """Whether a parameter may be cut into pieces that are compressed apart."""
        ...

    def reducer(self, comm: Comm, parts: Sequence[Part], *, key: str = "", device: Device = HOST) -> Reducer:
        """Return the reducer of a bucket with these parts. `key` tells buckets apart where chance plays a role.

        device: where the bucket's values are. Raises UsageError if the scheme cannot reduce there.
        """
        ...
