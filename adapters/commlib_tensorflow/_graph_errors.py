"""Errors of host functions within graphs: raise them with their class, although TensorFlow keeps only the text.

TensorFlow raises an exception of its own with that text: tf.errors.InvalidArgumentError for a ValueError, UnknownError
for most others. `except` looks only at the class, so the exception must have the right class when it is made, and
TensorFlow has no documented way to choose it. So once one of commlib's functions has failed in a graph, and not before,
these two classes get a `__new__` that makes an exception of `commlib_tensorflow.errors`, a subclass of theirs, where
the text comes from our error. For all other texts they behave as before. TensorFlow's texts begin with the name of the
exception's class.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from typing import Any

import tensorflow as tf

from commlib import errors
from commlib.errors import CommlibError
from commlib_tensorflow.errors import class_of

_MOST_KEPT = 16

_RAISED = re.compile(r"(?:^|\s)(\w+Error): ((?:(?!\nTraceback ).)*)\nTraceback \(most recent call last\):", re.DOTALL)


class GraphErrors:
    """Record of the errors that host functions raised within graphs.

    `original` finds the exception behind an error of TensorFlow.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: deque[CommlibError] = deque(maxlen=_MOST_KEPT)
        self._replaced = False

    def note(self, error: CommlibError) -> None:
        """Record an error that is about to pass through TensorFlow."""
        with self._lock:
            # A copy: the traceback of the error itself keeps the frames, and these the tensors, of a step.
            self._last.appendleft(type(error)(str(error)))
            if not self._replaced:
                self._replaced = True
                for kind in (tf.errors.InvalidArgumentError, tf.errors.UnknownError):
                    kind.__new__ = self._maker(kind)

    def original(self, error: BaseException) -> CommlibError | None:
        """Return the recorded exception whose text `error` carries; None if there is none."""
        return self._find(str(error)) if isinstance(error, tf.errors.OpError) else None

    def _find(self, text: str) -> CommlibError | None:
        with self._lock:
            return next((error for error in self._last if f"{type(error).__name__}: {error}" in text), None)

    def _maker(self, wrapped: type) -> Any:
        def __new__(cls: type, node_def: Any = None, op: Any = None, message: Any = "", *args: Any) -> Any:
            if cls is wrapped and (error := self._find(str(message))) is not None:
                kind = class_of(error)
                if kind is not None and issubclass(kind, wrapped):
                    cls = kind
            base = OSError if issubclass(cls, OSError) else Exception  # a TimeoutError is an OSError
            return base.__new__(cls)

        return __new__


def find_program_error(error: BaseException) -> CommlibError | None:
    """Return commlib's error that a tf.py_function of the program raised; None if `error` has another cause."""
    for name, text in _RAISED.findall(str(error)) if isinstance(error, tf.errors.OpError) else ():
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, CommlibError):
            return kind(text)
    return None


graph_errors = GraphErrors()
"""One per process: a graph runs in TensorFlow's threads, possibly without a commlib frame on the stack."""
