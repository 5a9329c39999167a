"""Pumps: a send is polled until it is complete."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from commlib.p2p.channels.progress import ChannelProgress


class Outgoing:
    """A sending end that runs some code at each poll."""

    def __init__(self):
        self.may_lag = False
        self.meanwhile = lambda: None

    @property
    def is_in_flight(self):
        was_in_flight = self.may_lag
        self.meanwhile()
        return was_in_flight


def ends_():
    watched = []
    poller = SimpleNamespace(watch=lambda pump, owner: watched.append(pump))

    class Group:
        runtime = SimpleNamespace(poller=poller)

    class Ends:
        outgoing, incoming, is_closed = Outgoing(), None, False
        may_be_received = staticmethod(lambda: True)

    group: Any = Group()
    ends: Any = Ends()
    return group, ends, ChannelProgress(group, ends, "channel"), watched


def test_a_send_is_polled_until_it_completes():
    _group, ends, pumps, watched = ends_()
    pumps.sent()
    assert not watched
    ends.outgoing.may_lag = True
    pumps.sent()
    pumps.sent()
    assert len(watched) == 1 and not watched[0].done() and not watched[0].done()
    ends.outgoing.may_lag = False
    assert watched[0].done()
    ends.outgoing.may_lag = True
    pumps.sent()
    assert len(watched) == 2


def test_a_send_during_the_completion_of_the_last_one_is_polled():
    """Another thread sent it just after all sends were complete, and relied on the pump that was about to end."""
    _group, ends, pumps, watched = ends_()
    ends.outgoing.may_lag = True
    pumps.sent()
    ends.outgoing.may_lag = False

    def send():
        ends.outgoing.meanwhile = lambda: None
        ends.outgoing.may_lag = True
        pumps.sent()

    ends.outgoing.meanwhile = send
    assert not all(pump.done() for pump in watched)
    assert not all(pump.done() for pump in watched)
    ends.outgoing.may_lag = False
    assert all(pump.done() for pump in watched)


def test_freed_channels_are_not_polled():
    _group, ends, pumps, watched = ends_()
    ends.outgoing.may_lag = True
    pumps.sent()
    assert not watched[0].done()
    ends.may_be_received = lambda: False
    assert watched[0].done()
