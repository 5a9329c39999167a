"""Eagerness: where a user's code asks whether it runs eagerly, which it does not where a plan is checked."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from commlib.tensor_parallel.recording import replaced

_BY_NAME = (tf.inside_function, tf.is_symbolic_tensor)
"""What else tells it; `tf.executing_eagerly` is told by whatever name somebody has it."""


@contextmanager
def asked(layers: Iterable[Any], note: Callable[[str], object], packages: tuple[str, ...]) -> Iterator[None]:
    """Let `note` hear of the lines of a user's code that ask whether they run eagerly, for a while.

    layers: the user's, whose modules may have such functions under names. packages: folders of what is not the user's.
    """

    def hear(frame: FrameType | None) -> None:
        if frame is not None and not frame.f_code.co_filename.startswith(packages):
            note(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    def by_name(function: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(function)
        def called(*args: Any, **options: Any) -> bool:
            hear(sys._getframe(1))
            return function(*args, **options)

        return called

    def executing_eagerly(own: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        if frame is not None and frame.f_code is tf.executing_eagerly.__code__:
            while frame is not None and frame.f_code.co_filename == context.__file__:  # that of version 1 calls it
                frame = frame.f_back
            hear(frame)
        return plain(own)

    kind = type(context.context())
    plain = kind.executing_eagerly
    with ExitStack() as stack:
        stack.enter_context(replaced(kind, "executing_eagerly", executing_eagerly))
        for owner, name in _names_of(_BY_NAME, layers):
            stack.enter_context(replaced(owner, name, by_name(getattr(owner, name))))
        yield


def _names_of(functions: Iterable[Any], layers: Iterable[Any]) -> list[tuple[Any, str]]:
    """Return under which names TensorFlow, and the modules in which the user's layers are defined, have these."""
    names = sorted({type(layer).__module__ for layer in layers} & set(sys.modules))
    modules = [tf, *(sys.modules[name] for name in names if not name.startswith(("keras.", "commlib")))]
    known = set(map(id, functions))
    return [(module, name) for module in modules for name, one in vars(module).items() if id(one) in known]
