"""Errors: one type for each place of the fault.

CommlibError                    catch this to catch everything commlib raises
├── UsageError                  this call, on this rank, is wrong: fix the call
├── MismatchError               the ranks of a group made different calls: fix the program
├── PeerError                   a rank of the group died, raised or left: look at that rank
├── StallError                  a rank of the group did not arrive in time: look at that rank
├── ShutdownError               commlib was shut down, or the group abandoned, before the operation ran
└── TransportError              MPI, shared memory or the network failed: look at the system
"""

from __future__ import annotations

from collections.abc import Mapping


class CommlibError(RuntimeError):
    """Base of every error that commlib raises."""

    missing: Mapping[int, str] = {}
    """The ranks waited for, each with the reason why it will not arrive, or "". Callers reword the error with it."""

    entered = ""
    """The function of commlib that the program called, if the traceback does not show it."""

    at_start = False
    """True if `init` raised it: all ranks raise the same error, so one rank can report it for all."""


class UsageError(CommlibError, ValueError):
    """This call is wrong on this rank, independent of the other ranks. No data was sent."""


class MismatchError(CommlibError):
    """The ranks of a group made different calls at the same point of their sequence. Raised on all ranks.

    If the ranks compared their calls before sending data, the error says so and the group stays usable. Otherwise the
    group runs no more calls.
    """


class PeerError(CommlibError):
    """A rank of the group died, raised, or left while other ranks still waited for it."""


class StallError(CommlibError, TimeoutError):
    """A rank of the group did not arrive within the timeout."""


class ShutdownError(CommlibError):
    """The operation was still pending at `shutdown`, or was called after it, or its group was abandoned.

    A group is abandoned if an exception of the program (Ctrl-C, a signal handler's) interrupts one of its calls.
    """


class TransportError(CommlibError):
    """MPI, shared memory or the network failed, or lacks something that commlib needs."""


def line(error: BaseException) -> str:
    """Return an error as one line: its type and the beginning of its text."""
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
