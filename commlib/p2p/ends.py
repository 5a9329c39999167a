"""Ends: make both ends of a channel on one rank, and introduce them to the other rank's."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from commlib import forks
from commlib.errors import MismatchError, PeerError
from commlib.p2p.form import Form
from commlib.p2p.inbox import Inbox
from commlib.p2p.mailbox import Address, Mailbox
from commlib.p2p.outbox import Outbox
from commlib.p2p.posted_receives import PostedReceives
from commlib.p2p.posted_sends import PostedSends
from commlib.p2p.terms import Terms

if TYPE_CHECKING:
    from commlib.group.group import Group


class Ends:
    """Send and receive, in memory of a node or in messages. Users have a `Channel` of it."""

    def __init__(
        self, mailbox: Mailbox, address: Address, terms: Terms, outgoing: Any, incoming: Any, tag: int
    ) -> None:
        self.mailbox, self.address, self.terms = mailbox, address, terms
        self.outgoing: Outbox | PostedSends = outgoing
        self.incoming: Inbox | PostedReceives = incoming
        self._tag = tag
        self._connecting = threading.RLock()
        self.is_connected = False
        self.unreachable = ""  # why nothing can be sent
        self._has_told = self.is_closed = False

    @classmethod
    def make(cls, group: Group, mailbox: Mailbox, address: Address, terms: Terms, form: Form, tag: int) -> Ends:
        """Make what this rank receives into, and what it will send with. Raises TransportError."""
        outgoing: Outbox | PostedSends
        incoming: Inbox | PostedReceives
        if group.config.node_path and address.peer in group.hierarchy.ranks:
            arguments = form, terms.shape, terms.dtype, terms.depth, group.runtime.spins
            is_named = group.named_memory
            incoming, outgoing = Inbox(*arguments, is_named=is_named), Outbox(*arguments, is_named=is_named)
        else:
            messages = mailbox.transport, address.peer, form, terms.shape, terms.dtype, terms.depth
            incoming, outgoing = PostedReceives(*messages, tag=tag), PostedSends(*messages)
        return cls(mailbox, address, terms, outgoing, incoming, tag)

    def hello(self) -> dict[str, Any]:
        """Return what the other side must know."""
        place = self.incoming.made.place if isinstance(self.incoming, Inbox) else None
        return {"error": "", "terms": str(self.terms), "tag": self._tag, "inbox": place}

    def try_connect(self, group: Group, text: str) -> bool:
        """Come to know the other side, if its letter is there; return whether it is.

        Raises MismatchError if that has opened the channel differently, PeerError if it could not.
        """
        if self.is_connected:
            return True
        with self._connecting:  # several threads may come here; one of them may have done it meanwhile
            return self.is_connected or self._try_connect(group, text)

    def _try_connect(self, group: Group, text: str) -> bool:
        peer = self.address.peer
        hello = self.mailbox.letter(self.address, "hello")
        if hello is None:
            return False
        if hello["error"]:
            raise PeerError(f"{group.name}: {text}: rank {peer} could not open it: {hello['error']}")
        if hello["terms"] != str(self.terms):
            raise MismatchError(
                f"{group.name}: {text}: the two sides have opened it differently:\n"
                f"  rank {group.rank}: {self.terms}\n  rank {peer}: {hello['terms']}\n"
                "Close it and open it alike on both sides. Nothing was sent."
            )
        if isinstance(self.outgoing, Outbox):
            try:
                self.outgoing.connect(tuple(hello["inbox"]))
            except OSError as error:  # what it has sent is here nevertheless
                self.unreachable = (
                    f"the memory of rank {peer} cannot be mapped ({error}): it has closed the channel, its process has "
                    "ended, or it is in a container of its own"
                )
        else:
            self.outgoing.connect(hello["tag"])
        self.incoming.connect()
        self.outgoing.halt(yes=bool(self.unreachable))
        self.incoming.halt(yes=False)
        self.is_connected = True
        return True

    def bye(self) -> dict[str, Any] | None:
        """Return the other side's last letter, or None."""
        return self.mailbox.letter(self.address, "bye")

    def halt(self) -> None:
        """Let nothing move any more."""
        self.outgoing.halt(yes=True)
        self.incoming.halt(yes=True)

    def tell(self, reason: str) -> None:
        """Tell the other side why this one takes part no more; the first reason counts."""
        if not self._has_told and not forks.is_child():
            self._has_told = True
            self.mailbox.post(self.address, "bye", why=reason[:1000], sent=self.outgoing.count)

    def try_close(self) -> bool:
        """Give everything back, unless the other side may still need some of it; return whether it was."""
        if not self.is_closed and not (self.incoming.is_settled and self.outgoing.is_settled) and self.bye() is None:
            return False
        self.close()
        return True

    def close(self) -> None:
        """Give everything back. Idempotent."""
        if not self.is_closed and not forks.is_child():
            self.is_closed = True
            self.outgoing.close()
            self.incoming.close()
            self.mailbox.forget(self.address)
