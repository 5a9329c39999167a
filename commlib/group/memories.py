"""Symmetric memories of a group: on the host, and on each device where they were requested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlib.buffers.symmetric_memory import SymmetricMemory
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.group.hierarchy import Hierarchy

Gather = Callable[[Any], list[Any]]


class Memories:
    """The memories of one group. gather: all-gathers an object of each rank; gather_in_node: within this node."""

    def __init__(self, hierarchy: Hierarchy, gather_in_node: Gather, gather: Gather) -> None:
        self._hierarchy, self._gather_in_node, self._gather = hierarchy, gather_in_node, gather
        self.host = self._create(lambda nbytes: hierarchy.node.share(nbytes, gather_in_node))
        self._on: dict[Any, SymmetricMemory] = {HOST: self.host}

    def on(self, device: Device) -> SymmetricMemory:
        """Return the symmetric memory of a device."""
        found = self._on.get(device)
        if found is None:
            place, gather = self._hierarchy.place, self._gather_in_node
            found = self._on[device] = self._create(lambda nbytes: device.share(nbytes, place, gather))
        return found

    def _create(self, share: Callable[[int], Any]) -> SymmetricMemory:
        return SymmetricMemory(self._hierarchy.place, share, self._gather)

    def close(self) -> None:
        """Release all memories."""
        for memory in self._on.values():
            memory.close()
