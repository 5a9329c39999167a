"""Messages of an all_to_all_v: one to and one from each rank, of any length, to several ranks at once."""

from __future__ import annotations

from typing import Any

from commlib.devices.array import DeviceArray
from commlib.devices.waiting import wait_for
from commlib.group.group import Group
from commlib.node.signature import signature
from commlib.schedule.layout import Layout

# Ranks to send to at once. More would only congest the network.
WINDOW = 8

_PARTS = ", parts"  # separates these tags from the call's other messages


def exchange(
    group: Group, text: str, x: Any, outof: Layout, target: Any, into: Layout, *, is_certain: bool
) -> dict[int, int]:
    """Exchange parts of flat arrays within an operation; return {peer: bytes received} for unexpected lengths.

    -1 bytes means a message longer than expected. is_certain: ranks have exchanged the lengths. Otherwise each message
    is probed before it is received, because a message longer than its posted receive may overwrite memory.
    """
    transport, rank, size = group.transport, group.rank, group.size
    tag = group.status.history + signature(text + _PARTS)
    on_wait, posted = group.waits.watch(text), group.programs.posted
    receive: Any = transport.recv if is_certain else transport.recv_probed
    keep, put = outof.slice_of(rank), into.slice_of(rank)
    target[slice(*put)] = x[slice(*keep)]
    if type(x) is DeviceArray:  # queued work may still use the memory
        wait_for(x.device.current().record(), on_wait)
    odd: dict[int, int] = {}
    for number, first in enumerate(range(1, size, WINDOW)):
        steps = range(first, min(first + WINDOW, size))
        arrivals = {}
        for peer in ((rank - step) % size for step in steps):
            place = target[slice(*into.slice_of(peer))]
            arrivals[peer] = place.nbytes, receive(peer, tag, _bytes(place))
        sends = [
            transport.send(peer, tag, _bytes(x[slice(*outof.slice_of(peer))]))
            for peer in ((rank + step) % size for step in steps)
        ]
        if posted is not None:
            posted(0, number)
        requests = [*(request for _, request in arrivals.values()), *sends]
        try:
            transport.wait(requests, on_wait)
        except BaseException:
            for request in requests:
                request.cancel()
            raise
        odd |= {peer: request.nbytes for peer, (nbytes, request) in arrivals.items() if request.nbytes != nbytes}
    return odd


def _bytes(array: Any) -> Any:
    data = array.view("uint8")
    return data if type(data) is DeviceArray else data.data
