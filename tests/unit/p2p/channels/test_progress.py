"""Pumps: what has been sent is asked for until it has left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from commlib.p2p.channels.progress import ChannelProgress


class Outgoing:
    """A sending end that does something whenever it is asked."""

    def __init__(self):
        self.may_lag = False
        self.meanwhile = lambda: None

    @property
    def is_in_flight(self):
        found = self.may_lag
        self.meanwhile()
        return found


def made():
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


def test_a_message_is_asked_for_until_it_has_left():
    _group, ends, pumps, watched = made()
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


def test_a_message_that_is_sent_while_the_last_one_leaves_is_asked_for():
    """Another thread sent it just after all was found to have left, and relied on the pump that was about to end."""
    _group, ends, pumps, watched = made()
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


def test_what_nobody_takes_any_more_is_not_asked_for():
    _group, ends, pumps, watched = made()
    ends.outgoing.may_lag = True
    pumps.sent()
    assert not watched[0].done()
    ends.may_be_received = lambda: False
    assert watched[0].done()
