"""Letters: let the channels and lanes of one group meet. They cost nothing until the first."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import TYPE_CHECKING

from commlib.node.signature import signature
from commlib.p2p.mailbox import Mailbox
from commlib.transport.base import Space

if TYPE_CHECKING:
    from commlib.group.group import Group


class Letters:
    """A mailbox that is made when it is first asked for, and ends with the group."""

    def __init__(self, group: Group) -> None:
        self._group = weakref.ref(group)

    @cached_property
    def mailbox(self) -> Mailbox:
        group = self._group()
        assert group is not None
        key = signature(f"{group.runtime.token}.{group.key}")
        return Mailbox(group.transport.space(Space.CHANNELS), group.runtime.poller, group, key)

    def leave(self, reason: str) -> None:
        """Read and send nothing more, unless the group has failed: the others are still to be told."""
        if not reason:
            self.close()

    def close(self) -> None:
        """Read and send nothing more. Idempotent."""
        if "mailbox" in vars(self):
            self.mailbox.close()

    def halt(self) -> None:
        """Nothing moves by itself."""
