"""Letters between the ends of channels, whose mailbox may go before they have left."""

from __future__ import annotations

import gc
from typing import Any

from commlib.p2p.rendezvous import Address, Rendezvous


class _Request:
    """A send that is seen to be complete only where it is tested, as MPI's are."""

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


def test_letters_of_a_mailbox_that_is_gone_are_looked_after() -> None:
    """Each pipeline that was dropped left two requests behind, for ever, since nobody tested them any more."""
    transport: Any = _Transport()
    poller: Any = None

    def mailbox() -> Rendezvous:
        return Rendezvous(transport, poller, transport)

    gone = mailbox()
    gone.post(Address(1, "edge", 0), "hello")
    gone.post(Address(1, "edge", 0), "bye")
    del gone
    gc.collect()
    mailbox().post(Address(1, "other", 0), "hello")  # the first two are still on their way
    gc.collect()
    assert len(transport.under_way) == 3
    for request in transport.under_way:
        request.has_left = True
    kept = mailbox()
    kept.post(Address(1, "more", 0), "hello")
    assert len(transport.under_way) == 1
    for request in transport.under_way:
        request.has_left = True
    kept.close()
    assert not transport.under_way
