"""PathContext: a group and one of its devices, with what the paths of all calls there share."""

from __future__ import annotations

from commlib.collectives.device.nccl_connection import NcclConnection
from commlib.collectives.device.peers import DevicePeers
from commlib.collectives.device.staging_queue import StagingQueue
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.group.group import Group
from commlib.group.weak_references import WeakPart


class PathContext:
    """A group and one of its devices. The device has a staging queue, a board of peers and NCCL; the host needs none.

    It ends with its group (see `GroupPart`), but does not belong to it: it refers to the group.
    """

    def __init__(self, group: Group, device: Device) -> None:
        self.group, self.device, self.on_host = group, device, device is HOST
        self.queue = StagingQueue(group, device)
        self.peers = DevicePeers(group, self.queue)
        self.nccl = NcclConnection(group, device)
        if not self.on_host:
            group.attach(WeakPart(self))

    def leave(self, reason: str) -> None:
        """Wait for the queued work; with a reason, release its waits for other ranks instead."""
        self.queue.leave(reason)
        self.peers.leave(reason)

    def close(self) -> None:
        """Wait a few seconds for the queued work and drop the memory. Also called after an abort."""
        self.queue.close()
        self.peers.close()

    def halt(self) -> None:
        """Do nothing: a forked child moves no data."""
