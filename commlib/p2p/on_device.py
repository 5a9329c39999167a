"""Send and fill a device's array: from and into its own memory, or through a copy on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commlib.devices.array import DeviceArray
from commlib.devices.waiting import wait_for
from commlib.dtypes import Array
from commlib.p2p.post import Post

if TYPE_CHECKING:
    from commlib.group.group import Group


def memory_of(comm: Group, post: Post, array: DeviceArray, verb: str, peer: int, *, incoming: bool) -> Any:
    """Return what is sent of a 1-D array, or filled for it: the array itself, or memory of the host.

    What is to be sent is there. Waits for what the current stream was told before, but where the host's memory is
    filled: a message moves at once, and messages of one peer and tag must be posted in their order.
    """
    device = array.device
    if post.takes(peer, device.name):
        wait_for(device.current().record(), comm.watch(f"{verb}: work on {device.name}", ()))
        return array
    return device.staging(array.nbytes).view(array.dtype) if incoming else fetched(comm, array, verb)


def fetched(comm: Group, array: DeviceArray, what: str) -> Array:
    """Return host memory with the values of an array, which are there, in its shape."""
    device = array.device
    copy: Array = device.staging(array.nbytes).view(array.dtype).reshape(array.shape)
    device.copy(copy, array)
    wait_for(device.current().record(), comm.watch(f"{what}: a copy from {device.name}", ()))
    return copy
