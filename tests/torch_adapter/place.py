"""Place: a device for the tensors of the tests in `device_verbs` and `device_training`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor


class Place(Protocol):
    """A device in host memory (see `late`), or a GPU. device: torch's name for it; name: the core's."""

    device: str
    name: str

    def put(self, values: Tensor) -> Tensor:
        """Copy a host tensor to the device. The copy arrives late if torch itself can be late."""
        ...

    def host(self) -> AbstractContextManager[Any]:
        """Treat CPU tensors as the host's within a `with`."""
        ...
