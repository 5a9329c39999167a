"""Errors: say what went wrong, one type for each place where the fault can lie.

CommlibError                    catch this to catch everything commlib raises
├── UsageError                  this call, on this rank, is wrong: fix the call
├── MismatchError               the ranks of a group called different things: fix the program
├── PeerError                   a rank of the group died, raised or left: look at that rank
├── StallError                  a rank of the group did not come in time: look at that rank
├── ShutdownError               commlib was shut down, or the group given up, before the operation ran
└── TransportError              MPI, shared memory or the network failed: look at the system
"""

from __future__ import annotations

from collections.abc import Mapping


class CommlibError(RuntimeError):
    """Base of every error that commlib raises."""

    missing: Mapping[int, str] = {}
    """The ranks of the group that were waited for, each with why it will not come, or "": for who words it anew."""

    at_start = False
    """Raised by `init`: the other ranks have no other one, and the first can say it for all."""


class UsageError(CommlibError, ValueError):
    """This call is wrong on this rank, whatever the other ranks do. Nothing was sent."""


class MismatchError(CommlibError):
    """The ranks of a group made different calls at the same place. Raised on all of them.

    Where all have compared their calls beforehand the error says so: the group goes on. Else it runs no more calls.
    """


class PeerError(CommlibError):
    """A rank of the group died, raised, or left while others still waited for it."""


class StallError(CommlibError, TimeoutError):
    """A rank of the group did not come within the time that was allowed."""


class ShutdownError(CommlibError):
    """The operation was still pending, or was asked for, after `shutdown`, or after its group was given up.

    A group is given up if an exception of the program (Ctrl-C, a signal handler's) ends one of its calls half-way.
    """


class TransportError(CommlibError):
    """MPI, shared memory or the network failed, or lacks something that commlib needs."""


def line(error: BaseException) -> str:
    """Return an error in a line: its type, and how its text begins."""
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
