"""Messages in pieces: each is sent once ready, and arrivals are reported in order, despite interrupts."""

from __future__ import annotations

import pytest

from commlib.errors import TransportError
from commlib.p2p.lanes.receive_pieces import ReceivePieces
from commlib.p2p.lanes.send_pieces import CopiedPiece, SendPieces


class Switch:
    """An event or request that the test completes."""

    def __init__(self):
        self.is_on = self.is_cancelled = False

    def done(self):
        return self.is_on

    test = done

    def cancel(self):
        self.is_cancelled = True


class Wire:
    """A transport that records its calls."""

    def __init__(self):
        self.messages, self.requests, self.failure = [], [], None

    def send(self, peer, tag, data):
        if self.failure is not None:
            raise self.failure
        return self._post((peer, tag, bytes(data)))

    def recv(self, peer, tag, into):
        return self._post((peer, tag, len(into)))

    def _post(self, message):
        self.messages.append(message)
        self.requests.append(Switch())
        return self.requests[-1]


def leaving(wire):
    events = [Switch() for _ in range(3)]
    places = ((0, 4), (4, 8), (8, 10))
    pieces = [CopiedPiece(*place, event) for place, event in zip(places, events, strict=True)]
    return SendPieces(wire, 1, 7, memoryview(b"0123456789"), pieces), events


def arriving(wire, nbytes, landed):
    return ReceivePieces(wire, 1, 7, memoryview(bytearray(nbytes)), 4, landed)


def test_pieces_are_sent_in_order_once_ready():
    wire = Wire()
    request, events = leaving(wire)
    events[1].is_on = True
    assert not request.test() and wire.messages == []
    events[0].is_on = True
    assert not request.test() and wire.messages == [(1, 7, b"0123"), (1, 7, b"4567")]
    events[2].is_on = True
    assert not request.test() and wire.messages[2:] == [(1, 7, b"89")]
    for posted in wire.requests:
        assert not request.test()
        posted.is_on = True
    assert request.test() and len(wire.messages) == 3 and request.nbytes == 10


def test_an_interrupted_piece_is_not_sent_again():
    wire = Wire()
    request, events = leaving(wire)
    events[0].is_on = events[1].is_on = True
    wire.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        request.test()
    wire.failure = None
    with pytest.raises(TransportError, match="a message to rank 1 was interrupted"):
        request.test()
    assert wire.messages == []


def test_arrivals_are_reported_in_order():
    wire, reported = Wire(), []
    request = arriving(wire, 10, lambda start, stop: reported.append((start, stop)))
    assert wire.messages == [(1, 7, 4), (1, 7, 4), (1, 7, 2)]
    wire.requests[1].is_on = True
    assert not request.test() and reported == []
    wire.requests[0].is_on = True
    assert not request.test() and reported == [(0, 4), (4, 8)]
    wire.requests[2].is_on = True
    assert request.test() and reported[2:] == [(8, 10)] and request.nbytes == 10


def test_an_interrupt_loses_no_arrival():
    reported = []

    def landed(start, stop):
        reported.append((start, stop))
        if len(reported) == 1:
            raise KeyboardInterrupt

    wire = Wire()
    request = arriving(wire, 8, landed)
    wire.requests[0].is_on = wire.requests[1].is_on = True
    with pytest.raises(KeyboardInterrupt):
        request.test()
    assert request.test() and reported == [(0, 4), (0, 4), (4, 8)]


@pytest.mark.parametrize("landed", [None, lambda start, stop: None])
def test_stopping_cancels_pending_pieces(landed):
    wire = Wire()
    request = arriving(wire, 8, landed)
    wire.requests[0].is_on = True
    assert not request.test()
    request.cancel()
    assert [posted.is_cancelled for posted in wire.requests] == [False, True]
    out = Wire()
    sending, events = leaving(out)
    events[0].is_on = True
    assert not sending.test()
    sending.cancel()
    assert [posted.is_cancelled for posted in out.requests] == [True]
