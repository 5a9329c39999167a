"""PathContext: a group and one of its devices, with what the paths of all calls there share."""

from __future__ import annotations

from commlib.collectives.device.nccl_connection import NcclConnection
from commlib.collectives.device.peers import DevicePeers
from commlib.collectives.device.staging_queue import StagingQueue
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.group.group import Group


class PathContext:
    """A group and one of its devices. The device has a staging queue, a board of peers and NCCL; the host needs none.

    Each of them ends with the group: see `GroupPart`.
    """

    def __init__(self, group: Group, device: Device) -> None:
        self.group, self.device, self.on_host = group, device, device is HOST
        self.queue = StagingQueue(group.waits, device)
        self.peers = DevicePeers(group, self.queue)
        self.nccl = NcclConnection(group, device)
        if not self.on_host:
            group.attach(self.queue)
