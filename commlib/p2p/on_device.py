"""What messages send of a device's array, and fill for it: its own memory, or the host's that it is copied through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commlib.devices.array import DeviceArray
from commlib.devices.waiting import wait_for
from commlib.p2p.post import Post

if TYPE_CHECKING:
    from commlib.group.group import Group


def memory_of(comm: Group, post: Post, array: DeviceArray, verb: str, peer: int, *, incoming: bool) -> Any:
    """Return what is sent of a 1-D array, or filled for it: the array itself, or memory of the host.

    What is to be sent is there. Waits for what the current stream was told before, but where the host's memory is
    filled: a message moves at once, and messages of one peer and tag must be posted in their order.
    """
    device = array.device
    flat, what = array, "work on"
    if not post.takes(peer, device.name):
        flat, what = device.staging(array.nbytes).view(array.dtype), "a copy from"
        if incoming:
            return flat
        device.copy(flat, array)
    wait_for(device.current().record(), comm.watch(f"{verb}: {what} {device.name}", ()))
    return flat
