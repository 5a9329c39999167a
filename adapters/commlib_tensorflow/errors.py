"""Errors that are both commlib's and TensorFlow's, so that either class can be caught.

    UsageError             UsageError (a ValueError)   tf.errors.InvalidArgumentError
    NotInitializedError    UsageError (a ValueError)   tf.errors.FailedPreconditionError, InvalidArgumentError
    MismatchError          MismatchError               tf.errors.FailedPreconditionError, UnknownError
    ShutdownError          ShutdownError               tf.errors.FailedPreconditionError, UnknownError
    StallError             StallError (TimeoutError)   tf.errors.DeadlineExceededError, UnknownError
    PeerError              PeerError                   tf.errors.UnknownError
    TransportError         TransportError              tf.errors.UnknownError

The first class of tf.errors is the one that Horovod's operations raise, if any; the last is the one that TensorFlow
makes of such an exception within a graph. All are `HorovodInternalError`, which is `commlib.CommlibError`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import commlib
from commlib import errors as core
from commlib.process.tracebacks import fold_text, shows_all


class Error(tf.errors.OpError):  # type: ignore[misc]  # TensorFlow has no types
    """Base of these errors, constructed like TensorFlow's: from a node, an operation and a text."""

    code: int

    def __init__(self, node_def: Any, op: Any, message: str, *args: Any) -> None:
        tf.errors.OpError.__init__(self, node_def, op, message, self.code, *args)
        self.args = (message,)  # like Python's exceptions

    # TensorFlow adds stacks to the text of an error, also after it is made.

    @property
    def message(self) -> str:
        """The text of the error, with the frames inside commlib folded."""
        world = commlib.world() if commlib.is_initialized() else None
        return self._message if shows_all(world) else fold_text(self._message)[0]

    @property
    def entered(self) -> str:
        """The function of commlib that the program called, if the text shows it."""
        return fold_text(self._message)[1]


def _make_class(
    like: type[core.CommlibError], code: int, *kinds: type, name: str = "", doc: str | None = None
) -> type[Error]:
    """Return an error class that derives from the core's `like` and TensorFlow's `kinds`."""
    more = {"code": code, "__doc__": doc or like.__doc__, "__module__": __name__}
    return type(name or like.__name__, (Error, *kinds, like), more)


_tf = tf.errors
UsageError = _make_class(core.UsageError, _tf.INVALID_ARGUMENT, _tf.InvalidArgumentError)
NotInitializedError = _make_class(
    core.UsageError,
    _tf.FAILED_PRECONDITION,
    _tf.FailedPreconditionError,
    _tf.InvalidArgumentError,
    name="NotInitializedError",
    doc="This call was made before `init`, or after `shutdown`.",
)
MismatchError = _make_class(core.MismatchError, _tf.FAILED_PRECONDITION, _tf.FailedPreconditionError, _tf.UnknownError)
ShutdownError = _make_class(core.ShutdownError, _tf.FAILED_PRECONDITION, _tf.FailedPreconditionError, _tf.UnknownError)
StallError = _make_class(core.StallError, _tf.DEADLINE_EXCEEDED, _tf.DeadlineExceededError, _tf.UnknownError)
PeerError = _make_class(core.PeerError, _tf.UNKNOWN, _tf.UnknownError)
TransportError = _make_class(core.TransportError, _tf.UNKNOWN, _tf.UnknownError)

_CLASSES = {
    like: kind
    for kind in (UsageError, MismatchError, ShutdownError, StallError, PeerError, TransportError)
    for like in (kind.__bases__[-1],)
}


def class_of(error: core.CommlibError) -> type[Error] | None:
    """Return the class of this module for an error of the core."""
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
