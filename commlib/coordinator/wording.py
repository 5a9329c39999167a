"""Wording: put the waits and failures of a process set into its user's words.

Messages name the user's operations, and the ranks as the user calls them. The coordinator's own exchanges mean nothing
to a reader, nor do the numbers of ranks in its group.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.coordinator.negotiation import Failure, Negotiation
from commlib.coordinator.request import Request, few, ranks
from commlib.errors import CommlibError, MismatchError, PeerError, ShutdownError, StallError, UsageError

_GIVEN_UP = "has given up"


@dataclass(frozen=True, slots=True)
class Ended:
    """Say why a process set can run nothing any more: type and words of all later errors, and what it was."""

    kind: type[CommlibError]
    reason: str
    cause: BaseException


class Wording:
    """Find words for one rank. `comm` is the coordinator's group, `members` are the names of its ranks."""

    def __init__(self, comm: Any, members: Sequence[int], negotiation: Negotiation) -> None:
        self._comm, self._members, self._negotiation = comm, members, negotiation
        self._recording, self._timeout = comm.runtime.recording, comm.config.timeout
        self.rank = members[comm.rank]
        self.last: Request | None = None  # of all ranks
        self.when = 0.0

    def begin(self, requests: Sequence[Request]) -> str:
        """Return how a message about operations begins: the process set, the operations and this rank."""
        more = f" and {len(requests) - 1} more" if len(requests) > 1 else ""
        what = f"{requests[0]}{more}: " if requests else ""
        return f"{self._comm.name}: {what}rank {self.rank}"

    def long_wait(
        self, waited: float, late: Collection[int], running: Sequence[Request], waiting: Sequence[Request]
    ) -> str:
        """Return the warning about a wait of so many seconds for the ranks `late` of the group."""
        late = self._called(late)
        who = f"; not there yet: {ranks(late)}" if late else ""
        state = self.state(late, running, waiting)
        return f"{self.begin(running or waiting)} has waited {waited:.0f} s{who}{state}{self._did_last()}"

    def overdue(self, request: Request, waited: float, reason: str) -> str:
        """Return the warning about an operation that not all ranks ask for."""
        return f"{self.begin([request])} has waited {waited:.0f} s: {reason}{self._did_last()}"

    def refused(self, failure: Failure) -> CommlibError:
        """Return the error of an operation that all ranks have agreed not to run."""
        text = f"{self.begin([failure.request])}: {failure.reason}"
        if failure.late:
            words = f"(COMMLIB_TIMEOUT={self._timeout:g}); other operations go on{self._did_last()}"
            return StallError(f"{text} {words}")
        return MismatchError(f"{text}. Nothing was sent; the group stays usable")

    def restarted(self, request: Request, by: Sequence[int]) -> CommlibError:
        """Return the error of an operation that was given up because the ranks `by` have restarted."""
        who = f"{ranks(list(by))} {'have' if len(by) > 1 else 'has'} gone back to the last commit (hvd.elastic.run)"
        todo = "Let this error reach hvd.elastic.run here, too: until then operations fail"
        return MismatchError(f"{self.begin([request])}: {who}. Nothing of this was sent. {todo}")

    def of_one(self, request: Request, error: BaseException) -> CommlibError:
        """Return what one operation was refused with: an error for each, of those that ran as one."""
        worded = UsageError(f"{self.begin([request])}: {error}")
        worded.__cause__ = error
        return worded

    def after(self, ended: Ended, request: Request) -> CommlibError:
        """Return the error of one operation in a set that can run none any more: each time a new one."""
        error = ended.kind(f"{self.begin([request])}: {ended.reason}; {self._comm.name} cannot be used any more")
        if not isinstance(ended.cause, PeerError | StallError | ShutdownError):  # of which everything has been said
            error.__cause__ = ended.cause
        return error

    def ended(self, error: BaseException, running: Sequence[Request], waiting: Sequence[Request]) -> Ended:
        """Return what the user is told of an error that ended a cycle, and the set with it."""
        kind, reason = self._reason(error, running, waiting)
        return Ended(kind, reason + (self._did_last() if kind is StallError else ""), error)

    def _reason(
        self, error: BaseException, running: Sequence[Request], waiting: Sequence[Request]
    ) -> tuple[type[CommlibError], str]:
        known = error.missing if isinstance(error, CommlibError) else {}
        missing = dict(zip(self._called(known), known.values(), strict=True))
        state = self.state(list(missing), running, waiting)
        match error:
            case ShutdownError():
                return ShutdownError, "given up, because commlib is shutting down"
            case StallError():
                who = f"; not there yet: {ranks(list(missing))}" if missing else ""
                todo = "look at what the late ranks are doing"
                return StallError, f"gave up after {self._timeout:g} s (COMMLIB_TIMEOUT){who}{state}; {todo}"
            case PeerError() if missing:
                left = [rank for rank, why in missing.items() if not why.startswith(_GIVEN_UP)]
                state = self.state(left or None, running, waiting)
                return PeerError, f"waited for a rank that will not come: {_listed(missing)}{state}"
            case MismatchError():
                return MismatchError, f"the ranks are out of step{self.state(None, running, waiting)}"
            case CommlibError():
                return type(error), f"{error}{self.state(None, running, waiting)}"
            case _:
                state = self.state(None, running, waiting)
                return PeerError, f"interrupted by {_brief(error)}, and out of step with the other ranks since{state}"

    def parting(self, error: BaseException, waiting: Sequence[Request]) -> str:
        """Return what the other ranks are told of a rank that has failed."""
        if isinstance(error, StallError):
            why = f"waited too long for {few([request.name for request in waiting])} (COMMLIB_TIMEOUT)"
        elif isinstance(error, PeerError) and error.missing:
            why = f"waited for {ranks(self._called(error.missing))} in vain"
        elif isinstance(error, MismatchError):
            why = "found itself out of step"
        else:
            why = f"was interrupted by {_brief(error)}"
        return f"{_GIVEN_UP} {self._comm.name}: it {why}"

    def state(self, late: list[int] | None, running: Sequence[Request], waiting: Sequence[Request]) -> str:
        """Return what this rank waits for, and what it knows of the others.

        late: those that are not there; none if it is not known who, None if it does not matter what they asked for.
        """
        parts = []
        if running:
            parts.append(f"all ranks have asked for {few([request.name for request in running])}")
        if waiting:
            parts.append(f"this rank waits for {few([request.name for request in waiting])}")
        parts += self._asked(waiting)
        if running:
            return "".join(f"; {part}" for part in parts)
        told = {rank: names for rank in late or () if (names := self._told_by(rank))}
        parts += [f"rank {rank} has asked for {few(names)}, and not come back" for rank, names in told.items()]
        if self.last is None:
            parts.append("no operation of all ranks has run yet")
        else:
            parts.append(f"the last operation of all ranks was {self.last}, {time.monotonic() - self.when:.0f} s ago")
        silent = [rank for rank in late or () if rank not in told]
        if silent or late == []:
            have = "has" if len(silent) == 1 else "have"
            who = ranks(silent) if silent else "those not there yet"
            parts[-1] += f", and {who} {have} asked for nothing" + (" since" if self.last is not None else "")
        return "".join(f"; {part}" for part in parts)

    def _did_last(self) -> str:
        """Return what this rank did last, to be appended to a message; "" if nothing is recorded."""
        return str(self._recording.did_last(self._comm.name, named=True))

    def _asked(self, waiting: Sequence[Request]) -> Iterable[str]:
        """Say which other ranks have asked for the first operation that this rank waits for, where that is known."""
        if waiting:
            told = self._called(self._negotiation.told.get(waiting[0].name, ()))
            if others := [rank for rank in told if rank != self.rank]:
                yield f"{waiting[0].name!r} has been asked for by {ranks(others)} too"

    def _told_by(self, rank: int) -> list[str]:
        own = self._members.index(rank)  # its number in the group
        return [name for name, by in self._negotiation.told.items() if own in by]

    def _called(self, numbers: Iterable[int]) -> list[int]:
        return [self._members[number] for number in numbers]


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _listed(missing: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank} {why}" for rank, why in missing.items())
