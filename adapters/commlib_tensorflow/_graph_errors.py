"""Errors that functions of the host raise within graphs, where TensorFlow keeps only the text.

TensorFlow makes an exception of its own of that text: tf.errors.InvalidArgumentError of a ValueError, UnknownError of
most others. Nobody can catch that by what was raised; and `except` looks at the class alone, so the class must be
right when the exception is made. There is no documented way to tell TensorFlow. So once a function of ours has failed
in a graph, and not before, these two classes get a `__new__` that makes one of `commlib_tensorflow.errors` where the
text is that of our error, which is a subclass of theirs. For all other texts they do what they did. TensorFlow's texts
have the name of the exception's class before what it says.
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
    """Remember what functions of the host raised within graphs.

    `original` finds the exception behind an error of TensorFlow.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: deque[CommlibError] = deque(maxlen=_MOST_KEPT)
        self._replaced = False

    def note(self, error: CommlibError) -> None:
        """Remember an error that is about to pass through TensorFlow."""
        with self._lock:
            # Not itself: its traceback has the frames, and these the tensors, of a step.
            self._last.appendleft(type(error)(str(error)))
            if not self._replaced:
                self._replaced = True
                for made in (tf.errors.InvalidArgumentError, tf.errors.UnknownError):
                    made.__new__ = self._maker(made)

    def original(self, error: BaseException) -> CommlibError | None:
        """Return the exception whose text `error` carries, None if it is another one."""
        return self._find(str(error)) if isinstance(error, tf.errors.OpError) else None

    def _find(self, text: str) -> CommlibError | None:
        with self._lock:
            return next((error for error in self._last if f"{type(error).__name__}: {error}" in text), None)

    def _maker(self, made: type) -> Any:
        def __new__(cls: type, node_def: Any = None, op: Any = None, message: Any = "", *args: Any) -> Any:
            if cls is made and (error := self._find(str(message))) is not None:
                kind = class_of(error)
                if kind is not None and issubclass(kind, made):
                    cls = kind
            base = OSError if issubclass(cls, OSError) else Exception  # which a TimeoutError is
            return base.__new__(cls)

        return __new__


def raised_by_program(error: BaseException) -> CommlibError | None:
    """Return the error of ours that a tf.py_function of the program raised, None if `error` comes from another one."""
    for name, text in _RAISED.findall(str(error)) if isinstance(error, tf.errors.OpError) else ():
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, CommlibError):
            return kind(text)
    return None


graph_errors = GraphErrors()
"""A graph runs in threads of TensorFlow, and may run without anybody of us on the stack: so this is one per process."""
