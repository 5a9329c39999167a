"""ErrorText: format the waits and failures of a process set for its users.

Messages use the names of the user's operations and the user's rank numbers. The coordinator's internal exchanges and
its group's rank numbers mean nothing to users.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.coordinator.negotiation import Failure, Negotiation
from commlib.coordinator.op_request import OpRequest, format_ranks, quote_names
from commlib.errors import CommlibError, MismatchError, PeerError, ShutdownError, StallError, UsageError

_GIVEN_UP = "has given up"


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """The failure of a process set: type and text of all later errors, and the cause."""

    kind: type[CommlibError]
    reason: str
    cause: BaseException


class ErrorText:
    """Formats messages for one rank. `comm` is the coordinator's group, `members` lists the names of its ranks."""

    def __init__(self, comm: Any, members: Sequence[int], negotiation: Negotiation) -> None:
        self._comm, self._members, self._negotiation = comm, members, negotiation
        self._recording, self._timeout = comm.runtime.recording, comm.config.timeout
        self.rank = members[comm.rank]
        self.last: OpRequest | None = None  # that all ranks ran
        self.when = 0.0

    def begin(self, requests: Sequence[OpRequest]) -> str:
        """Return the beginning of a message about operations: the process set, the operations and this rank."""
        more = f" and {len(requests) - 1} more" if len(requests) > 1 else ""
        what = f"{requests[0]}{more}: " if requests else ""
        return f"{self._comm.name}: {what}rank {self.rank}"

    def long_wait(
        self, waited: float, late: Collection[int], running: Sequence[OpRequest], waiting: Sequence[OpRequest]
    ) -> str:
        """Return the warning about a wait of `waited` seconds for the ranks `late` of the group."""
        late = self._user_ranks(late)
        who = f"; not there yet: {format_ranks(late)}" if late else ""
        state = self.state(late, running, waiting)
        return f"{self.begin(running or waiting)} has waited {waited:.0f} s{who}{state}{self._last_calls()}"

    def overdue(self, request: OpRequest, waited: float, reason: str) -> str:
        """Return the warning about an operation that some ranks have not submitted."""
        return f"{self.begin([request])} has waited {waited:.0f} s: {reason}{self._last_calls()}"

    def refused(self, failure: Failure) -> CommlibError:
        """Return the error of an operation that all ranks have agreed not to run."""
        text = f"{self.begin([failure.request])}: {failure.reason}"
        if failure.late:
            words = f"(COMMLIB_TIMEOUT={self._timeout:g}); other operations continue{self._last_calls()}"
            return StallError(f"{text} {words}")
        return MismatchError(f"{text}. Nothing was sent; the group stays usable")

    def restarted(self, request: OpRequest, by: Sequence[int]) -> CommlibError:
        """Return the error of an operation that was cancelled because the ranks `by` have restarted."""
        verb = "have" if len(by) > 1 else "has"
        who = f"{format_ranks(list(by))} {verb} gone back to the last commit (hvd.elastic.run)"
        todo = "Let this error reach hvd.elastic.run on this rank, too: operations fail until then"
        return MismatchError(f"{self.begin([request])}: {who}. Nothing was sent. {todo}")

    def refuse_one(self, request: OpRequest, error: BaseException) -> CommlibError:
        """Return a separate error for one of several operations that ran as one and were refused."""
        worded = UsageError(f"{self.begin([request])}: {error}")
        worded.__cause__ = error
        return worded

    def after(self, ended: GroupFailure, request: OpRequest) -> CommlibError:
        """Return a new error for one operation in a process set that can no longer run operations."""
        error = ended.kind(f"{self.begin([request])}: {ended.reason}; {self._comm.name} cannot be used any more")
        if not isinstance(ended.cause, PeerError | StallError | ShutdownError):  # their text is complete
            error.__cause__ = ended.cause
        return error

    def ended(self, error: BaseException, running: Sequence[OpRequest], waiting: Sequence[OpRequest]) -> GroupFailure:
        """Return the failure of the process set after an error ended a cycle."""
        kind, reason = self._reason(error, running, waiting)
        return GroupFailure(kind, reason + (self._last_calls() if kind is StallError else ""), error)

    def _reason(
        self, error: BaseException, running: Sequence[OpRequest], waiting: Sequence[OpRequest]
    ) -> tuple[type[CommlibError], str]:
        known = error.missing if isinstance(error, CommlibError) else {}
        missing = dict(zip(self._user_ranks(known), known.values(), strict=True))
        state = self.state(list(missing), running, waiting)
        match error:
            case ShutdownError():
                return ShutdownError, "given up, because commlib is shutting down"
            case StallError():
                who = f"; not there yet: {format_ranks(list(missing))}" if missing else ""
                todo = "look at what the late ranks are doing"
                return StallError, f"gave up after {self._timeout:g} s (COMMLIB_TIMEOUT){who}{state}; {todo}"
            case PeerError() if missing:
                left = [rank for rank, why in missing.items() if not why.startswith(_GIVEN_UP)]
                state = self.state(left or None, running, waiting)
                return PeerError, f"waited for a rank that will not come: {_format_missing(missing)}{state}"
            case MismatchError():
                return MismatchError, f"the ranks are out of step{self.state(None, running, waiting)}"
            case CommlibError():
                return type(error), f"{error}{self.state(None, running, waiting)}"
            case _:
                state = self.state(None, running, waiting)
                return (
                    PeerError,
                    f"interrupted by {_format_error(error)}, and out of step with the other ranks since{state}",
                )

    def describe_failure(self, error: BaseException, waiting: Sequence[OpRequest]) -> str:
        """Return the text that the other ranks get about this rank's failure."""
        if isinstance(error, StallError):
            why = f"timed out waiting for {quote_names([request.name for request in waiting])} (COMMLIB_TIMEOUT)"
        elif isinstance(error, PeerError) and error.missing:
            why = f"waited for {format_ranks(self._user_ranks(error.missing))} in vain"
        elif isinstance(error, MismatchError):
            why = "was out of step with the other ranks"
        else:
            why = f"was interrupted by {_format_error(error)}"
        return f"{_GIVEN_UP} {self._comm.name}: it {why}"

    def state(self, late: list[int] | None, running: Sequence[OpRequest], waiting: Sequence[OpRequest]) -> str:
        """Return what this rank waits for, and what it knows of the others.

        late: the late ranks; empty if they are unknown, None if their requests do not matter.
        """
        parts = []
        if running:
            parts.append(f"all ranks have submitted {quote_names([request.name for request in running])}")
        if waiting:
            parts.append(f"this rank waits for {quote_names([request.name for request in waiting])}")
        parts += self._name_submitters(waiting)
        if running:
            return "".join(f"; {part}" for part in parts)
        submitted = {rank: names for rank in late or () if (names := self._list_submitted(rank))}
        parts += [
            f"rank {rank} has submitted {quote_names(names)}, but made no progress since"
            for rank, names in submitted.items()
        ]
        if self.last is None:
            parts.append("no operation of all ranks has run yet")
        else:
            parts.append(f"the last operation of all ranks was {self.last}, {time.monotonic() - self.when:.0f} s ago")
        silent = [rank for rank in late or () if rank not in submitted]
        if silent or late == []:
            have = "has" if len(silent) == 1 else "have"
            who = format_ranks(silent) if silent else "the late ranks"
            parts[-1] += f", and {who} {have} submitted nothing" + (" since" if self.last is not None else "")
        return "".join(f"; {part}" for part in parts)

    def _last_calls(self) -> str:
        """Return a text about this rank's last calls, to append to a message; "" if nothing is recorded."""
        return str(self._recording.last_calls(self._comm.name, named=True))

    def _name_submitters(self, waiting: Sequence[OpRequest]) -> Iterable[str]:
        """Yield the other ranks that have submitted the first operation that this rank waits for, if known."""
        if waiting:
            submitters = self._user_ranks(self._negotiation.announced.get(waiting[0].name, ()))
            if others := [rank for rank in submitters if rank != self.rank]:
                yield f"{waiting[0].name!r} was submitted by {format_ranks(others)} too"

    def _list_submitted(self, rank: int) -> list[str]:
        own = self._members.index(rank)  # its number in the group
        return [name for name, by in self._negotiation.announced.items() if own in by]

    def _user_ranks(self, numbers: Iterable[int]) -> list[int]:
        return [self._members[number] for number in numbers]


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _format_missing(missing: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank} {why}" for rank, why in missing.items())
