"""Rendezvous owner: the lazily made rendezvous of one group, through which its channels and lanes connect."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import TYPE_CHECKING

from commlib.node.signature import signature
from commlib.p2p.rendezvous import Rendezvous
from commlib.transport.base import Space

if TYPE_CHECKING:
    from commlib.group.group import Group


class RendezvousOwner:
    """The owner of a group's rendezvous. It makes the rendezvous on first use and closes it with the group."""

    def __init__(self, group: Group) -> None:
        self._group = weakref.ref(group)

    @cached_property
    def mailbox(self) -> Rendezvous:
        group = self._group()
        assert group is not None
        key = signature(f"{group.runtime.token}.{group.key}")
        return Rendezvous(group.transport.space(Space.CHANNELS), group.runtime.poller, group, key)

    def leave(self, reason: str) -> None:
        """Close the rendezvous, unless the group has failed: then the other ranks must still be notified."""
        if not reason:
            self.close()

    def close(self) -> None:
        """Close the rendezvous. Idempotent."""
        if "mailbox" in vars(self):
            self.mailbox.close()

    def halt(self) -> None:
        """Do nothing: the rendezvous moves nothing by itself."""
