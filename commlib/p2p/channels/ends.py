"""Ends: make both ends of a channel on one rank, and introduce them to the other rank's."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from commlib.errors import MismatchError, PeerError
from commlib.p2p.channels.inbox import Inbox
from commlib.p2p.channels.outbox import Outbox
from commlib.p2p.channels.payload import Form
from commlib.p2p.channels.posted_receives import PostedReceives
from commlib.p2p.channels.posted_sends import PostedSends
from commlib.p2p.channels.spec import Terms
from commlib.p2p.device.edge import DeviceEdge
from commlib.p2p.device.header import HEAD
from commlib.p2p.mailbox import Address, Mailbox
from commlib.process import forks

if TYPE_CHECKING:
    from commlib.group.group import Group


class Ends:
    """Send and receive, in memory of a node or in messages. Users have a `Channel` of it."""

    def __init__(
        self,
        mailbox: Mailbox,
        address: Address,
        terms: Terms,
        outgoing: Any,
        incoming: Any,
        tag: int,
        device: DeviceEdge | None,
    ) -> None:
        self.mailbox, self.address, self.terms = mailbox, address, terms
        self.device = device
        """What carries data between devices, if that was asked for; these ends then carry a few bytes of a message."""
        self.dtype = terms.dtype if device is None else np.dtype(np.uint8)
        """Of the arrays that the host's memory carries."""
        self.outgoing: Outbox | PostedSends = outgoing
        self.incoming: Inbox | PostedReceives = incoming
        self._tag = tag
        self._connecting = threading.RLock()
        self.is_connected = self._has_met = False
        self.unreachable = ""  # why nothing can be sent
        self.has_told = self.is_closed = False
        """Whether this side takes part no more; whether it has given everything back."""

    @classmethod
    def make(
        cls,
        group: Group,
        mailbox: Mailbox,
        address: Address,
        terms: Terms,
        form: Form,
        tag: int,
        device: DeviceEdge | None = None,
    ) -> Ends:
        """Make what this rank receives into, and what it will send with. Raises TransportError."""
        shape, dtype = (terms.shape, terms.dtype) if device is None else ((HEAD,), np.dtype(np.uint8))
        outgoing: Outbox | PostedSends
        incoming: Inbox | PostedReceives
        if group.config.node_path and address.peer in group.hierarchy.ranks:
            arguments = form, shape, dtype, terms.depth, group.runtime.spins
            is_named = group.named_memory
            incoming, outgoing = Inbox(*arguments, is_named=is_named), Outbox(*arguments, is_named=is_named)
        else:
            messages = mailbox.transport, address.peer, form, shape, dtype, terms.depth
            incoming, outgoing = PostedReceives(*messages, tag=tag), PostedSends(*messages)
        return cls(mailbox, address, terms, outgoing, incoming, tag, device)

    def hello(self) -> dict[str, Any]:
        """Return what the other side must know."""
        place = self.incoming.made.place if isinstance(self.incoming, Inbox) else None
        told: dict[str, Any] = {"error": "", "terms": str(self.terms), "tag": self._tag, "inbox": place}
        return told if self.device is None else told | {"device": self.device.hello()}

    def try_connect(self, group: Group, text: str) -> bool:
        """Come to know the other side, if its letter is there; return whether it is.

        Raises MismatchError if that has opened the channel differently, PeerError if it could not.
        """
        if self.is_connected:
            return True
        with self._connecting:  # several threads may come here; one of them may have done it meanwhile
            return self.is_connected or self._try_connect(group, text)

    def _try_connect(self, group: Group, text: str) -> bool:
        if not self._has_met and not self._meet(group, text):
            return False
        if self.device is not None:
            verdict = self.mailbox.letter(self.address, "device")
            if verdict is None:
                return False
            self.device.settle(verdict)
        self.outgoing.halt(yes=bool(self.unreachable))
        self.incoming.halt(yes=False)
        self.is_connected = True
        return True

    def _meet(self, group: Group, text: str) -> bool:
        """Read what the other side says of itself, if it is there; return whether it was."""
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
        if self.device is not None:
            self.device.meet(hello["device"])
            self.mailbox.post(self.address, "device", **self.device.verdict())
            self.mailbox.expect(self.address, "device")
        self._has_met = True
        return True

    def bye(self) -> dict[str, Any] | None:
        """Return the other side's last letter, or None."""
        return self.mailbox.letter(self.address, "bye")

    def may_be_taken(self) -> bool:
        """Return whether the other side may still take what was sent, as far as it has told; ask for more of that."""
        self.mailbox.ask(self.address.peer)
        return not self.is_closed and self.bye() is None

    def halt(self) -> None:
        """Let nothing move any more."""
        self.outgoing.halt(yes=True)
        self.incoming.halt(yes=True)

    def tell(self, reason: str, *, failed: bool = False) -> None:
        """Tell the other side why this one takes part no more; the first reason counts. failed: it should have."""
        if not self.has_told and not forks.is_child():
            self.has_told = True
            self.mailbox.post(self.address, "bye", why=reason[:1000], sent=self.outgoing.count, failed=failed)
            if failed and self.device is not None:
                self.device.fail()

    def try_close(self) -> bool:
        """Give everything back, unless the other side may still need some of it; return whether it was."""
        if self.device is not None and not self.device.is_over:
            return False
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
            if self.device is not None:
                self.device.close()
            self.mailbox.forget(self.address)
