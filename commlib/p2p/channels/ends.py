"""Channel ends: make the sending and the receiving end of a channel on one rank, and connect them to the other rank."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from commlib.errors import MismatchError, PeerError
from commlib.p2p.channels.inbox import Inbox
from commlib.p2p.channels.outbox import Outbox
from commlib.p2p.channels.payload import ChannelSpec, PayloadFormat
from commlib.p2p.channels.posted_receives import PostedReceives
from commlib.p2p.channels.posted_sends import PostedSends
from commlib.p2p.device.edge import DeviceEdge
from commlib.p2p.device.header import HEAD
from commlib.p2p.rendezvous import Address, Rendezvous
from commlib.process import forks

if TYPE_CHECKING:
    from commlib.group.group import Group


class ChannelEnds:
    """Both ends of a channel on one rank, in a node's shared memory or in messages. `Channel` is the public class."""

    def __init__(
        self,
        mailbox: Rendezvous,
        address: Address,
        terms: ChannelSpec,
        outgoing: Any,
        incoming: Any,
        tag: int,
        device: DeviceEdge | None,
    ) -> None:
        self.mailbox, self.address, self.terms = mailbox, address, terms
        self.device = device
        """The device edge, for channels of device arrays. These ends then carry only each message's header."""
        self.dtype = terms.dtype if device is None else np.dtype(np.uint8)
        """The dtype of the arrays in host memory."""
        self.outgoing: Outbox | PostedSends = outgoing
        self.incoming: Inbox | PostedReceives = incoming
        self._tag = tag
        self._connecting = threading.RLock()
        self.is_connected = self._has_handshaken = False
        self.unreachable = ""  # why sends are impossible, or ""
        self.has_notified = self.is_closed = False
        """Whether this side has ended and notified the other; whether it has freed its memory."""

    @classmethod
    def make(
        cls,
        group: Group,
        mailbox: Rendezvous,
        address: Address,
        terms: ChannelSpec,
        form: PayloadFormat,
        tag: int,
        device: DeviceEdge | None = None,
    ) -> ChannelEnds:
        """Make the receiving end and the sending end of this rank. Raises TransportError."""
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
        """Return the content of this side's hello message."""
        place = self.incoming.peer_memory.place if isinstance(self.incoming, Inbox) else None
        content: dict[str, Any] = {"error": "", "terms": str(self.terms), "tag": self._tag, "inbox": place}
        return content if self.device is None else content | {"device": self.device.hello()}

    def try_connect(self, group: Group, text: str) -> bool:
        """Connect to the other side if its control messages have arrived; return whether they have.

        Raises MismatchError if the other side opened the channel differently, PeerError if it failed to open it.
        """
        if self.is_connected:
            return True
        with self._connecting:  # another thread may have connected meanwhile
            return self.is_connected or self._try_connect(group, text)

    def _try_connect(self, group: Group, text: str) -> bool:
        if not self._has_handshaken and not self._handshake(group, text):
            return False
        if self.device is not None:
            verdict = self.mailbox.letter(self.address, "device")
            if verdict is None:
                return False
            self.device.settle(verdict)
        self.outgoing.flag.halt(yes=bool(self.unreachable))
        self.incoming.flag.halt(yes=False)
        self.is_connected = True
        return True

    def _handshake(self, group: Group, text: str) -> bool:
        """Process the other side's hello if it has arrived; return whether it has."""
        peer = self.address.peer
        hello = self.mailbox.letter(self.address, "hello")
        if hello is None:
            return False
        if hello["error"]:
            raise PeerError(f"{group.name}: {text}: rank {peer} could not open it: {hello['error']}")
        if hello["terms"] != str(self.terms):
            raise MismatchError(
                f"{group.name}: {text}: the two sides have opened it with different arguments:\n"
                f"  rank {group.rank}: {self.terms}\n  rank {peer}: {hello['terms']}\n"
                "Close it and open it with the same arguments on both sides. Nothing was sent."
            )
        if isinstance(self.outgoing, Outbox):
            try:
                self.outgoing.connect(tuple(hello["inbox"]))
            except OSError as error:  # its messages to this rank can still be received
                self.unreachable = (
                    f"the memory of rank {peer} cannot be mapped ({error}): it has closed the channel, its process has "
                    "ended, or it runs in another container"
                )
        else:
            self.outgoing.connect(hello["tag"])
        self.incoming.connect()
        if self.device is not None:
            self.device.accept(hello["device"])
            self.mailbox.post(self.address, "device", **self.device.verdict())
            self.mailbox.expect(self.address, "device")
        self._has_handshaken = True
        return True

    def bye(self) -> dict[str, Any] | None:
        """Return the other side's bye message, or None."""
        return self.mailbox.letter(self.address, "bye")

    def may_be_received(self) -> bool:
        """Return whether the other side may still receive messages, as far as is known; poll for its next message."""
        self.mailbox.poll(self.address.peer)
        return not self.is_closed and self.bye() is None

    def halt(self) -> None:
        """Stop both directions."""
        self.outgoing.flag.halt(yes=True)
        self.incoming.flag.halt(yes=True)

    def notify(self, reason: str, *, failed: bool = False) -> None:
        """Send the other side the reason for this side's end, once. failed: the end is due to an error."""
        if not self.has_notified and not forks.is_child():
            self.has_notified = True
            self.mailbox.post(self.address, "bye", why=reason[:1000], sent=self.outgoing.count, failed=failed)
            if failed and self.device is not None:
                self.device.fail()

    def try_close(self) -> bool:
        """Free all memory, unless the other side may still need it; return whether it was freed."""
        if self.device is not None and not self.device.is_over:
            return False
        if not self.is_closed and not (self.incoming.is_settled and self.outgoing.is_settled) and self.bye() is None:
            return False
        self.close()
        return True

    def close(self) -> None:
        """Free all memory. Idempotent."""
        if not self.is_closed and not forks.is_child():
            self.is_closed = True
            self.outgoing.close()
            self.incoming.close()
            if self.device is not None:
                self.device.close()
            self.mailbox.forget(self.address)
