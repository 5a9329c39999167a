"""Letters between the ends of channels, whose mailbox may be freed before they are sent."""

from __future__ import annotations

import gc
from typing import Any

from commlib.p2p.rendezvous import Address, Rendezvous


class _Request:
    """A send that completes only when tested, as in MPI."""

    def __init__(self, under_way: set[Any]) -> None:
        self._under_way, self.has_left = under_way, False
        under_way.add(self)

    def test(self) -> bool:
        if self.has_left:
            self._under_way.discard(self)
        return self.has_left


class _Transport:
    def __init__(self) -> None:
        self.under_way: set[Any] = set()

    def send(self, peer: int, tag: int, data: memoryview) -> _Request:
        return _Request(self.under_way)


def test_letters_of_a_freed_mailbox_are_completed() -> None:
    """Each pipeline that was dropped left two requests behind, for ever, since they were never tested again."""
    transport: Any = _Transport()
    poller: Any = None

    def mailbox() -> Rendezvous:
        return Rendezvous(transport, poller, transport)

    freed = mailbox()
    freed.post(Address(1, "edge", 0), "hello")
    freed.post(Address(1, "edge", 0), "bye")
    del freed
    gc.collect()
    mailbox().post(Address(1, "other", 0), "hello")  # the first two are still in flight
    gc.collect()
    assert len(transport.under_way) == 3
    for request in transport.under_way:
        request.has_left = True
    retained = mailbox()
    retained.post(Address(1, "more", 0), "hello")
    assert len(transport.under_way) == 1
    for request in transport.under_way:
        request.has_left = True
    retained.close()
    assert not transport.under_way
