"""OpTable: keep the operations that this rank has submitted, until they are finished."""

from __future__ import annotations

from collections import deque

from commlib.coordinator.launched_op import LaunchedOp
from commlib.coordinator.negotiation import Negotiation
from commlib.coordinator.op_request import OpRequest
from commlib.coordinator.pending_op import PendingOp
from commlib.coordinator.unnamed_ops import UnnamedOps
from commlib.errors import UsageError
from commlib.observe.flight_recorder import LAST


class OpTable:
    """The operations of one rank; the caller holds the coordinator's lock. group: the name of its group.

        add --> pending --> running --> finished
                   ^
        unnamed, while another operation has their name

    An operation is added to `running` before it is removed from `pending`, so it is always in at least one of the two.
    """

    def __init__(self, group: str, negotiation: Negotiation) -> None:
        self._group, self._negotiation = group, negotiation
        self.pending: dict[str, PendingOp] = {}
        """Submitted, not agreed on, by name."""
        self.unnamed = UnnamedOps()
        self.running: list[LaunchedOp] = []
        """Agreed on, not finished."""
        self.flight: deque[OpRequest] = deque(maxlen=LAST)
        """The last agreed operations."""

    def add(self, pending: PendingOp) -> None:
        """Submit an operation to the negotiation, or hold it until its generated name is free.

        Raises UsageError if an operation of this name is already pending.
        """
        request = pending.request
        if request.name in self.pending:
            if not self.unnamed.is_unnamed(request.name):
                raise UsageError(f"{self._group}: {self._negotiation.refusal(request)}")
            self.unnamed.hold_back(pending)
            return
        try:
            self._negotiation.submit(request)
            self.pending[request.name] = pending
        except BaseException:  # from a signal handler: no other rank knows the request yet
            self._negotiation.withdraw(request)
            self.pending.pop(request.name, None)
            raise

    def clear(self, *, running: bool = False) -> list[PendingOp]:
        """Remove all operations that are not agreed on; return them, and before them the running ones if requested."""
        launched = [job.pending for job in self.running if job.pending is not None] if running else []
        operations = dict.fromkeys([*launched, *self.unfinished()])
        self.pending.clear()
        self.unnamed.clear()
        return list(operations)

    def unfinished(self) -> list[PendingOp]:
        """Return all operations that are not agreed on."""
        return [*self.pending.values(), *self.unnamed.waiting()]

    def requests(self) -> tuple[list[OpRequest], list[OpRequest]]:
        """Return the running and the waiting requests."""
        running = [job.launch.request for job in self.running if job.pending is not None and not job.pending.done()]
        return running, [pending.request for pending in self.pending.values() if pending.request not in running]

    # Read without the lock

    def waiting(self) -> list[tuple[str, str, float]]:
        """Return the pending operations: names, texts and start times (`time.monotonic`)."""
        return [(name, str(pending.request), pending.since) for name, pending in list(self.pending.items())]

    def launched(self) -> list[tuple[str, str, bool]]:
        """Return the last agreed operations, oldest first: verb, text, and whether it has ended."""
        jobs, flight = list(self.running)[-LAST:], list(self.flight)
        last = [job.pending is not None and job.pending.done() for job in jobs]
        ended = [True] * (len(flight) - len(last)) + last
        return [(request.verb, str(request), has) for request, has in zip(flight, ended, strict=False)]
