"""What this adapter raises: each error is commlib's and one of tf.errors at once, so that either may be caught.

    UsageError             UsageError (a ValueError)   tf.errors.InvalidArgumentError
    NotInitializedError    UsageError (a ValueError)   tf.errors.FailedPreconditionError, InvalidArgumentError
    MismatchError          MismatchError               tf.errors.FailedPreconditionError, UnknownError
    ShutdownError          ShutdownError               tf.errors.FailedPreconditionError, UnknownError
    StallError             StallError (TimeoutError)   tf.errors.DeadlineExceededError, UnknownError
    PeerError              PeerError                   tf.errors.UnknownError
    TransportError         TransportError              tf.errors.UnknownError

The first of tf.errors is what Horovod's operations raise, where they raise one; the last is what TensorFlow makes of
an exception of that kind within a graph. All are `HorovodInternalError`, which is `commlib.CommlibError`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import commlib
from commlib import errors as core


class Error(tf.errors.OpError):  # type: ignore[misc]  # TensorFlow has no types
    """Base of these errors, to be made as those of TensorFlow are: of a node, an operation and a text."""

    code: int

    def __init__(self, node_def: Any, op: Any, message: str, *args: Any) -> None:
        tf.errors.OpError.__init__(self, node_def, op, message, self.code, *args)
        self.args = (message,)  # as exceptions of Python have it


class UsageError(Error, tf.errors.InvalidArgumentError, core.UsageError):  # type: ignore[misc]
    """This call is wrong on this rank."""

    code = tf.errors.INVALID_ARGUMENT


class NotInitializedError(Error, tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError, core.UsageError):  # type: ignore[misc]
    """This call came before `init`, or after `shutdown`."""

    code = tf.errors.FAILED_PRECONDITION


class MismatchError(Error, tf.errors.FailedPreconditionError, tf.errors.UnknownError, core.MismatchError):  # type: ignore[misc]
    """The ranks asked for different things. Raised on all of them."""

    code = tf.errors.FAILED_PRECONDITION


class ShutdownError(Error, tf.errors.FailedPreconditionError, tf.errors.UnknownError, core.ShutdownError):  # type: ignore[misc]
    """The operation had not run when commlib was shut down."""

    code = tf.errors.FAILED_PRECONDITION


class StallError(Error, tf.errors.DeadlineExceededError, tf.errors.UnknownError, core.StallError):  # type: ignore[misc]
    """A rank did not come within the time that was allowed."""

    code = tf.errors.DEADLINE_EXCEEDED


class PeerError(Error, tf.errors.UnknownError, core.PeerError):  # type: ignore[misc]
    """A rank died, raised, or left while others still waited for it."""

    code = tf.errors.UNKNOWN


class TransportError(Error, tf.errors.UnknownError, core.TransportError):  # type: ignore[misc]
    """MPI, shared memory or the network failed."""

    code = tf.errors.UNKNOWN


_CLASSES: dict[type[core.CommlibError], type[Error]] = {
    core.UsageError: UsageError,
    core.MismatchError: MismatchError,
    core.ShutdownError: ShutdownError,
    core.StallError: StallError,
    core.PeerError: PeerError,
    core.TransportError: TransportError,
}


def class_of(error: core.CommlibError) -> type[Error] | None:
    """Return which of the classes here stands for an error of the core."""
    if isinstance(error, core.UsageError) and not commlib.is_initialized():
        return NotInitializedError
    return next((_CLASSES[base] for base in type(error).__mro__ if base in _CLASSES), None)


def as_tensorflows(error: core.CommlibError) -> core.CommlibError:
    """Return an error of the core as one of this module, with the same text, cause and traceback."""
    kind = None if isinstance(error, Error) else class_of(error)
    if kind is None:
        return error
    same: core.CommlibError = kind(None, None, str(error)).with_traceback(error.__traceback__)
    same.__cause__ = error.__cause__
    return same
