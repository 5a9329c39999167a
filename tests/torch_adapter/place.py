"""Place: a device on which the bodies of tests in `device_verbs` and `device_training` put tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor


class Place(Protocol):
    """A device of host memory (see `late`), or a GPU. device: what torch calls it; name: what the core does."""

    device: str
    name: str

    def put(self, values: Tensor) -> Tensor:
        """Return a copy there of a tensor of the host; it comes to be there late, if torch itself can be late."""
        ...

    def host(self) -> AbstractContextManager[Any]:
        """Let tensors on the CPU be the host's, within a `with`."""
        ...
