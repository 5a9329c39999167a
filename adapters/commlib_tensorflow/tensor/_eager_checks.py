"""Eagerness checks: find user code that queries whether it runs eagerly, because plans are checked in a graph."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from commlib.tensor_parallel.recording import replace_attribute

_BY_NAME = (tf.inside_function, tf.is_symbolic_tensor)
"""Other functions that return this; `tf.executing_eagerly` is intercepted under every name."""


@contextmanager
def watch_eager_checks(
    layers: Iterable[Any], note: Callable[[str], object], packages: tuple[str, ...]
) -> Iterator[None]:
    """Call `note` with each line of user code that queries whether it runs eagerly, within the context.

    layers: the user's, whose modules may import such functions by name. packages: folders of code that is not the
    user's.
    """

    def check(frame: FrameType | None) -> None:
        if frame is not None and not frame.f_code.co_filename.startswith(packages):
            note(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    def by_name(function: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(function)
        def called(*args: Any, **options: Any) -> bool:
            check(sys._getframe(1))
            return function(*args, **options)

        return called

    def executing_eagerly(own: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        if frame is not None and frame.f_code is tf.executing_eagerly.__code__:
            while frame is not None and frame.f_code.co_filename == context.__file__:  # the version 1 function calls it
                frame = frame.f_back
            check(frame)
        return plain(own)

    kind = type(context.context())
    plain = kind.executing_eagerly
    with ExitStack() as stack:
        stack.enter_context(replace_attribute(kind, "executing_eagerly", executing_eagerly))
        for owner, name in _names_of(_BY_NAME, layers):
            stack.enter_context(replace_attribute(owner, name, by_name(getattr(owner, name))))
        yield


def _names_of(functions: Iterable[Any], layers: Iterable[Any]) -> list[tuple[Any, str]]:
    """Return the names of these functions in TensorFlow, and in the modules that define the user's layers."""
    names = sorted({type(layer).__module__ for layer in layers} & set(sys.modules))
    modules = [tf, *(sys.modules[name] for name in names if not name.startswith(("keras.", "commlib")))]
    known = set(map(id, functions))
    return [(module, name) for module in modules for name, one in vars(module).items() if id(one) in known]
